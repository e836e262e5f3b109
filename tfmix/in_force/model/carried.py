"""A model made under a policy carries it: its rules, losses and `compile`.

So the policy lasts when the scope that the model was made in has ended.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfmix import _formats, _messages
from tfmix._keras import (
    compile_method,
    global_state,
    layers,
    model_methods,
    training,
)
from tfmix.devices import devices
from tfmix.float8 import chosen_layers
from tfmix.in_force.layer import fallback, uncast_inputs
from tfmix.in_force.model import (
    averaged_weights,
    compiling,
    model_outputs,
    own_methods,
    skip_watch,
)
from tfmix.in_force.process_wide import (
    bare_optimizers,
    interceptor,
    tensors,
)
from tfmix.policy import policy as policies
from tfmix.scaling import optimizer as scaling
from tfmix.scaling import self_scaled
from tfmix.scaling.border import power


def carry(model: keras.Model, policy: keras.DTypePolicy) -> None:
    """Makes a model carry a policy, or none if it has no 16-bit part."""
    chosen_layers.restore(model, {})
    if policies.is_sixteen_bit(policy):
        compile_method.stand_by()
        layers.rematerialize_anew(model)
        uncast_inputs.begin_exact(model)
        carried = _Carried(model, policy)
        model_methods.put(model, model_methods.RULES, carried)
        self_scaled.add(model)
    else:
        model_methods.take_off(model, model_methods.RULES)
        self_scaled.discard(model)


def carried_policy(model: keras.Model) -> keras.DTypePolicy | None:
    """Returns the policy a model carries, `None` if it carries none."""
    part = model_methods.part(model, model_methods.RULES)
    return part.policy if isinstance(part, _Carried) else None


class _Carried:
    """A policy on one model: what stands around the model's methods.

    A step is under the rules as a whole, its gradient included, so that
    rematerialised layers are traced under those they were first run under.
    """

    def __init__(self, model: keras.Model, policy: keras.DTypePolicy) -> None:
        self.policy = policy
        self._model = model
        ruled = policies.with_rules(policy)
        self._level = ruled.level
        # Whose layers have yet to be chosen.
        self._float8 = ruled if ruled.is_float8 else None
        self._rules = frozenset({*ruled.float32_ops, interceptor.SIXTEEN_BIT})
        self._outputs = model_outputs.Outputs(model)
        self.wrappers: dict[str, model_methods.Wrapper] = {
            "call": self._call,
            "compile": self._compile,
            "fit": self._fit,
            "evaluate": functools.partial(averaged_weights.swapped, model),
            "predict": functools.partial(averaged_weights.swapped, model),
            "make_train_function": functools.partial(own_methods.traced, model),
            "summary": self._summary,
            "compute_loss": self._in_float32,
            "compute_metrics": self._in_float32,
            "train_step": self._train_step,
            "test_step": self._under_rules,
            training.BUILD: self._under_rules,
            **dict.fromkeys(layers.own_methods(model), own_methods.explained),
        }
        is_pure = policy.variable_dtype in _formats.SIXTEEN_BIT
        if is_pure and hasattr(model, training.BEFORE_TRACING):
            self.wrappers[training.BEFORE_TRACING] = self._before_tracing
        if hasattr(model, layers.RUN_GRAPH):
            self.wrappers[layers.RUN_GRAPH] = self._outputs.graph.run
        if isinstance(model, keras.Sequential):
            self.wrappers["build"] = self._build

    def _under_rules(
        self, original: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        interceptor.stand_by(self._rules)
        with interceptor.block(self._rules):
            return original(*args, **kwargs)

    def _fit(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        fit = functools.wraps(original)(
            functools.partial(averaged_weights.swapped, self._model, original)
        )
        return skip_watch.fit(self._model, fit, *args, **kwargs)

    def _train_step(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Lets a step of the user's own see true gradients only."""
        optimizer = getattr(self._model, "optimizer", None)
        step: Any = contextlib.nullcontext()
        if isinstance(optimizer, scaling.LossScaleOptimizer):
            step = optimizer.train_step()
        with step, power.placed(self._placing(args)):
            return self._under_rules(original, *args, **kwargs)

    def _placing(self, args: tuple) -> Any:
        optimizer = getattr(self._model, "optimizer", None)
        if not isinstance(optimizer, scaling.LossScaleOptimizer):
            return 1.0
        if keras.backend.backend() == "tensorflow":
            return optimizer.placing()
        # The state of a step under JAX: its third part is the optimizer's.
        mapping = zip(optimizer.variables, args[0][2], strict=True)
        with keras.StatelessScope(mapping):
            return optimizer.placing()

    def _in_float32(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Gives losses and metrics their tensors in float32."""
        args, kwargs = tensors.map_leaves((args, kwargs), tensors.wide)
        return self._under_rules(original, *args, **kwargs)

    def _call(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Returns float32 from the outermost call of a model, else as made."""
        if self._float8 is not None and global_state.is_outermost(self._model):
            self._choose_float8(self._float8)
        if layers.is_structure(self._model):
            args, kwargs = tensors.map_leaves(
                (args, kwargs), uncast_inputs.uncast
            )
        call = functools.partial(self._under_rules, original)
        return self._outputs.of(call, *args, **kwargs)

    def _build(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        """Builds a Sequential, whose layers draw what they start from."""
        build = functools.partial(uncast_inputs.built_exact, self._model)
        self._under_rules(build, original, *args, **kwargs)

    def _before_tracing(self, original: Callable, **batch: Any) -> None:
        original(**batch)
        # One that a step uses itself has the model's weights, not masters.
        if not bare_optimizers.held_beside(self._model):
            training.build_before_tracing(self._model, **batch)

    def _summary(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Says below the table which layers fell back to float32."""
        shown = original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        show = given.get("print_fn") or print
        for note in fallback.notes(self._model):
            show(f" {note}")
        for layer, why in chosen_layers.reasons(self._model).items():
            place = f"not in float8: {why}" if why else "in float8"
            show(f" {layer.name} multiplies {place}")
        return shown

    def _choose_float8(self, policy: policies.Policy) -> None:
        chosen = chosen_layers.choose(self._model, policy)
        if chosen is None:
            # Its first call builds it; from the second on.
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

    def _compile(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        compiling.compile_suitably(
            self._model, original, args, kwargs, self._level
        )
