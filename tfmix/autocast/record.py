"""The record of a 16-bit model: its policy, its methods and its optimizer.

A model gets it from its constructor, or from the `compile` that finds 16-bit
layers in a copy, a loaded model or a new head. So the policy remains active for
a model after the scope that created it has ended. `compile` then gives it the
optimizer that the dtypes of its layers need, and its guard.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix import _formats, _messages
from tfmix._keras import (
    context,
    files,
    graphs,
    layers,
    optimizers,
    replacing,
    training,
)
from tfmix.autocast import layer_calls
from tfmix.float8 import chosen_layers
from tfmix.gradient_scaling import model_call
from tfmix.loss_scaling import optimizer as scaling
from tfmix.loss_scaling import rules, state
from tfmix.ops import tensors
from tfmix.optimizers import master_weights, sixteen_bit_optimizer
from tfmix.policy import policy as policies
from tfmix.policy.devices import devices
from tfmix.step import guard

_NOTHING = contextlib.nullcontext()
# Reports why steps of a `fit` were skipped.
_reports: Any
# Says what `compile` should.
_advise: Callable[[keras.Model], None]


def report_skips(by: Any) -> None:
    """Sets what reports why steps were skipped."""
    global _reports
    _reports = by


def advise_by(advise: Callable[[keras.Model], None]) -> None:
    """Sets what tells of float32 layers and 16-bit results in `compile`."""
    global _advise
    _advise = advise


def set_policy(model: keras.Model, policy: keras.DTypePolicy) -> None:
    """Gives a model the record of a policy, or none if that is not 16-bit."""
    chosen_layers.restore(model, {})
    if policies.is_sixteen_bit(policy):
        replacing.want(replacing.COMPILE, True)
        layers.rematerialize_anew(model)
        layer_calls.begin_exact(model)
        record = _MixedModel(model, policy)
        layers.attach(model, layers.RULES, record)
        model_call.note_scaling(model, True)
    else:
        layers.detach(model, layers.RULES)
        model_call.note_scaling(model, False)


def set_policy_inside(model: keras.Model, policy: keras.DTypePolicy) -> None:
    """Gives a record to those models inside one that compute in 16 bit."""
    for inner in models_inside(model):
        narrow = any(layers.computes_in(inner, x) for x in _formats.SIXTEEN_BIT)
        set_policy(inner, policy if narrow else keras.DTypePolicy("float32"))


def models_inside(model: keras.Model) -> list[keras.Model]:
    """Lists the models that a model holds, at any depth."""
    inner = layers.flat_layers(model)[1:]
    return [layer for layer in inner if isinstance(layer, keras.Model)]


def policy_of(model: keras.Model) -> keras.DTypePolicy | None:
    """Returns the policy of a model's record, `None` if it has none."""
    record = _record(model)
    return None if record is None else record.policy


def under_rules(
    model: keras.Model,
) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which the rules of a model's policy hold."""
    record = _record(model)
    return contextlib.nullcontext() if record is None else record.ruled()


def _record(model: keras.Model) -> "_MixedModel | None":
    part = layers.part(model, layers.RULES)
    return part if isinstance(part, _MixedModel) else None


class _MixedModel:
    """A policy on one model: wraps the model's methods.

    The whole step runs under the rules, its gradient included, so that
    recomputed layers are traced under the rules of their first run.
    """

    def __init__(self, model: keras.Model, policy: keras.DTypePolicy) -> None:
        self.policy = policy
        self._model = model
        ruled = policies.with_rules(policy)
        self.level = ruled.level
        # The float8 layers are chosen later.
        self._float8 = ruled if ruled.is_float8 else None
        self._rules = policies.rules_of(policy)
        self._calls = model_call.Calls(model, self.ruled)
        self.wrappers = self._wrappers()

    def _wrappers(self) -> dict[str, layers.Wrapper]:
        """Returns the wrappers of the model's methods, by their names."""
        model = self._model
        wrappers: dict[str, layers.Wrapper] = {
            "call": self._call,
            "compile": functools.partial(_compile, model),
            "fit": functools.partial(_reports.fit, model),
            "make_train_function": functools.partial(_reports.begin, model),
            "train_step": self._train_step,
            "test_step": self._users_code,
            # Layers of a step pass 16-bit tensors to these, also as symbols.
            "compute_loss": self._in_float32,
            "compute_metrics": self._in_float32,
            # Keras prints the table directly.
            "summary": self._summary,
        }
        if keras.backend.backend() == "tensorflow":
            # A function that trains the model is saved with these.
            used = functools.partial(state.saved_with, model)
            children = functools.partial(files.children, used)
            wrappers[files.CHILDREN] = children
        if layers.is_graph(model):
            wrappers[graphs.RUN_GRAPH] = self._calls.run_graph
        if isinstance(model, keras.Sequential):
            # It creates its own input, which casts, before it is called.
            wrappers["build"] = self._build
        is_pure = self.policy.variable_dtype in _formats.SIXTEEN_BIT
        if is_pure:
            # Layers draw their initial values there, in 16 bit.
            wrappers[training.BUILD] = self._under_rules
        if is_pure and hasattr(model, training.BEFORE_TRACING):
            wrappers[training.BEFORE_TRACING] = functools.partial(
                training.build_before_tracing, model
            )
        return wrappers

    def _under_rules(
        self, original: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        with self.ruled():
            return original(*args, **kwargs)

    def ruled(self, **more: Any) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the policy's rules hold.

        Args:
            **more: Further settings of a `context.Block`.
        """
        if context.block.get().rules == self._rules:
            # The block around lasts longer.
            return context.holding(**more) if more else _NOTHING
        return replacing.block(self._rules, **more)

    def _call(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Returns float32 from a model's outermost call, else the results."""
        if self._float8 is not None and context.is_outermost(self._model):
            self._choose_float8(self._float8)
        if layers.is_structure(self._model):
            args, kwargs = tensors.map_leaves(
                (args, kwargs), tensors.before_cast
            )
        code = context.block.get().users_code
        outputs = self._calls.run(original, *args, **kwargs)
        if code == layer_calls.FLOAT32:
            wide = tensors.to_float32_with_notes
            return tensors.map_leaves(outputs, wide)
        return outputs

    def _train_step(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        # A step is guarded by `compile`.
        if (step := guard.current_step()) is not None:
            step.place = self._place(args, kwargs)
        return self._users_code(original, *args, **kwargs)

    def _users_code(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Runs a step, to which the layers that it calls return float32.

        A user's own step may combine their results with float32.
        """
        with self.ruled(users_code=layer_calls.FLOAT32):
            return original(*args, **kwargs)

    def _place(self, args: tuple, kwargs: dict) -> Any:
        """Returns the place that the model's optimizer gives its gradients."""
        optimizer = getattr(self._model, "optimizer", None)
        if not isinstance(optimizer, scaling.LossScaleOptimizer):
            return None
        if keras.backend.backend() == "tensorflow":
            return optimizer.place()
        order = training.STEP_ON_JAX
        _, _, values, _ = layers.argument(order, args, kwargs, "state")
        # Keras refuses another number of values, and says so.
        mapping = zip(optimizer.variables, values, strict=False)
        with keras.StatelessScope(mapping):
            return optimizer.place()

    def _in_float32(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Gives losses and metrics their tensors in float32."""
        args, kwargs = tensors.map_leaves(
            (args, kwargs), tensors.to_float32_with_notes
        )
        with self.ruled():
            return original(*args, **kwargs)

    def _build(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        """Builds a Sequential, whose layers draw their initial values."""
        build = functools.partial(layer_calls.build_exactly, self._model)
        self._under_rules(build, original, *args, **kwargs)
        if (graph := layers.graph_of(self._model)) is not None:
            # It runs inside this model's call.
            set_policy(graph, keras.DTypePolicy("float32"))

    def _summary(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Lists below the table which layers fell back to float32."""
        shown = original(*args, **kwargs)
        order = training.ORDERS["summary"]
        show = layers.argument(order, args, kwargs, "print_fn") or print
        for note in layer_calls.reasons(self._model):
            show(f" {note}")
        for layer, why in chosen_layers.reasons(self._model).items():
            place = f"not in float8: {why}" if why else "in float8"
            show(f" {layer.name} multiplies {place}")
        return shown

    def _choose_float8(self, policy: policies.Policy) -> None:
        chosen = chosen_layers.choose(self._model, policy)
        if chosen is None:
            # The first call builds the model; later calls get here.
            return
        self._float8 = None
        if not chosen:
            reasons = [
                f"{layer.name!r}: {why}"
                for layer, why in chosen_layers.reasons(self._model).items()
            ]
            _messages.warn(
                "no layer of %r multiplies in float8 (%s). Name some in "
                "`Policy('mixed_float8', float8_layers=[...])`, or take "
                "'mixed_bfloat16'.",
                self._model.name,
                "; ".join(reasons[:3]) or "no Dense, no EinsumDense",
            )
        elif not any(device.float8 for device in devices()):
            _messages.warn_once(
                "no device here multiplies float8: the policy "
                "'mixed_float8' computes the same by casts, more slowly."
            )


def make_compile(original: Callable[..., None]) -> Callable[..., None]:
    """Returns the replacement of Keras's `compile` for all models."""

    @functools.wraps(original)
    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        method = functools.partial(original, self)
        if _record(self) is None:
            method = functools.partial(_compile, self, method)
        # A record that was there before has wrapped this call.
        method(*args, **kwargs)

    return compile


def _adopt(model: keras.Model) -> None:
    """Gives a model with 16-bit layers what a policy gives to a new one."""
    policy = _policy_of(model)
    if policy is None:
        return
    for layer in layers.flat_layers(model):
        is_model = isinstance(layer, keras.Model)
        is_attached = layers.part(layer, layers.CALL)
        if is_attached or (is_model and _record(layer)):
            continue
        layer_calls.attach(layer)
        if is_model and _policy_of(layer):
            set_policy(layer, policy)


def _policy_of(model: keras.Model) -> keras.DTypePolicy | None:
    """Returns the policy of a model's record, or that of its layers."""
    for layer in layers.flat_layers(model):
        if (found := _record(layer)) is not None:
            return found.policy
    for dtype in _formats.SIXTEEN_BIT:
        if layers.computes_in(model, dtype):
            pure = layers.has_sixteen_bit_variables(model)
            return policies.Policy(dtype if pure else f"mixed_{dtype}")
    return None


def _compile(
    model: keras.Model,
    original: Callable[..., None],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Compiles a model by Keras's method, then changes its optimizer.

    `auto_scale_loss` decides nothing: no loss of a model with a record is
    scaled, and its optimizer has to skip steps.
    """
    _adopt(model)
    record = _record(model)
    order = training.ORDERS["compile"]
    given = layers.argument(order, args, kwargs, "optimizer")
    factor = getattr(given, "loss_scale_factor", None)
    original(*args, **kwargs)
    if not record and policies.SIXTEEN_BIT not in context.active_rules():
        return
    optimizer = getattr(model, "optimizer", None)
    if record is not None and optimizer is not None:
        if factor is not None:
            # Keras's scaler drops it without a word, and ours with one.
            given.loss_scale_factor = factor
        optimizer = choose(optimizer, model, record.level)
    if optimizer is not getattr(model, "optimizer", None):
        named = optimizer_in_files(optimizer, model)
        layers.adopt_optimizer(model, optimizer, named)
    if record is not None or isinstance(optimizer, scaling.LossScaleOptimizer):
        guard.attach(model)
    if any(
        is_float32_without_policy(layer) or layers.last_activation(layer)
        for layer in layers.that_compute(model)
    ):
        _advise(model)


def is_float32_without_policy(layer: keras.Layer) -> bool:
    """Returns whether a layer is in float32, and no policy made it so."""
    origin = layers.marks(layer).origin
    return layer.compute_dtype == "float32" and origin != layers.DEFAULT


def choose(
    optimizer: keras.optimizers.Optimizer,
    model: keras.Layer,
    level: str | None = None,
) -> keras.optimizers.Optimizer:
    """Wraps an optimizer as a model's dtypes require.

    float16 layers get loss scaling, bfloat16 layers a check that skips steps
    that are not finite, and 16-bit variables float32 master weights. tfmix's
    wrappers stay. If its loss-scale optimizer lacks master weights, they are
    added inside it. Keras's own goes, because it scales a loss that needs no
    scale, and a step that it skips leaves NaN in metrics and statistics.
    """
    pure = layers.has_sixteen_bit_variables(model)
    while type(optimizer) is optimizers.KerasScaler:
        optimizer = optimizer.inner_optimizer
    if isinstance(optimizer, scaling.LossScaleOptimizer):
        if pure:
            _add_masters(optimizer)
        return optimizer
    float16 = layers.computes_in(model, "float16")
    if not float16 and not layers.computes_in(model, "bfloat16"):
        return optimizer
    if pure and not isinstance(
        optimizer, sixteen_bit_optimizer.SixteenBitOptimizer
    ):
        optimizer = _automatic(master_weights.MasterWeightOptimizer(optimizer))
    rule: Any = "dynamic"
    if not float16 or level == "O3":
        # `NoLossScale` still skips steps that are not finite.
        rule = rules.NoLossScale()
    return _automatic(scaling.LossScaleOptimizer(optimizer, loss_scale=rule))


def optimizer_in_files(
    optimizer: keras.optimizers.Optimizer, model: keras.Layer
) -> keras.optimizers.Optimizer:
    """Returns the optimizer that a model's files name.

    It is the user's own, which `choose` wraps again when the file is loaded,
    and which a process without tfmix knows.
    """
    float16 = layers.computes_in(model, "float16")
    chosen = rules.DynamicLossScale if float16 else rules.NoLossScale
    inner = optimizer
    while getattr(inner, "is_automatic", False):
        if not isinstance(getattr(inner, "rule", None), chosen | None):
            # A level decided.
            return optimizer
        inner = inner.inner_optimizer
    return inner


def without_automatic(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.Optimizer:
    """Removes what `choose` put around an optimizer, or inside a user's."""
    while getattr(optimizer, "is_automatic", False):
        optimizer = optimizer.inner_optimizer
    inner = vars(optimizer).get("inner_optimizer")
    if getattr(inner, "is_automatic", False):
        optimizer.inner_optimizer = inner.inner_optimizer
    return optimizer


def _automatic(optimizer: Any) -> keras.optimizers.Optimizer:
    optimizer.is_automatic = True
    return optimizer


def _add_masters(optimizer: scaling.LossScaleOptimizer) -> None:
    inner = optimizer.inner_optimizer
    if isinstance(inner, sixteen_bit_optimizer.SixteenBitOptimizer):
        return
    if optimizer.built:
        raise ValueError(
            "A model with 16-bit variables loses every update smaller than "
            "half a step of the format, unless its optimizer keeps float32 "
            f"masters. Received: optimizer={optimizer!r}, which has none and "
            "is built already. Compile with tfmix.LossScaleOptimizer("
            f"tfmix.optimizers.MasterWeightOptimizer({type(inner).__name__}"
            "(...)))."
        )
    optimizer.inner_optimizer = _automatic(
        master_weights.MasterWeightOptimizer(inner)
    )
