"""Runs the steps of an order, and checks the laws after each."""

import contextlib
import pathlib
import tempfile
import warnings
from unittest import mock

import keras
import numpy as np

import tfmix
from tests import helpers, loops
from tests.orders.laws import (
    Broken,
    chain_of,
    converted_dtypes,
    dtypes_of,
    is_scaled,
    keras_before,
    law,
    named_layers,
    replaced,
    same_state,
    state_of,
)
from tests.orders.models import (
    Baseline,
    make_model,
    replica_batches,
    small_data,
)
from tests.orders.order import OPTIMIZERS, REFUSES, SIXTEEN, TENSORFLOW, WRAPS
from tfmix._keras import optimizers
from tfmix.optimizers import eight_bit_slots

# Steps that change neither the model nor its active policy.
LOOKING = ("check", "scale_monitor")
PASSIVE = ("guard", "check", "file", "weights")
# Allowed errors of one update and loss in 16 bit, compared with float32.
UPDATE_ERROR = 0.3
LOSS_ERROR = 0.05
# A scale that is too high halves in each skipped step, from 2**24 to 1.
MOST_SKIPS = 26


class Refused(Exception):
    """A step that tfmix refuses, as documented, which ends the order."""


class Machine:
    """Runs one order, and checks the laws after each step."""

    def __init__(self, order, folder):
        Baseline.prepare()
        self.order = order
        self.undos = []
        self.frozen = set()
        self.global_policy = "float32"
        self.folder = pathlib.Path(folder)
        self.guarded = self.asked = self.compiled_since = False
        many = order.replicas > 1
        self.strategy = helpers.mirrored_strategy() if many else None
        with self._on_replicas(), tfmix.policy_scope(order.made):
            self.model = make_model(order.kind)
            self.dtypes = dtypes_of(self.model)
            self._compile(order.optimizer, order.wrap)
        if order.made not in ("float32", "O1"):
            made = tfmix.Policy(order.made)
            expected = made.compute_dtype, made.variable_dtype
            law("b", self.dtypes["first"] == expected, f"made {self.dtypes}")
        # The policy under which the model is used if it has none itself.
        self.home = order.made
        self.carries = order.made != "float32"
        self.last = tfmix.optimizers.export_float32(self.model)

    def run(self):
        """Runs the whole order; raises an error at the first broken law."""
        with contextlib.suppress(Refused), self._refusing():
            self.laws("made")
            for step in self.order.steps:
                self.do(step)
            self._phase(self._step, 2, "end")
        tfmix.set_global_policy("float32")
        law("f", *replaced())

    @contextlib.contextmanager
    def _refusing(self):
        """Ends the order if an optimizer refuses a dtype."""
        try:
            yield
        except ValueError as error:
            refused = REFUSES.get(self.wrap, ())
            if any(f"of dtype '{dtype}'" in str(error) for dtype in refused):
                raise Refused from error
            raise

    def do(self, step):
        """Runs one step and checks the laws."""
        name, *arguments = step.split(":")
        getattr(self, f"_{name}")(*arguments)
        if name != "scope":
            self._check_guard()
            self.laws(step)

    def _check_guard(self):
        """A guard of the user refuses an optimizer that cannot skip steps.

        It does not if a conversion has removed tfmix's own wrapper.
        """
        if not self.asked or is_scaled(self.model) or not self.compiled_since:
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
        state = state_of(self.model)
        try:
            with self._inside(), self._refusing():
                report = tfmix.apply_policy(self.model, policy)
        except Refused:
            self._same(state, "a refused conversion")
            self.laws("refused")
            raise
        except ValueError as error:
            return self._refused(error, state)
        self.undos.append((report.undo, before))
        self._converted(policy)

    def _refused(self, error, state):
        # Masters come around an optimizer before it is built.
        refusals = "casts no variables", "is built already"
        if not any(refusal in str(error) for refusal in refusals):
            raise error
        self._same(state, "a refused conversion")

    def _converted(self, policy):
        self.dtypes = converted_dtypes(
            self.order.kind, policy, self.dtypes, dtypes_of(self.model)
        )
        self.home, self.carries = policy, policy != "float32"
        self.guarded = bool(chain_of(self.model)[1:]) and policy != "float32"

    def _undo(self):
        if not self.undos:
            return
        undo, before = self.undos.pop()
        with self._inside():
            undo()
        self.dtypes, self.carries, self.home, _ = before
        self.guarded = False

    def _compile(self, name, wrap="bare"):
        if name == "same":
            given, self.wrap = self.model.optimizer, "any"
        else:
            self.name, self.wrap = name, wrap
            with self._on_replicas():
                given = wrapped(OPTIMIZERS[name](), wrap)
            self.baseline = Baseline(name, self.frozen)
        settings = {"run_eagerly": self.order.mode == "eager"}
        if TENSORFLOW:
            settings["jit_compile"] = self.order.mode == "xla"
        with self._on_replicas(), self._at_home():
            metrics = [keras.metrics.MeanAbsoluteError(name="mae")]
            self.model.compile(given, "mse", metrics=metrics, **settings)
        self.compiled_since = True
        self.guarded = is_scaled(self.model) and any(
            dtype in SIXTEEN for pair in self.dtypes.values() for dtype in pair
        )

    def _freeze(self, *layers):
        # In Keras, `model.trainable = True` does not unfreeze single layers.
        for layer in named_layers(self.model):
            layer.trainable = layer.name not in layers
        self.frozen = set(layers)
        self._compile(self.name, self.wrap if self.wrap in WRAPS else "bare")

    _thaw = _freeze

    def _file(self):
        path = self.folder / "model.keras"
        self.model.save(path)
        before = state_of(self.model)
        with self._on_replicas():
            loaded = keras.saving.load_model(path)
        self._replace(loaded)
        self._same(before, "a file")

    def _replace(self, model):
        """Continues with another model, whose optimizer is not the user's."""
        self.model, self.undos, self.carries = model, [], False
        self.wrap = "any"
        self.guarded = False
        model.run_eagerly = self.order.mode == "eager"

    def _weights(self):
        path = self.folder / "model.weights.h5"
        self.model.save_weights(path)
        before, slots = state_of(self.model), self.baseline.slots
        weights = tfmix.optimizers.export_float32(self.model)
        self._train(1)
        with self._on_replicas():
            self.model.load_weights(path)
        self.baseline.slots, self.last = slots, weights
        self._same(before, "a weights file")

    def _copy(self, policy):
        source, before = self.model, state_of(self.model)
        dtypes = dtypes_of(source)
        try:
            with self._on_replicas():
                copied = tfmix.convert_model(source, policy)
        except ValueError as error:
            return self._refused(error, before)
        self._same(before, "being copied")
        law("b", dtypes_of(source) == dtypes, "the source of a copy changed")
        self._replace(copied)
        self._converted(policy)
        if variable_dtypes(dtypes_of(copied)) != variable_dtypes(dtypes):
            # An optimizer's state belongs to variables of one dtype.
            self.baseline.slots = None

    def _global(self, policy):
        tfmix.set_global_policy(policy)
        self.global_policy = policy
        self._new_layer(policy)
        if policy == "float32":
            law("f", *replaced())

    def _scope(self, policy):
        with tfmix.policy_scope(policy):
            self._new_layer(policy)
            self.laws(f"scope:{policy}")
        self._new_layer(self.global_policy)

    def _on_replicas(self):
        if self.strategy is None:
            return contextlib.nullcontext()
        return self.strategy.scope()

    def _inside(self):
        """Opens the strategy's scope if the order's conversions are in it."""
        return (
            self._on_replicas()
            if self.order.inside
            else contextlib.nullcontext()
        )

    def _same(self, before, what):
        law("s", *same_state(before, state_of(self.model), what))

    def _new_layer(self, policy):
        expected = tfmix.Policy(policy)
        found = keras.layers.Dense(1).dtype_policy
        found = found.compute_dtype, found.variable_dtype
        wanted = expected.compute_dtype, expected.variable_dtype
        law("b", found == wanted, f"a new layer under {policy} has {found}")

    def _guard(self):
        if is_scaled(self.model):
            tfmix.guard(self.model)
            self.guarded = self.asked = True
            self.compiled_since = False
            return
        try:
            tfmix.guard(self.model)
        except ValueError:
            return
        raise Broken("d: the model was guarded, but its optimizer cannot skip")

    def _check(self):
        before = state_of(self.model)
        report = tfmix.check(self.model, small_data().x, small_data().y)
        self._same(before, "a check")
        law("s", bool(report.rows), "the check has no rows")
        wrong = [r for r in report.rows if r.verdict == "overflow"]
        law("s", not wrong, f"the check finds {wrong}")

    def _scale_monitor(self):
        data, monitor = small_data(), tfmix.callbacks.LossScaleMonitor(every=1)
        x, y = (np.tile(a, (self.order.replicas, 1)) for a in (data.x, data.y))
        how = {"batch_size": len(x), "shuffle": False, "callbacks": [monitor]}

        def step():
            self.model.fit(x, y, verbose=0, **how)

        self._phase(step, 1, "fit")

    def _loop(self):
        # For models that do not scale gradients, they are divided with a
        # warning. Pure 16-bit weights have gradients of their own dtype.
        is_pure = self.home in SIXTEEN
        divides = is_scaled(self.model) and (not self.carries or is_pure)
        if divides or self.strategy:
            return
        own = (self.model, self.model.optimizer, self.order.mode)
        loop, data = loops.Loop(*own, loss=wide_error), small_data()
        x, y = map(keras.ops.convert_to_tensor, (data.x, data.y))
        self._phase(lambda: float(loop.step(x, y)), 1, "loop")

    # ------------------------------------------------------------- the laws

    def laws(self, step):
        """Checks all laws; some of the checks train the model."""
        self._check_dtypes()
        self._check_optimizer()
        self._check_weights(step)
        self._phase(self._step, 1, step)
        if step.split(":")[0] not in LOOKING:
            self._check_bad_step()
        self._check_replicas()
        self._check_dtypes()

    def _step(self, bad=False):
        """Trains on a batch; only the last replica gets a bad one."""
        data, model = small_data(), self.model
        if bad and self.strategy:
            model.make_train_function()
            logs = model.train_function(iter([replica_batches()]))
        else:
            x = data.bad if bad else data.x
            logs = model.train_on_batch(x, data.y, return_dict=True)
        return float(logs["loss"])

    def _train(self, steps, step=None):
        """Trains until `steps` steps were applied; returns the last loss."""
        iterations = self.model.optimizer.iterations
        first = number_in(iterations)
        tries, loss = 0, None
        while number_in(iterations) < first + steps:
            law("a", tries < steps + MOST_SKIPS, f"{tries} steps skipped")
            loss = (step or self._step)()
            tries += 1
        law("a", number_in(iterations) == first + steps, "too many iterations")
        return loss

    def _phase(self, step, steps, where):
        """Trains, and compares with the baseline."""
        rounds = any(getattr(o, "seed", None) for o in chain_of(self.model))
        before = self.baseline.weights = tfmix.optimizers.export_float32(
            self.model
        )
        loss = self._train(steps, step)
        expected, expected_loss = self.baseline.train(steps)
        after = self.last = tfmix.optimizers.export_float32(self.model)
        if loss is not None:
            error = abs(loss - expected_loss) / expected_loss
            bound = LOSS_ERROR * (1 + rounds)
            law("a", error < bound, f"loss {loss}, not {expected_loss}")
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
                # A rounding may move a weight by a whole step of the format.
                bound += steps * 2.0**-7 * np.linalg.norm(np.abs(old) + wanted)
            error = np.linalg.norm(moved - wanted)
            law(
                "a",
                error <= bound + 1e-6,
                f"{'/'.join(name)} moved by {moved.ravel()[:3]}, not "
                f"{wanted.ravel()[:3]} ({where})",
            )

    def _check_dtypes(self):
        found = dtypes_of(self.model)
        law("b", found == self.dtypes, f"{found}, not {self.dtypes}")
        for layer in named_layers(self.model):
            for variable in layer.weights:
                law(
                    "b",
                    variable.dtype
                    == layer.variable_dtype
                    == keras.backend.standardize_dtype(variable.value.dtype),
                    f"{variable.path} is {variable.dtype}",
                )

    def _check_optimizer(self):
        chain = chain_of(self.model)
        found = [type(one).__name__ for one in chain]
        half = any(pair[0] in SIXTEEN for pair in self.dtypes.values())
        pure = any(pair[1] in SIXTEEN for pair in self.dtypes.values())
        scaled = half or pure or self.wrap != "bare"
        inner = type(OPTIMIZERS[self.name]()).__name__
        keepers = {"MasterWeightOptimizer", "BFloat16Optimizer"}
        make = WRAPS.get(self.wrap) or (lambda optimizer: optimizer)
        around = optimizers.chain(make(OPTIMIZERS[self.name]()))
        wanted = [type(one).__name__ for one in around]
        if pure and not keepers & set(wanted):
            wanted.insert(0, "MasterWeightOptimizer")
        wanted = ["LossScaleOptimizer"] * scaled + wanted
        if self.wrap == "any":
            right = found[-1] == inner and (
                "LossScaleOptimizer" in found or not (half or pure)
            )
            right &= bool(keepers & set(found)) or not pure
        else:
            right = found == wanted
        law("e", right, f"the optimizer is {found}, not {wanted}")
        given = OPTIMIZERS[self.name]().get_config()
        config = chain[-1].get_config()
        for key in ("learning_rate", "momentum", "beta_1"):
            if key in given:
                same = abs(config[key] - given[key]) < 1e-7
                law("e", same, f"the optimizer has {key}={config[key]}")
        if found[0] == "LossScaleOptimizer":
            ours = isinstance(chain[0], tfmix.LossScaleOptimizer)
            law("e", ours, "the optimizer is Keras's own scaler")

    def _check_weights(self, step):
        """Only training changes weights; a cast may round them."""
        now = tfmix.optimizers.export_float32(self.model)
        for variable, old, new in zip(
            self.model.weights, self.last, now, strict=True
        ):
            # A new optimizer has new masters, cast from 16-bit variables.
            casts = step.split(":")[0] not in ("global", "scope", *PASSIVE)
            bound = 2.0**-7 * np.abs(old) if casts else 0.0
            right = bool(np.all(np.abs(new - old) <= bound))
            law("s", right, f"{variable.path} was {old}, is {new} ({step})")

    def _check_bad_step(self):
        if not is_scaled(self.model):
            return
        model, chain = self.model, chain_of(self.model)
        kept = {id(v): v for one in chain[1:] for v in one.variables}
        kept |= {id(v): v for v in (*model.trainable_variables,)}
        kept[id(model.optimizer.iterations)] = model.optimizer.iterations
        rest = [*model.non_trainable_variables, *model.metrics_variables]
        if self.guarded:
            # `train_on_batch` also resets the metrics.
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
        law("d", not changed, f"a bad step changes {changed}")
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
            law("c", mirrored, f"{variable.path} is not mirrored")
            first = values[0].numpy().tobytes()
            equal = all(v.numpy().tobytes() == first for v in values)
            law("c", equal or not plain, f"{variable.path} differs")

    def _at_home(self):
        """Opens the policy under which users compile a loaded 16-bit model."""
        if getattr(self, "carries", True) or self.home == "float32":
            return contextlib.nullcontext()
        return tfmix.policy_scope(self.home)


def variable_dtypes(dtypes):
    return {name: dtype for name, (_, dtype) in dtypes.items()}


def number_in(variable):
    return int(keras.ops.convert_to_numpy(variable.value))


def wrapped(optimizer, wrap):
    if wrap == "bare":
        return optimizer
    if WRAPS[wrap]:
        optimizer = WRAPS[wrap](optimizer)
    return tfmix.LossScaleOptimizer(optimizer, initial_scale=2.0**10)


def wide_error(y, found):
    return loops.squared_error(y, keras.ops.cast(found, "float32"))


def run(order):
    """Runs an order, and restores the policy; raises an error for a break."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)
        # Keras as it is without tfmix, which watches `compile` from its import.
        tfmix.set_global_policy("float32")
        try:
            keras_before()
            # Small variables would keep float32 state.
            small = mock.patch.object(eight_bit_slots, "SMALL", 1)
            with small, tempfile.TemporaryDirectory() as folder:
                Machine(order, folder).run()
        finally:
            tfmix.set_global_policy("float32")
            keras.utils.clear_session(free_memory=False)
