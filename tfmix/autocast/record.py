"""The record of a 16-bit model: its policy, and the methods it wraps.

A model gets it from its constructor, or from the `compile` that finds 16-bit
layers in a copy, a loaded model or a new head. So the policy remains active for
a model after the scope that created it has ended.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix import _arguments, _formats, _messages
from tfmix._keras import (
    compile_method,
    context_values,
    global_state,
    layer_methods,
    layers,
    optimizers,
    training,
)
from tfmix.autocast import (
    bare_optimizers,
    compile_optimizer,
    exact_inputs,
    fallback,
)
from tfmix.float8 import chosen_layers
from tfmix.gradient_scaling import heads, model_call, outermost
from tfmix.loss_scaling import optimizer as scaling
from tfmix.ops import active_rules, exact_values, stand_ins, tensors
from tfmix.optimizers import sixteen_bit_optimizer
from tfmix.policy import layer_dtypes
from tfmix.policy import policy as policies
from tfmix.policy.devices import devices
from tfmix.step import guard


class _Silence:
    """Reports no skipped steps."""

    def fit(
        self, model: keras.Model, fit: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a model's `fit`."""
        return fit(*args, **kwargs)

    def begin(self, model: keras.Model) -> None:
        """Does nothing where a run begins."""


_reports: Any = _Silence()


def report_skips(by: Any) -> None:
    """Sets what reports why steps were skipped, in place of `_Silence`."""
    global _reports
    _reports = by


def set_policy(model: keras.Model, policy: keras.DTypePolicy) -> None:
    """Gives a model the record of a policy, or none if that is not 16-bit."""
    chosen_layers.restore(model, {})
    if policies.is_sixteen_bit(policy):
        compile_method.watch()
        layers.rematerialize_anew(model)
        exact_inputs.begin_exact(model)
        record = _MixedModel(model, policy)
        layer_methods.attach(model, layer_methods.RULES, record)
        record.wrap_what_swaps()
        model_call.note_scaling(model, True)
    else:
        layer_methods.detach(model, layer_methods.RULES)
        model_call.note_scaling(model, False)


def set_policy_inside(model: keras.Model, policy: keras.DTypePolicy) -> None:
    """Gives a record to those models inside one that compute in 16 bit."""
    for inner in models_inside(model):
        narrow = any(
            layer_dtypes.computes_in(inner, x) for x in _formats.SIXTEEN_BIT
        )
        set_policy(inner, policy if narrow else keras.DTypePolicy("float32"))


def models_inside(model: keras.Model) -> list[keras.Model]:
    """Lists the models that a model holds, at any depth."""
    inner = layers.flat_layers(model)[1:]
    return [layer for layer in inner if isinstance(layer, keras.Model)]


def policy_of(model: keras.Model) -> keras.DTypePolicy | None:
    """Returns the policy of a model's record, `None` if it has none."""
    record = _record(model)
    return None if record is None else record.policy


def _record(model: keras.Model) -> "_MixedModel | None":
    part = layer_methods.part(model, layer_methods.RULES)
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
        self._rules = active_rules.of_policy(policy)
        self._outputs = outermost.Outputs(model, self._under_rules)
        self.is_compiling = False
        self.wrappers = self._wrappers()

    def _wrappers(self) -> dict[str, layer_methods.Wrapper]:
        """Returns the wrappers of the model's methods, by their names."""
        model = self._model
        wrappers: dict[str, layer_methods.Wrapper] = {
            "call": self._call,
            "compile": self._compile,
            "fit": self._fit,
            "make_train_function": self._make_train_function,
            "train_step": self._train_step,
            "test_step": self._under_rules,
            # Layers of a step pass 16-bit tensors to these, also as symbols.
            "compute_loss": self._in_float32,
            "compute_metrics": self._in_float32,
            # Keras prints the table directly.
            "summary": self._summary,
        }
        if isinstance(model, keras.Sequential):
            # It creates its own input, which casts, before it is called.
            wrappers["build"] = self._build
        is_pure = self.policy.variable_dtype in _formats.SIXTEEN_BIT
        if is_pure:
            # Layers draw their initial values there, in 16 bit.
            wrappers[training.BUILD] = self._under_rules
        if is_pure and hasattr(model, training.BEFORE_TRACING):
            wrappers[training.BEFORE_TRACING] = self._before_tracing
        return wrappers

    def _under_rules(
        self, original: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        stand_ins.keep(self._rules)
        with stand_ins.block(self._rules):
            return original(*args, **kwargs)

    def _call(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Returns float32 from a model's outermost call, else the results."""
        if self._float8 is not None and global_state.is_outermost(self._model):
            self._choose_float8(self._float8)
        if layers.is_structure(self._model):
            args, kwargs = tensors.map_leaves(
                (args, kwargs), exact_values.before_cast
            )
        if self._outputs.parts:
            run = functools.partial(heads.run_graph, self._model)
            self._wrap(**{layers.RUN_GRAPH: run})
        return self._outputs.of(*args, **kwargs)

    def _compile(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        # The record replaces what the file says.
        kwargs.pop("guarded", None)
        self.is_compiling = True
        _adopt(self._model)
        try:
            _compile(self._model, original, args, kwargs)
        finally:
            self.is_compiling = False

    def wrap_what_swaps(self) -> None:
        """Wraps what runs `SwapEMAWeights`, if the optimizer averages."""
        if self._averages():
            swapped = {
                name: functools.partial(self._swapped, name)
                for name in ("evaluate", "predict")
            }
            self._wrap(**swapped)

    def _wrap(self, **more: layer_methods.Wrapper) -> None:
        """Wraps further methods of the model."""
        if not more.keys() <= self.wrappers.keys():
            self.wrappers |= more
            layer_methods.attach(self._model, layer_methods.RULES, self)

    def _fit(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        fit = original
        if self._averages():
            fit = functools.partial(self._swapped, "fit", original)
        return _reports.fit(self._model, fit, *args, **kwargs)

    def _make_train_function(
        self, original: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        made = fallback.retrying(self._model, original, *args, **kwargs)
        _reports.begin(self._model)
        return made

    def _averages(self) -> bool:
        """Returns whether the optimizer averages the weights it updates."""
        optimizer = getattr(self._model, "optimizer", None)
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            return False
        return optimizers.keeps_averages(optimizer)

    def _swapped(
        self, method: str, original: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        """Makes `SwapEMAWeights` swap master weights of 16-bit variables."""
        owner = sixteen_bit_optimizer.owner(self._model.optimizer)
        if owner is None:
            return original(*args, **kwargs)
        swaps = owner.swap_averages, owner.overwrite_averages
        with contextlib.ExitStack() as undo:
            for callback in training.callbacks(method, args, kwargs):
                if isinstance(callback, keras.callbacks.SwapEMAWeights):
                    optimizers.swap_averages_by(undo, callback, *swaps)
            return original(*args, **kwargs)

    def _train_step(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        placing = self._placing(args, kwargs)
        with context_values.holding(placing=placing, in_fit=True):
            return self._under_rules(original, *args, **kwargs)

    def _placing(self, args: tuple, kwargs: dict) -> Any:
        optimizer = getattr(self._model, "optimizer", None)
        if not isinstance(optimizer, scaling.LossScaleOptimizer):
            return 1.0
        if keras.backend.backend() == "tensorflow":
            return optimizer.placing()
        order = training.STEP_ON_JAX
        _, _, values, _ = _arguments.of_call(order, args, kwargs, "state")
        mapping = optimizer.checked_mapping(values)
        with keras.StatelessScope(mapping):
            return optimizer.placing()

    def _in_float32(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Gives losses and metrics their tensors in float32."""
        args, kwargs = tensors.map_leaves(
            (args, kwargs), exact_values.to_float32_with_notes
        )
        return self._under_rules(original, *args, **kwargs)

    def _build(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        """Builds a Sequential, whose layers draw their initial values."""
        build = functools.partial(exact_inputs.built_exact, self._model)
        self._under_rules(build, original, *args, **kwargs)

    def _before_tracing(self, original: Callable, **batch: Any) -> None:
        original(**batch)
        # A step that uses the optimizer itself needs the model's weights.
        if not bare_optimizers.held_beside(self._model):
            training.build_before_tracing(self._model, **batch)

    def _summary(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Lists below the table which layers fell back to float32."""
        shown = original(*args, **kwargs)
        order = training.ORDERS["summary"]
        show = _arguments.of_call(order, args, kwargs, "print_fn") or print
        for note in fallback.reasons(self._model):
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


def compiling(original: Callable[..., None]) -> Callable[..., None]:
    """Returns the replacement of Keras's `compile` for all models."""

    @functools.wraps(original)
    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        method = functools.partial(original, self)

        @functools.wraps(method)
        def inner(*args: Any, **kwargs: Any) -> None:
            # Keras creates an optimizer here, and computes nothing in 16 bit.
            with stand_ins.block(()):
                method(*args, **kwargs)

        record = _record(self)
        if record is not None and record.is_compiling:
            # The model's own wrapper of `compile` does the rest.
            inner(*args, **kwargs)
            return
        guarded = kwargs.pop("guarded", None)
        if guarded is None or not guarded.alone:
            _adopt(self)
        in_force = active_rules.SIXTEEN_BIT in active_rules.of_caller()
        if policy_of(self) or guarded or in_force:
            _compile(self, inner, args, kwargs)
        else:
            method(*args, **kwargs)

    return compile


def _adopt(model: keras.Model) -> None:
    """Gives a model with 16-bit layers what a policy gives to a new one."""
    policy = policy_of(model) or _policy_of_layers(model)
    if policy is None:
        return
    for layer in layers.flat_layers(model):
        is_model = isinstance(layer, keras.Model)
        has_fallback = layer_methods.part(layer, layer_methods.FALLBACK)
        if has_fallback or (is_model and policy_of(layer)):
            continue
        exact_inputs.keep_exact(layer)
        if not layers.is_structure(layer):
            fallback.attach(layer)
        if is_model and _policy_of_layers(layer):
            set_policy(layer, policy)


def _policy_of_layers(model: keras.Model) -> keras.DTypePolicy | None:
    for layer in layers.flat_layers(model)[1:]:
        if isinstance(layer, keras.Model) and policy_of(layer):
            return policy_of(layer)
    for dtype in _formats.SIXTEEN_BIT:
        if layer_dtypes.computes_in(model, dtype):
            pure = layer_dtypes.has_sixteen_bit_variables(model)
            return policies.Policy(dtype if pure else f"mixed_{dtype}")
    return None


def _compile(
    model: keras.Model,
    original: Callable[..., None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Compiles a model with the optimizer that its dtypes call for.

    Args:
        model: The model.
        original: The `compile` of its class or, without a record, of Keras.
        args: Positional arguments of `compile`.
        kwargs: Keyword arguments of `compile`.
    """
    of_call = functools.partial(
        _arguments.of_call, training.ORDERS["compile"], args, kwargs
    )
    wanted, given = of_call("auto_scale_loss", True), of_call("optimizer")
    compile_optimizer.refuse_two_scales(given)
    fixed = getattr(given, "loss_scale_factor", None)
    original(*args, **kwargs)
    compile_method.save_argument(model, "auto_scale_loss", wanted)
    record = _record(model)
    # The model's own `compile` may have created it, too.
    optimizer = getattr(model, "optimizer", None)
    if wanted and optimizer is not None:
        if compile_method.has_wrapped(model):
            # Keras decides by the model's own policy, not by its layers'.
            optimizer = optimizer.inner_optimizer
            if optimizer is given:
                optimizer.loss_scale_factor = fixed
        level = None if record is None else record.level
        with stand_ins.block(()):
            optimizer = compile_optimizer.choose(optimizer, model, level)
        if optimizer is not model.optimizer:
            saved = compile_optimizer.saved(optimizer, model)
            compile_method.adopt_optimizer(model, optimizer, saved)
    if record is not None:
        record.wrap_what_swaps()
    is_ours = isinstance(optimizer, scaling.LossScaleOptimizer)
    if record is not None or is_ours:
        guard.attach(model)
    if (
        record is not None
        and not is_ours
        and isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    ):
        _messages.warn_once(
            "Keras's own LossScaleOptimizer stays: a step that it skips leaves "
            "NaN in metrics and statistics, and is not counted. Compile with "
            "tfmix.LossScaleOptimizer(optimizer.inner_optimizer) instead."
        )
    if not any(
        layer_dtypes.computes_in(model, dtype) for dtype in _formats.SIXTEEN_BIT
    ):
        is_told = record is None and _tell_of_late_policy(model)
        if is_told or model.built:
            bare_optimizers.leave_alone(optimizer)


def _tell_of_late_policy(model: keras.Model) -> bool:
    """Warns of a model that was made before the active policy was set."""
    policy = keras.config.dtype_policy()
    if not (policies.is_sixteen_bit(policy) and layers.own_layers(model)):
        return False
    _messages.warn(
        "%r is active, but no layer of the model computes in 16 "
        "bit: the model was made before. Make it after setting the "
        "policy, or write tfmix.apply_policy(model, %r).",
        policy.name,
        policy.name,
    )
    return True
