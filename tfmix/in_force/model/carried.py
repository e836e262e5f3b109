"""A model made under a policy carries it: its rules, losses and `compile`.

So the policy lasts when the scope that the model was made in has ended.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tfmix import _errors, _formats, _messages
from tfmix._keras import (
    compile_method,
    global_state,
    layers,
    model_methods,
    training,
)
from tfmix.devices import devices
from tfmix.float8 import chosen_layers
from tfmix.in_force.layer import dtype_errors, fallback, uncast_inputs
from tfmix.in_force.model import (
    averaged_weights,
    compiling,
    computing_layers,
    model_outputs,
    skip_watch,
)
from tfmix.in_force.process_wide import active_rules, ops, tensors
from tfmix.policy import policy as policies
from tfmix.scaling import given_gradients, guard, saving
from tfmix.scaling import optimizer as scaling
from tfmix.scaling.border import power

# Marks what stands in for a `train_function` until its first step.
_MENDS = "_tfmix_mends"


def carry(model: keras.Model, policy: keras.DTypePolicy) -> None:
    """Makes a model carry a policy, or none if it has no 16-bit part."""
    chosen_layers.restore(model, {})
    if policies.is_sixteen_bit(policy):
        compile_method.stand_by()
        layers.rematerialize_anew(model)
        carried = _Carried(model, policy)
        model_methods.put(model, model_methods.RULES, carried)
    else:
        model_methods.take_off(model, model_methods.RULES)


def carried_policy(model: keras.Model) -> keras.DTypePolicy | None:
    """Returns the policy a model carries, `None` if it carries none."""
    found = model_methods.part(model, model_methods.RULES)
    return found.policy if isinstance(found, _Carried) else None


def _adopting(original: Callable[..., None]) -> Callable[..., None]:
    """Returns what stands in for `Trainer.compile`."""
    compile_suitably = compiling.wrapped(original)

    @functools.wraps(original)
    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        optimizer = kwargs.get("optimizer", args[0] if args else None)
        in_file = getattr(optimizer, "guarded_in_file", False)
        alone = in_file == saving.GUARDED_ALONE
        wanted = in_file or compile_method.sees_all()
        if wanted and not alone and carried_policy(self) is None:
            _adopt(self)
        if compile_method.sees_all() or carried_policy(self):
            compile_suitably(self, *args, **kwargs)
            return
        original(self, *args, **kwargs)
        if in_file:
            guard.put_on(self)

    return compile


compile_method.use(_adopting)


def _adopt(model: keras.Model) -> None:
    """Makes a model with 16-bit layers as if it was made under their policy."""
    policy = _policy_of_layers(model)
    if policy is None:
        return
    for layer in layers.flat_layers(model):
        if fallback.can_have(layer) and fallback.STATE not in vars(layer):
            uncast_inputs.keep_exact(layer)
            fallback.put_on(layer)
    carry(model, policy)


def _policy_of_layers(model: keras.Model) -> keras.DTypePolicy | None:
    for layer in layers.flat_layers(model)[1:]:
        if isinstance(layer, keras.Model) and carried_policy(layer):
            return carried_policy(layer)
    for dtype in _formats.SIXTEEN_BIT:
        if computing_layers.computes_in(model, dtype):
            pure = computing_layers.has_sixteen_bit_variables(model)
            return policies.Policy(dtype if pure else f"mixed_{dtype}")
    return None


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
        self._rules = frozenset({*ruled.float32_ops, ops.PENALTIES})
        self._outputs = model_outputs.Outputs(model)
        self.wrappers: Mapping[str, model_methods.Wrapper] = {
            "call": self._call,
            "compile": self._compile,
            "fit": self._fit,
            "evaluate": functools.partial(averaged_weights.swapped, model),
            "predict": functools.partial(averaged_weights.swapped, model),
            "make_train_function": self._make_train_function,
            "summary": self._summary,
            "compute_loss": self._in_float32,
            "compute_metrics": self._in_float32,
            "train_step": self._train_step,
            "test_step": self._under_rules,
            **dict.fromkeys(layers.own_methods(model), self._own_method),
        }

    def _under_rules(
        self, original: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        active_rules.stand_by(self._rules)
        with active_rules.block(self._rules):
            return original(*args, **kwargs)

    def _fit(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        fit = functools.wraps(original)(
            functools.partial(averaged_weights.swapped, self._model, original)
        )
        return skip_watch.fit(self._model, fit, *args, **kwargs)

    def _train_step(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Lets a step of the user's own see true gradients only."""
        with given_gradients.train_step(), power.placed(self._placing(args)):
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
        call = functools.partial(self._under_rules, original)
        return self._outputs.of(call, *args, **kwargs)

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

    def _make_train_function(
        self, original: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        """Traces a `train_step` of the user's anew if it mixes dtypes."""
        original(*args, **kwargs)
        model, function = self._model, self._model.train_function
        if not training.has_own_step(model) or hasattr(function, _MENDS):
            return function

        def trace_anew(*arguments: Any) -> Any:
            # So that nothing of the failed trace runs.
            original(force=True)
            return model.train_function(*arguments)

        @functools.wraps(function)
        def first(*arguments: Any) -> Any:
            built = layers.is_built(model)
            arguments = training.for_two_calls(model, arguments)
            try:
                found = function(*arguments)
            except Exception as error:
                if not built:
                    # Variables made in a failed trace have no value.
                    raise
                trace = functools.partial(trace_anew, *arguments)
                return fallback.mended_step(model, error, trace)
            if model.train_function is first:
                model.train_function = function
            return found

        vars(first)[_MENDS] = model.train_function = first
        return first

    def _own_method(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Says what to write where a method of the user's mixes dtypes."""
        try:
            return original(*args, **kwargs)
        except Exception as error:
            is_new = not getattr(error, "__notes__", None)
            outside = is_new and global_state.entry_layer() is None
            if outside and dtype_errors.is_about_dtypes(error):
                error.add_note(
                    f"tfmix: {_errors.users_line(error)}outside of "
                    "`call` layers return 16 bit and weights are float32. "
                    "Write keras.ops.cast(weight, x.dtype) there, or "
                    "keras.ops.cast(x, 'float32') for the layer's result."
                )
            raise

    def _compile(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        compiling.compile_suitably(
            self._model, original, args, kwargs, self._level
        )
