"""The layers that compute: in 16 bit or, where their code fails, in float32.

Its own code then sees float32 alone. The layers inside it stay in 16 bit and
hand float32 on to it, so that their products stay fast. If it fails as well,
the first error is raised.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from tfmix import _formats, _messages, _users_code
from tfmix._keras import (
    attempts,
    context_values,
    global_state,
    layer_policies,
    layers,
    model_methods,
    replacements,
    variables,
)
from tfmix.autocast import exact_inputs, finite_constants
from tfmix.gradient_scaling import float32_values, tensors, weight_gradients
from tfmix.policy import policy as policies

_CALL = "call"
# Marks an error that float32 did not fix: no layer further out tries again.
_FINAL = "_tfmix_final"
_FLOAT32 = policies.Policy("float32")


def put_on(layer: keras.Layer) -> None:
    """Lets a layer fall back to float32 where its code needs it."""
    if layers.marks(layer).fallback is None:
        layers.rematerialize_anew(layer)
        put_back(layer, _State(layer))


def put_back(layer: keras.Layer, state: Any) -> None:
    """Lets a layer be again as `take_off` found it."""
    if state is None:
        return
    layers.mark(layer, fallback=state)
    if isinstance(layer, keras.Model):
        model_methods.put(layer, model_methods.FALLBACK, state)
        return
    state.own_call, original = vars(layer).get(_CALL), layer.call

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return state.run(original, *args, **kwargs)

    state.call = call
    vars(layer)[_CALL] = call


def take_off(layer: keras.Layer) -> Any:
    """Takes a layer's way to fall back off, and returns it."""
    state: _State | None = layers.marks(layer).fallback
    is_model = isinstance(layer, keras.Model)
    # What somebody has put on top is theirs to remove.
    if state is None or not (is_model or vars(layer).get(_CALL) is state.call):
        return None
    layers.mark(layer, fallback=None)
    if is_model:
        model_methods.take_off(layer, model_methods.FALLBACK)
    elif state.own_call is not None:
        vars(layer)[_CALL] = state.own_call
    else:
        vars(layer).pop(_CALL)
    return state


@contextlib.contextmanager
def anew(model: keras.Layer) -> Iterator[None]:
    """Lets a model's layers fall back for a block, unseen, as if new."""
    with_code = list(filter(can_have, layers.flat_layers(model)))
    before = [(layer, take_off(layer)) for layer in with_code]
    try:
        for layer, _ in before:
            if layers.marks(layer).fallback is None:
                put_back(layer, _State(layer, tells=False))
        yield
    finally:
        for layer, state in before:
            take_off(layer)
            put_back(layer, state)


def can_have(layer: keras.Layer) -> bool:
    """Returns whether a layer has code of its own: a graph only passes on."""
    return not layers.is_structure(layer)


def why(layer: keras.Layer) -> str:
    """Returns why a layer has fallen back to float32, "" if it has not."""
    state: _State | None = layers.marks(layer).fallback
    return state.why if state is not None and state.is_float32() else ""


def returned_dtype(layer: keras.Layer) -> str:
    """Returns the dtype of a layer's results, also of one that fell back."""
    state: _State | None = layers.marks(layer).fallback
    if state is None or not state.is_float32():
        return str(layer.compute_dtype)
    return state.returns


def layers_that_compute(model: keras.Layer) -> list[keras.Layer]:
    """Lists the layers of a model that compute something, at any depth.

    Functional and Sequential models only pass tensors on, whatever their own
    dtype policy says; a subclassed model may compute in its `call`.
    """
    return list(filter(can_have, layers.called(model)))


def computes_in(model: keras.Layer, dtype: str) -> bool:
    """Returns whether any layer of a model computes, or returns, in a dtype."""
    return any(
        dtype in (layer.compute_dtype, returned_dtype(layer))
        for layer in layers_that_compute(model)
    )


def has_sixteen_bit_variables(model: keras.Layer) -> bool:
    """Returns whether a model keeps, or will keep, variables in 16 bit."""
    return any(
        layer.variable_dtype in _formats.SIXTEEN_BIT
        for layer in layers_that_compute(model)
    )


def mended_step(
    model: keras.Model, error: Exception, trace: Callable[[], Any]
) -> Any:
    """Traces a `train_step` that failed, on layers that hand float32 on to it.

    Raises the error as it was if that does not fix it.
    """
    if _is_final(error):
        raise error
    with contextlib.ExitStack() as undo:
        _own_code(model, undo)
        try:
            logs = trace()
        except Exception:
            raise error from None
        undo.pop_all()
    _messages.warn(
        "the layers that the `train_step` of %r calls hand float32 on "
        "to it from now on, because its code cannot compute in 16 bit. %s",
        model.name,
        _cause(error),
    )
    return logs


def notes(model: keras.Layer) -> list[str]:
    """Says which layers of a model have fallen back to float32, and why."""
    return [
        f"{layer.name} computes in float32: {cause}"
        for layer in layers.flat_layers(model)
        if (cause := why(layer))
    ]


def assigning(original: Callable) -> Callable:
    """Returns what assigns what float32 has to a float32 variable.

    16-bit numbers whose float32 values are not known make the layer whose code
    assigns them fall back.
    """

    def assign(self: Any, value: Any) -> Any:
        is_wide = variables.stored_dtype(self) == "float32"
        if not is_wide or not tensors.is_16_bit(value):
            return original(self, value)
        value = tensors.uncast(value)
        may_fall_back = context_values.block.get().may_fall_back
        if may_fall_back and not weight_gradients.is_exact(value):
            raise TypeError(
                f"16-bit numbers are assigned to the variable {self.path!r}, "
                "which is float32."
            )
        return original(self, weight_gradients.exact(value))

    return assign


class _State:
    """How the `call` of one layer computes; also a part of a model."""

    def __init__(self, layer: keras.Layer, tells: bool = True) -> None:
        self._layer = layer
        self._tells = tells
        self.why = ""
        # The policy it fell back to, and the dtype it returns as before.
        self._policy: keras.DTypePolicy | None = None
        self.returns = ""
        # It returns float32, to the code of a layer that fell back.
        self.hands_float32 = False
        # It has not been called yet.
        self._new = True
        # In which modes its call has run through without an error.
        self._proven: set[bool] = set()
        # What stands as the layer's `call`, and what had stood there before.
        self.call: Callable | None = None
        self.own_call: Callable | None = None
        self.wrappers: Mapping[str, model_methods.Wrapper] = {_CALL: self.run}

    def is_float32(self) -> bool:
        """Returns whether it has fallen back, and nobody chose a dtype since."""
        policy = self._policy
        return policy is not None and policy is layer_policies.own(self._layer)

    def run(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if self._new:
            self._new = False
            self._ask_for_float32()
        mode = kwargs.get("training") is True
        is_new = mode not in self._proven and not self.is_float32()
        if is_new and attempts.would_last(self._layer):
            with attempts.scratch():
                self._run(original, args, kwargs)
        outputs = self._run(original, args, kwargs, is_new)
        self._proven.add(mode)
        if self.hands_float32:
            return tensors.map_leaves(outputs, tensors.wide)
        return outputs

    def _run(
        self, original: Callable, args: Any, kwargs: Any, is_new: bool = True
    ) -> Any:
        """Calls; once more in float32 if that fails, as if never tried."""
        if self.is_float32():
            return self._in_float32(original, args, kwargs)
        restore = attempts.noted(self._layer, is_new)
        try:
            with self._attempt():
                return original(*args, **kwargs)
        except Exception as error:
            restore()
            if _is_final(error) or not _may_change(self._layer):
                raise
            with contextlib.ExitStack() as undo:
                self._fall_back(_cause(error), undo)
                try:
                    outputs = self._in_float32(original, args, kwargs)
                except Exception:
                    restore()
                    vars(error)[_FINAL] = True
                    raise error from None
                undo.pop_all()
            self._tell()
            return outputs

    def _attempt(self) -> contextlib.AbstractContextManager[None]:
        """Says around a call what the code in it may assign.

        Keras's own layers keep 16 bit in a state, such as that of an RNN.
        """
        layer = self._layer
        before = context_values.block.get().may_fall_back
        if _users_code.in_library(type(layer).__module__):
            now = False
        else:
            now = _may_change(layer)
        if now == before:
            return contextlib.nullcontext()
        return context_values.holding(may_fall_back=now)

    def _ask_for_float32(self) -> None:
        """Lets what is inside a float32 layer of the user's hand float32 on.

        So its code computes as it did before it was saved, if it fell back.
        """
        layer = self._layer
        if layer.compute_dtype != "float32":
            return
        theirs = not _users_code.in_library(type(layer).__module__)
        if theirs and _may_change(layer):
            for inner in layers.own_layers(layer):
                put_on(inner)
                layers.marks(inner).fallback.hands_float32 = True

    def _fall_back(self, cause: str, undo: contextlib.ExitStack) -> None:
        """Makes the layer float32, and lets what is inside hand float32 on."""
        self.why, self.returns = cause, self._layer.compute_dtype
        _own_code(self._layer, undo)
        _make_float32(self._layer, undo)
        self._policy = layer_policies.own(self._layer)

    def _in_float32(self, original: Callable, args: Any, kwargs: Any) -> Any:
        args, kwargs = tensors.map_leaves((args, kwargs), tensors.exact)
        with (
            layers.autocast("float32"),
            # Of the layers that it makes, too.
            context_values.holding(policy=_FLOAT32),
        ):
            outputs = original(*args, **kwargs)
        is_model = isinstance(self._layer, keras.Model)
        if is_model and global_state.is_outermost(self._layer):
            return outputs
        return tensors.map_leaves(outputs, self._narrow)

    def _narrow(self, value: Any) -> Any:
        """Rounds a result, and keeps what a loaded file's layer returns."""
        result = finite_constants.finite(value, self.returns)
        float32_values.keep(result, value, is_wide=True)
        return result

    def _tell(self) -> None:
        if not self._tells:
            return
        _messages.warn_once(
            "layer %r (%s) computes in float32 from now on, because its "
            "code cannot compute in 16 bit; so do others with that code. %s To "
            "fix it, write `x.dtype` where that code makes a tensor or a "
            "constant, or compute in float32 there; to keep it so, make the "
            'layer with dtype="float32".',
            self._layer.name,
            type(self._layer).__name__,
            self.why,
            about=(type(self._layer), self.why),
        )


def _is_final(error: BaseException | None) -> bool:
    """Returns whether float32 has been tried; Keras raises errors anew."""
    while error is not None:
        if vars(error).get(_FINAL):
            return True
        error = error.__context__
    return False


def _cause(error: Exception) -> str:
    """Returns what an error says first, and where."""
    text = re.sub(r"\x1b\[\d+m|Exception encountered .*", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kind = f"{type(error).__name__}: "
    # AutoGraph says where before it says what.
    first = [line for line in lines if line.startswith(kind)] or lines or [""]
    said = first[0].removeprefix(kind).rstrip(".")
    return f"{_users_code.users_line(error)}{kind}{said}."


def _own_code(layer: keras.Layer, undo: contextlib.ExitStack) -> None:
    """Lets the layers inside one hand float32 on to its own code."""
    for inner in layers.own_layers(layer):
        if _is_cell(inner):
            # It shares its states with the loop around it.
            for part in layers.flat_layers(inner):
                if part.compute_dtype in _formats.SIXTEEN_BIT:
                    _make_float32(part, undo)
            continue
        put_on(inner)
        replacements.swap(
            undo, layers.marks(inner).fallback, "hands_float32", True
        )
    for inner in layers.flat_layers(layer)[1:]:
        before = layer_policies.own(inner)
        undo.callback(layer_policies.set_policy, inner, before)
        layer_policies.save_as_float32(inner)


def _make_float32(layer: keras.Layer, undo: contextlib.ExitStack) -> None:
    undo.callback(layer_policies.set_policy, layer, layer_policies.own(layer))
    exact_inputs.make_float32(layer)


def _is_cell(layer: keras.Layer) -> bool:
    return hasattr(layer, "state_size") and not isinstance(
        layer, keras.layers.RNN
    )


def _may_change(layer: keras.Layer) -> bool:
    """Returns whether anything of a layer is in 16 bit, and is its own affair."""
    return not _is_cell(layer) and any(
        inner.compute_dtype in _formats.SIXTEEN_BIT
        for inner in layers.flat_layers(layer)
    )
