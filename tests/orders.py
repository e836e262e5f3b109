"""Random orders of what users do to a model, and laws no order may break.

python -m tests.orders [--count 2000] [--seed 0] [--replicas 2]
                       [--modes eager graph xla] [--order JSON]

Prints each failing order, shrunk, as a line for `--order`, and a summary.
KERAS_BACKEND=jax runs the same orders under JAX.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import inspect
import json
import os
import pathlib
import random
import re
import sys
import tempfile
import time
import traceback
import types
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import tfmix
from tests import helpers

TENSORFLOW = keras.backend.backend() == "tensorflow"
SIXTEEN = ("float16", "bfloat16")
POLICIES = ("mixed_float16", "mixed_bfloat16", *SIXTEEN, "O1", "O2")
KINDS = ("sequential", "functional", "subclassed")
# Slots in 8 bits, of variables as small as these, too.
EIGHT_BITS = {"slot_dtype": [("", "int8")], "seed": 3}
# What stands around the optimizer that a user gives, inside of the scaler.
WRAPS = {
    "bare": None,
    "scaled": None,
    "masters": tfmix.MasterWeightOptimizer,
    "flat": functools.partial(tfmix.MasterWeightOptimizer, flat=True),
    "split": functools.partial(tfmix.MasterWeightOptimizer, split=True),
    "kahan": functools.partial(tfmix.BFloat16Optimizer, rounding="kahan"),
    "stochastic": functools.partial(tfmix.BFloat16Optimizer, seed=3),
    "low": functools.partial(tfmix.LowMemoryOptimizer, **EIGHT_BITS),
    "masters8": functools.partial(tfmix.MasterWeightOptimizer, **EIGHT_BITS),
}
# The dtypes of variables that those refuse.
REFUSES = {
    **dict.fromkeys(("split", "kahan", "stochastic"), ("float16",)),
    "low": SIXTEEN,
    # It may be any of these.
    "any": SIXTEEN,
}
FROZEN = ("first", "bn", "last")
# So small that a 16-bit weight without a master stays where it is.
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(1e-3),
    "momentum": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-3),
}
# Drawn as often as they stand here. A step that has no meaning where it
# stands (an undo without a conversion) does nothing.
STEPS = (
    *(f"apply:{policy}" for policy in POLICIES),
    *(f"apply:{policy}" for policy in POLICIES[:4]),
    *["apply:float32"] * 4,
    *(f"compile:{name}:{wrap}" for name in OPTIMIZERS for wrap in WRAPS),
    *["compile:same"] * 2,
    *(f"freeze:{layer}" for layer in FROZEN),
    *["thaw"] * 2,
    *["file"] * 3,
    *["weights"] * 2,
    *(f"copy:{policy}" for policy in ("float32", *POLICIES[:4])),
    *(f"global:{policy}" for policy in ("float32", "float32", *POLICIES[:4])),
    *(f"scope:{policy}" for policy in ("float32", *POLICIES[:3])),
    *["guard"] * 2,
    *["check", "calibrate", "scale_monitor", "numerics_monitor"],
    *["log"] * 2,
    *["forget"] * 2,
)
# Those that change neither the model nor what is in force for it.
LOOKING = ("check", "calibrate", "scale_monitor", "numerics_monitor")
PASSIVE = ("guard", "check", "calibrate", "file", "weights")
# Of the steps after a conversion.
UNDO_SHARE = 0.25
# Of one step's update, in float16 and bfloat16 arithmetic against float32.
UPDATE_ERROR = 0.3
LOSS_ERROR = 0.05
# A scale that is too high halves once per skipped step; from 2**24 to 1.
MOST_SKIPS = 26


@dataclasses.dataclass(frozen=True)
class Order:
    """How a model is made, and what is done to it then."""

    steps: tuple[str, ...]
    kind: str = "sequential"
    made: str = "float32"
    optimizer: str = "sgd"
    wrap: str = "bare"
    mode: str = "eager"
    replicas: int = 1
    # Whether conversions stand inside of the strategy's scope.
    inside: bool = True

    def __str__(self):
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text):
        fields = json.loads(text)
        return cls(**{**fields, "steps": tuple(fields["steps"])})


class Refused(Exception):
    """A step that tfmix refuses as documented: the order ends."""


class Broken(AssertionError):
    """A law that does not hold; the message starts with its letter."""


def draw(rng, replicas=1, modes=None):
    """Draws an order from a `random.Random`, or from hypothesis's."""
    weights = {"eager": 82, "graph": 12, "xla": 6}
    modes = modes or [m for m in weights if _runs(m, replicas)]
    mode = rng.choice([m for m in modes for _ in range(weights[m])])
    # Each conversion and `compile` has a graph traced anew.
    longest = 6 if mode == "eager" else 3
    steps = []
    for _ in range(rng.randint(1, longest)):
        converted = any(step.startswith("apply:") for step in steps)
        undo = converted and rng.random() < UNDO_SHARE
        steps.append("undo" if undo else rng.choice(STEPS))
    return Order(
        steps=tuple(steps),
        kind=rng.choice(KINDS),
        made=rng.choice(("float32", *POLICIES)),
        optimizer=rng.choice(list(OPTIMIZERS)),
        wrap=rng.choice(list(WRAPS)),
        mode=mode,
        replicas=replicas,
        inside=rng.choice((True, False)) if replicas > 1 else True,
    )


def _runs(mode, replicas):
    # Keras's own replicas do not run under XLA on a CPU; JAX always does.
    return mode != "xla" or (TENSORFLOW and replicas == 1)


def numbered(number, seed=0, replicas=1, modes=None):
    """Returns the order of a number; the same for a seed, always."""
    rng = random.Random(f"{seed}/{number}")
    return draw(rng, replicas, modes)


# ------------------------------------------------------------ model and data


@keras.saving.register_keras_serializable(package="tests.orders")
class Own(keras.Model):
    """The same layers, in a `call`."""

    def __init__(self, parts=None, **kwargs):
        super().__init__(**kwargs)
        if parts:
            load = keras.saving.deserialize_keras_object
            parts = [load(one) for one in parts]
        self.first, self.bn, self.last = parts or _layers()

    def get_config(self):
        parts = self.first, self.bn, self.last
        parts = [keras.saving.serialize_keras_object(one) for one in parts]
        return {**super().get_config(), "parts": parts}

    def build(self, shape):
        self.first.build(shape)
        self.bn.build((None, 4))
        self.last.build((None, 4))

    def call(self, x, training=False):
        hidden = keras.ops.tanh(self.bn(self.first(x), training=training))
        return keras.ops.cast(self.last(hidden), "float32")


def _layers():
    return (
        # A bias before BatchNormalization has no gradient but noise.
        keras.layers.Dense(4, use_bias=False, name="first"),
        keras.layers.BatchNormalization(momentum=0.9, name="bn"),
        keras.layers.Dense(2, name="last"),
    )


def make_model(kind):
    """Returns a small model with the same weights each time."""
    if kind == "subclassed":
        model = Own()
        model.build((None, 4))
    else:
        first, bn, last = _layers()
        tanh = keras.layers.Activation("tanh", name="tanh")
        layers = [first, bn, tanh, last]
        if kind == "functional":
            # Its head computes in 16 bit, a sequential one's in float32.
            layers.append(tfmix.float32_output(name="out"))
            inputs = outputs = keras.Input((4,))
            for layer in layers:
                outputs = layer(outputs)
            model = keras.Model(inputs, outputs)
        else:
            model = keras.Sequential([keras.Input((4,)), *layers])
    model.set_weights(_data().weights)
    return model


@functools.cache
def _data():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(8, 4)).astype("float32")
    y = (0.5 * x[:, :2] + 0.2 * x[:, 2:]).astype("float32")
    bad = x.copy()
    bad[3, 1] = np.inf
    shapes = [(4, 4), (4,), (4,), (4,), (4,), (4, 2), (2,)]
    weights = [rng.uniform(0.2, 0.8, s).astype("float32") for s in shapes]
    for matrix in (weights[0], weights[5]):
        matrix *= rng.choice(np.float32([-1, 1]), matrix.shape)
    return types.SimpleNamespace(x=x, y=y, bad=bad, weights=weights)


@functools.cache
def _replica_batches():
    """Returns a good batch for one replica and a bad one for the other."""
    import tensorflow as tf

    data = _data()
    rows = tf.constant(data.x), tf.constant(data.bad)
    y = tf.constant(data.y)
    strategy = helpers.mirrored_strategy()
    return strategy.experimental_distribute_values_from_function(
        lambda context: (rows[context.replica_id_in_sync_group], y)
    )


class Twin:
    """The same training in float32, by Keras alone."""

    _models = {}

    def __init__(self, name, frozen):
        self.name, self.frozen = name, frozenset(frozen)
        self.slots = None
        self.weights = None

    @classmethod
    def prepare(cls):
        """Compiles all models while no policy is in force."""
        for name, make in OPTIMIZERS.items() if not cls._models else ():
            for frozen in (None, *FROZEN):
                model = make_model("sequential")
                if frozen:
                    model.get_layer(frozen).trainable = False
                optimizer = make()
                optimizer.build(model.trainable_variables)
                model.compile(optimizer, "mse")
                cls._models[name, frozenset([frozen] if frozen else [])] = model

    def train(self, steps):
        """Returns the weights after some steps, and the last loss."""
        model = self._models[self.name, self.frozen]
        state = [
            variable
            for variable in model.optimizer.variables
            if "learning_rate" not in variable.path
        ]
        slots = self.slots or [np.zeros(v.shape, v.dtype) for v in state]
        for variable, value in zip(state, slots, strict=True):
            variable.assign(value)
        model.set_weights(self.weights)
        for _ in range(steps):
            loss = model.train_on_batch(_data().x, _data().y)
        self.slots = helpers.snapshot(state)
        self.weights = model.get_weights()
        return self.weights, float(loss)


# ------------------------------------------------------------------- machine


class Machine:
    """Runs one order, and checks the laws after each step."""

    def __init__(self, order, folder):
        Twin.prepare()
        self.order = order
        self.undos = []
        self.frozen = set()
        self.global_policy = "float32"
        self.folder = pathlib.Path(folder)
        self.guarded = self.asked = self.compiled_since = False
        many = order.replicas > 1
        self.strategy = helpers.mirrored_strategy() if many else None
        with self._scope(), tfmix.policy_scope(order.made):
            self.model = make_model(order.kind)
            self.dtypes = _dtypes(self.model)
            self._compile(order.optimizer, order.wrap)
        if order.made not in ("float32", "O1"):
            made = tfmix.Policy(order.made)
            expected = made.compute_dtype, made.variable_dtype
            _law("b", self.dtypes["first"] == expected, f"made {self.dtypes}")
        # What a model is used under if it does not carry a policy itself.
        self.home = order.made
        self.carries = True
        self.last = tfmix.export_float32(self.model)

    def run(self):
        """Runs the whole order; raises at the first law broken."""
        with contextlib.suppress(Refused), self._refusing():
            self.laws("made")
            for step in self.order.steps:
                self.do(step)
            self._phase(self._step, 2, "end")
        tfmix.set_global_policy("float32")
        _law("f", *_replaced())

    @contextlib.contextmanager
    def _refusing(self):
        """Ends the order where an optimizer says it cannot hold a dtype."""
        try:
            yield
        except ValueError as error:
            refused = REFUSES.get(self.wrap, ())
            if any(f"of dtype '{dtype}'" in str(error) for dtype in refused):
                raise Refused from error
            raise

    def do(self, step):
        """Takes one step and checks the laws."""
        name, *arguments = step.split(":")
        getattr(self, f"_{name}")(*arguments)
        if name != "scope":
            self._check_guard()
            self.laws(step)

    def _check_guard(self):
        """A guard that was asked for refuses an optimizer that cannot skip.

        Not if a conversion has taken tfmix's own wrapper off.
        """
        if not self.asked or _is_scaled(self.model) or not self.compiled_since:
            return
        try:
            self._phase(self._step, 1, "guarded")
        except ValueError as error:
            if "can be guarded" in str(error):
                raise Refused from error
            raise

    # ------------------------------------------------------------ the steps

    def _apply(self, policy):
        before = self.dtypes, self.carries, self.home, self.guarded
        state = _state(self.model)
        inside = self._scope if self.order.inside else _nothing
        try:
            with inside(), self._refusing():
                report = tfmix.apply_policy(self.model, policy)
        except Refused:
            now = _state(self.model)
            _law("s", *_same_state(state, now, "a refused conversion"))
            self.laws("refused")
            raise
        self.undos.append((report.undo, before))
        self._converted(policy)

    def _converted(self, policy):
        self.dtypes = _converted_dtypes(
            self.order.kind, policy, self.dtypes, _dtypes(self.model)
        )
        self.home, self.carries = policy, policy != "float32"
        self.guarded = bool(_chain(self.model)[1:]) and policy != "float32"

    def _undo(self):
        if not self.undos:
            return
        undo, before = self.undos.pop()
        with self._scope() if self.order.inside else _nothing():
            undo()
        self.dtypes, self.carries, self.home, _ = before
        self.guarded = False

    def _compile(self, name, wrap="bare"):
        if name == "same":
            given, self.wrap = self.model.optimizer, "any"
        else:
            self.name, self.wrap = name, wrap
            with self._scope():
                given = _wrapped(OPTIMIZERS[name](), wrap)
            self.twin = Twin(name, self.frozen)
        settings = {"run_eagerly": self.order.mode == "eager"}
        if TENSORFLOW:
            settings["jit_compile"] = self.order.mode == "xla"
        with self._scope(), self._at_home():
            metrics = [keras.metrics.MeanAbsoluteError(name="mae")]
            self.model.compile(given, "mse", metrics=metrics, **settings)
        self.compiled_since = True
        self.guarded = _is_scaled(self.model) and any(
            dtype in SIXTEEN for pair in self.dtypes.values() for dtype in pair
        )

    def _freeze(self, *layers):
        # Not by `model.trainable`: in Keras that thaws no layer.
        for layer in _named(self.model):
            layer.trainable = layer.name not in layers
        self.frozen = set(layers)
        self._compile(self.name, self.wrap if self.wrap in WRAPS else "bare")

    _thaw = _freeze

    def _file(self):
        path = self.folder / "model.keras"
        self.model.save(path)
        before = _state(self.model)
        with self._scope():
            loaded = keras.saving.load_model(path)
        self._replace(loaded)
        _law("s", *_same_state(before, _state(self.model), "a file"))

    def _replace(self, model):
        """Goes on with another model, whose optimizer nobody gave by hand."""
        self.model, self.undos, self.carries = model, [], False
        self.wrap = "any"
        self.guarded = False
        model.run_eagerly = self.order.mode == "eager"

    def _weights(self):
        path = self.folder / "model.weights.h5"
        self.model.save_weights(path)
        before, slots = _state(self.model), self.twin.slots
        weights = tfmix.export_float32(self.model)
        self._train(1)
        with self._scope():
            self.model.load_weights(path)
        self.twin.slots, self.last = slots, weights
        _law("s", *_same_state(before, _state(self.model), "a weights file"))

    def _copy(self, policy):
        source, before = self.model, _state(self.model)
        dtypes = _dtypes(source)
        with self._scope():
            twin = tfmix.convert_model(source, policy)
        _law("s", *_same_state(before, _state(source), "being copied"))
        _law("b", _dtypes(source) == dtypes, "the source of a copy changed")
        self._replace(twin)
        self._converted(policy)

    def _global(self, policy):
        tfmix.set_global_policy(policy)
        self.global_policy = policy
        self._new_layer(policy)
        if policy == "float32":
            _law("f", *_replaced())

    def _scope(self, *policy):
        if not policy:
            return self.strategy.scope() if self.strategy else _nothing()
        with tfmix.policy_scope(*policy):
            self._new_layer(*policy)
            self.laws(f"scope:{policy[0]}")
        return self._new_layer(self.global_policy)

    def _new_layer(self, policy):
        expected = tfmix.Policy(policy)
        found = keras.layers.Dense(1).dtype_policy
        found = found.compute_dtype, found.variable_dtype
        wanted = expected.compute_dtype, expected.variable_dtype
        _law("b", found == wanted, f"a new layer under {policy} has {found}")

    def _guard(self):
        if _is_scaled(self.model):
            tfmix.guard(self.model)
            self.guarded = self.asked = True
            self.compiled_since = False
            return
        try:
            tfmix.guard(self.model)
        except ValueError:
            return
        raise Broken("d: a model was guarded whose optimizer skips nothing")

    def _check(self):
        before = _state(self.model)
        report = tfmix.check(self.model, _data().x, _data().y)
        _law("s", *_same_state(before, _state(self.model), "a check"))
        _law("s", bool(report.rows), "the check has no rows")
        wrong = [r for r in report.rows if r.verdict in ("overflow",)]
        _law("s", not wrong, f"the check finds {wrong}")

    def _calibrate(self):
        before = _state(self.model)
        scale = tfmix.calibrate_loss_scale(self.model, _data().x, _data().y)
        _law("s", *_same_state(before, _state(self.model), "calibrating"))
        _law("s", 1 <= scale <= 2**24, f"calibrated a scale of {scale}")

    def _scale_monitor(self):
        self._fit(tfmix.callbacks.LossScaleMonitor(every=1))

    def _numerics_monitor(self):
        monitor = tfmix.callbacks.NumericsMonitor(every=1)
        self._fit(monitor)
        _law("s", bool(monitor.rows), "the monitor has no rows")
        _law("s", not monitor.events, f"the monitor finds {monitor.events}")

    def _fit(self, callback):
        data = _data()
        x, y = (np.tile(a, (self.order.replicas, 1)) for a in (data.x, data.y))

        def step():
            self.model.fit(
                x,
                y,
                batch_size=len(x),
                shuffle=False,
                verbose=0,
                callbacks=[callback],
            )

        self._phase(step, 1, "fit")

    def _log(self):
        if _is_scaled(self.model):
            loop = _tensorflow_loop if TENSORFLOW else _jax_loop
            self._phase(lambda: loop(self), 1, "loop")

    def _forget(self):
        # What a user put on divides all the same, and warns.
        if not _is_scaled(self.model) or self.model.optimizer.unasked:
            loop = _tensorflow_loop if TENSORFLOW else _jax_loop
            self._phase(lambda: loop(self, scales=False), 1, "forget")

    # ------------------------------------------------------------- the laws

    def laws(self, step):
        """Checks all of them, of which some train the model."""
        self._check_dtypes()
        self._check_optimizer()
        self._check_weights(step)
        self._phase(self._step, 1, step)
        if step.split(":")[0] not in LOOKING:
            self._check_bad_step()
        self._check_replicas()
        self._check_dtypes()

    def _step(self, bad=False):
        """Trains on a batch; of two replicas only the last has a bad one."""
        data, model = _data(), self.model
        if bad and self.strategy:
            model.make_train_function()
            logs = model.train_function(iter([_replica_batches()]))
        else:
            x = data.bad if bad else data.x
            logs = model.train_on_batch(x, data.y, return_dict=True)
        return float(logs["loss"])

    def _train(self, steps, step=None):
        """Trains until so many steps were applied; returns the last loss."""
        iterations = self.model.optimizer.iterations
        first = _number(iterations)
        tries, loss = 0, None
        while _number(iterations) < first + steps:
            _law("a", tries < steps + MOST_SKIPS, f"{tries} steps skipped")
            loss = (step or self._step)()
            tries += 1
        _law("a", _number(iterations) == first + steps, "too many iterations")
        return loss

    def _phase(self, step, steps, where):
        """Trains, and compares with the twin."""
        rounds = any(getattr(o, "seed", None) for o in _chain(self.model))
        before = self.twin.weights = tfmix.export_float32(self.model)
        loss = self._train(steps, step)
        expected, expected_loss = self.twin.train(steps)
        after = self.last = tfmix.export_float32(self.model)
        if loss is not None:
            error = abs(loss - expected_loss) / expected_loss
            bound = LOSS_ERROR * (1 + rounds)
            _law("a", error < bound, f"loss {loss}, not {expected_loss}")
        names = [v.path.split("/")[-2:] for v in self.model.weights]
        dtypes = [v.dtype for v in self.model.weights]
        for name, dtype, old, new, right in zip(
            names, dtypes, before, after, expected, strict=True
        ):
            moved, wanted = new - old, right - old
            bound = UPDATE_ERROR * np.linalg.norm(wanted)
            if "moving" in name[-1] and dtype in SIXTEEN:
                bound += steps * 2.0**-7 * np.linalg.norm(old)
            elif rounds and dtype in SIXTEEN:
                # A whole step of the format, up or down.
                bound += steps * 2.0**-7 * np.linalg.norm(np.abs(old) + wanted)
            error = np.linalg.norm(moved - wanted)
            _law(
                "a",
                error <= bound + 1e-6,
                f"{'/'.join(name)} moved by {moved.ravel()[:3]}, not "
                f"{wanted.ravel()[:3]} ({where})",
            )

    def _check_dtypes(self):
        found = _dtypes(self.model)
        _law("b", found == self.dtypes, f"{found}, not {self.dtypes}")
        for layer in _named(self.model):
            for variable in layer.weights:
                _law(
                    "b",
                    variable.dtype
                    == layer.variable_dtype
                    == keras.backend.standardize_dtype(variable.value.dtype),
                    f"{variable.path} is {variable.dtype}",
                )

    def _check_optimizer(self):
        chain = _chain(self.model)
        found = [type(one).__name__ for one in chain]
        half = any(pair[0] in SIXTEEN for pair in self.dtypes.values())
        pure = any(pair[1] in SIXTEEN for pair in self.dtypes.values())
        scaled = half or pure or self.wrap != "bare"
        inner = type(OPTIMIZERS[self.name]()).__name__
        keepers = {"MasterWeightOptimizer", "BFloat16Optimizer"}
        keepers.add("LowMemoryOptimizer")
        wanted = ["LossScaleOptimizer"] * scaled
        if make := WRAPS.get(self.wrap):
            wanted.append(type(make(OPTIMIZERS[self.name]())).__name__)
        elif pure:
            wanted.append("MasterWeightOptimizer")
        wanted.append(inner)
        if self.wrap == "any":
            right = found[-1] == inner and (
                "LossScaleOptimizer" in found or not (half or pure)
            )
            right &= bool(keepers & set(found)) or not pure
        else:
            right = found == wanted
        _law("e", right, f"the optimizer is {found}, not {wanted}")
        given = OPTIMIZERS[self.name]().get_config()
        config = chain[-1].get_config()
        for key in ("learning_rate", "momentum", "beta_1"):
            if key in given:
                same = abs(config[key] - given[key]) < 1e-7
                _law("e", same, f"the optimizer has {key}={config[key]}")
        if found[0] == "LossScaleOptimizer":
            ours = isinstance(chain[0], tfmix.LossScaleOptimizer)
            _law("e", ours, "the optimizer is Keras's own scaler")

    def _check_weights(self, step):
        """No step but training moves a weight; a cast may round it."""
        now = tfmix.export_float32(self.model)
        for variable, old, new in zip(
            self.model.weights, self.last, now, strict=True
        ):
            # A new optimizer has new masters, made from 16-bit variables.
            casts = step.split(":")[0] not in ("global", "scope", *PASSIVE)
            bound = 2.0**-7 * np.abs(old) if casts else 0.0
            right = bool(np.all(np.abs(new - old) <= bound))
            _law("s", right, f"{variable.path} was {old}, is {new} ({step})")

    def _check_bad_step(self):
        if not _is_scaled(self.model):
            return
        model, chain = self.model, _chain(self.model)
        kept = {id(v): v for one in chain[1:] for v in one.variables}
        kept |= {id(v): v for v in (*model.trainable_variables,)}
        kept[id(model.optimizer.iterations)] = model.optimizer.iterations
        rest = [*model.non_trainable_variables, *model.metrics_variables]
        if self.guarded:
            # `train_on_batch` does so by itself.
            model.reset_metrics()
            kept |= {id(v): v for v in rest}
        kept = list(kept.values())
        before, spared = helpers.snapshot(kept), helpers.snapshot(rest)
        self._step(bad=True)
        after = helpers.snapshot(kept)
        changed = [
            variable.path
            for variable, old, new in zip(kept, before, after, strict=True)
            if old.tobytes() != new.tobytes()
        ]
        _law("d", not changed, f"a bad step changes {changed}")
        for variable, old in zip(rest, spared, strict=True):
            if not self.guarded:
                variable.assign(old)

    def _check_replicas(self):
        if self.strategy is None:
            return
        for variable in (*self.model.weights, *self.model.optimizer.variables):
            values = self.strategy.experimental_local_results(variable.value)
            plain = "SyncOnRead" not in type(variable.value).__name__
            mirrored = len(values) == self.order.replicas
            _law("c", mirrored, f"{variable.path} is not mirrored")
            first = values[0].numpy().tobytes()
            equal = all(v.numpy().tobytes() == first for v in values)
            _law("c", equal or not plain, f"{variable.path} differs")

    def _at_home(self):
        """A loaded 16-bit model is compiled under its policy, as one should."""
        if getattr(self, "carries", True) or self.home == "float32":
            return _nothing()
        return tfmix.policy_scope(self.home)


_nothing = contextlib.nullcontext


def _law(letter, holds, message=""):
    if not holds:
        raise Broken(f"{letter}: {message}")


def _number(variable):
    return int(keras.ops.convert_to_numpy(variable.value))


def _wrapped(optimizer, wrap):
    if wrap == "bare":
        return optimizer
    if WRAPS[wrap]:
        optimizer = WRAPS[wrap](optimizer)
    return tfmix.LossScaleOptimizer(optimizer, initial_scale=2.0**10)


def _named(model):
    return [model.get_layer(name) for name in FROZEN]


def _dtypes(model):
    return {
        layer.name: (layer.compute_dtype, layer.variable_dtype)
        for layer in _named(model)
    }


@functools.cache
def fresh_dtypes(kind, policy):
    with tfmix.policy_scope("float32"):
        model = make_model(kind)
    tfmix.apply_policy(model, policy)
    return _dtypes(model)


def _converted_dtypes(kind, policy, before, found):
    """Returns what a conversion may make, as near to `found` as allowed.

    In a model with 16-bit layers a float32 one may stay: somebody may have
    meant it.
    """
    fresh = fresh_dtypes(kind, policy)
    wide = ("float32", "float32")
    if all(pair == wide for pair in before.values()):
        return fresh
    return {
        name: wide if before[name] == wide == found[name] else fresh[name]
        for name in fresh
    }


def _chain(model):
    """Returns the optimizer and what it wraps, outermost first."""
    chain = [model.optimizer]
    while "inner_optimizer" in vars(chain[-1]):
        chain.append(chain[-1].inner_optimizer)
    return chain


def _is_scaled(model):
    return isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def _state(model):
    """Copies a model's weights and its optimizer's variables."""
    found = [*model.weights, *model.optimizer.variables]
    values = [*tfmix.export_float32(model), *helpers.snapshot(found)]
    names = [v.path for v in model.weights] + [v.path for v in found]
    pairs = zip(names, values, strict=True)
    return [(n.split("/")[-1], v.tobytes()) for n, v in pairs]


def _same_state(before, after, what):
    count = f"{len(before)} variables are {len(after)} after {what}"
    if len(before) != len(after):
        return False, count
    pairs = zip(before, after, strict=True)
    changed = [old[0] for old, new in pairs if old[1] != new[1]]
    return not changed, f"{changed} changed by {what}"


# --------------------------------------------------------------- hand-made loop


def _tensorflow_loop(machine, scales=True):
    """A loop that unscales gradients to log them, then applies them scaled.

    Or one that knows nothing of a scale.
    """
    import tensorflow as tf

    model, replicas = machine.model, machine.order.replicas
    optimizer = model.optimizer

    def step(x, y):
        with tf.GradientTape() as tape:
            got = tf.cast(model(x, training=True), "float32")
            loss = tf.reduce_mean((got - y) ** 2) / replicas
            if scales:
                loss = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        grads = tape.gradient(loss, variables)
        if scales:
            optimizer.unscale_gradients(grads)
        optimizer.apply(grads, variables)

    data = _data()
    if machine.order.mode != "eager":
        step = tf.function(step, jit_compile=machine.order.mode == "xla")
    if machine.strategy is None:
        step(data.x, data.y)
    else:
        machine.strategy.run(step, args=(data.x, data.y))


def _jax_loop(machine, scales=True):
    """The same with the functions of Keras that hold no state."""
    import jax

    model, optimizer = machine.model, machine.model.optimizer
    x, y = _data().x, _data().y
    wrap = jax.jit if machine.order.mode != "eager" else lambda f: f

    def scaled_loss(trainable, rest, state):
        got, rest = model.stateless_call(trainable, rest, x, training=True)
        loss = jax.numpy.mean((got.astype("float32") - y) ** 2)
        if not scales:
            return loss, rest
        mapping = zip(optimizer.variables, state, strict=True)
        with keras.StatelessScope(state_mapping=mapping):
            return optimizer.scale_loss(loss), rest

    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
    )
    trainable, rest, state = [[v.value for v in group] for group in groups]
    grads, rest = wrap(jax.grad(scaled_loss, has_aux=True))(
        trainable, rest, state
    )

    def unscaled(grads, state):
        mapping = zip(optimizer.variables, state, strict=True)
        with keras.StatelessScope(state_mapping=mapping):
            return optimizer.unscale_gradients(grads)

    if scales:
        wrap(unscaled)(grads, state)
    trainable, state = wrap(optimizer.stateless_apply)(state, grads, trainable)
    for group, values in zip(groups, (trainable, rest, state), strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)


# ---------------------------------------------------------- Keras as it was


@functools.cache
def _keras_before():
    """Notes each attribute of each module and class of Keras."""
    owners = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "keras" or module is None:
            continue
        owners[name] = module
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__.startswith("keras."):
                owners[f"{value.__module__}.{value.__qualname__}"] = value
    return [
        (f"{owner}.{name}", found, name, value)
        for owner, found in owners.items()
        for name, value in list(vars(found).items())
        if callable(value) or isinstance(value, property | classmethod)
    ]


_MISSING = object()


def _replaced():
    """Returns whether Keras is as it was, and what is not."""
    different = [
        label
        for label, owner, name, value in _keras_before()
        if vars(owner).get(name, _MISSING) is not value
    ]
    return not different, f"still replaced in Keras: {different[:4]}"


# --------------------------------------------------------------------- running


def run(order):
    """Runs an order; raises what it breaks. Leaves no policy behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)
        try:
            _keras_before()
            with tempfile.TemporaryDirectory() as folder:
                Machine(order, folder).run()
        finally:
            tfmix.set_global_policy("float32")
            keras.utils.clear_session(free_memory=False)


def failure(order):
    """Returns in a line what an order breaks; an empty string if nothing."""
    try:
        run(order)
    except Exception as error:
        return _gist(error)
    return ""


def _gist(error):
    text = " ".join(str(error).split())[:300]
    if isinstance(error, Broken):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/tfmix/" in f.filename] or frames
    last = ours[-1]
    place = f"{last.filename.split('/tfmix/')[-1]}:{last.lineno} {last.name}"
    return f"raises {type(error).__name__} at {place}: {text}"


def kind_of(text):
    """Returns what two failures with one cause have in common."""
    head = re.sub(r"[-+]?\d[\d.e+-]*|'[^']*'|\"[^\"]*\"", "#", text)
    return head[:90]


def shrunk(order):
    """Returns the smallest order found that still breaks the same."""
    wanted = kind_of(failure(order))
    changed = True
    while changed and wanted:
        changed = False
        for smaller in _smaller(order):
            if kind_of(failure(smaller)) == wanted:
                order, changed = smaller, True
                break
    return order


def _smaller(order):
    """Yields orders with a step less or a plainer setting."""
    for index in range(len(order.steps)):
        steps = order.steps[:index] + order.steps[index + 1 :]
        yield dataclasses.replace(order, steps=steps)
    plainest = Order(steps=order.steps)
    for field in ("made", "wrap", "kind", "optimizer", "mode"):
        value = getattr(plainest, field)
        if getattr(order, field) != value:
            yield dataclasses.replace(order, **{field: value})


def run_many(count, seed, replicas=1, modes=None, report=print, shrink=True):
    """Runs numbered orders; returns the failures by kind, with an order."""
    found = collections.defaultdict(list)
    for number in range(count):
        order = numbered(number, seed, replicas, modes)
        text = failure(order)
        if not text:
            continue
        kind = kind_of(text)
        if shrink and not found[kind]:
            order = shrunk(order)
            text = failure(order)
        if not found[kind]:
            report(f"number {number}, seed {seed}: {text}\n    {order}")
        found[kind].append((number, order))
    return found


def _split_the_cpu():
    if TENSORFLOW:
        import tensorflow as tf

        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )


def main(arguments=None):
    """Runs orders from the command line; 1 if any breaks a law."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=("eager", "graph", "xla"))
    parser.add_argument("--order", help="one order, as printed")
    parser.add_argument("--no-shrink", action="store_true")
    asked = parser.parse_args(arguments)
    _split_the_cpu()
    if asked.order:
        run(Order.parse(asked.order))
        print("no law is broken")
        return 0
    start = time.monotonic()
    found = run_many(
        asked.count,
        asked.seed,
        asked.replicas,
        asked.modes,
        functools.partial(print, flush=True),
        not asked.no_shrink,
    )
    for kind, cases in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(cases):5} x {kind}")
    failures = sum(map(len, found.values()))
    print(
        f"{keras.backend.backend()}, {asked.replicas} replica(s), seed "
        f"{asked.seed}: {asked.count} orders, {failures} failed in "
        f"{len(found)} ways, {time.monotonic() - start:.0f} s"
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
