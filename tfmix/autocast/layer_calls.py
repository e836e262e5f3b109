"""Calls layers on exact inputs, and in float32 if their code fails in 16 bit.

Keras casts the float inputs of a subclassed layer to 16 bit before its `call`.
Ids then reach an `Embedding` rounded (2049 becomes 2048), and raw features lose
digits before a `Normalization`. So each cast notes its input on the tensor, and
these layers use that.

After a fallback, the layer's own code gets only float32. The layers that this
code calls stay in 16 bit and return float32 to it, so that their products stay
fast. If that fails as well, the first error is raised.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from tfmix import _formats, _messages, _users_code
from tfmix._keras import context, graphs, layers, variables
from tfmix.ops import tensors
from tfmix.policy import policy as policies

# Marks an error that float32 did not fix, so that outer layers do not retry.
_FINAL = "_tfmix_final"
_FLOAT32 = policies.Policy("float32")
# The dtypes of a user's code (`context.Block`).
FLOAT32, SIXTEEN_BIT = "float32", "16 bit"
_AS_AROUND = contextlib.nullcontext()
# Larger whole numbers are not exact: 2 to the number of significant bits.
_EXACT_UP_TO = {"float16": 2048, "bfloat16": 256}


def attach(layer: keras.Layer) -> None:
    """Makes a layer use exact inputs, and float32 where its code needs it."""
    if isinstance(layer, keras.Sequential | keras.layers.Masking):
        # Each of its layers casts its own inputs. Other values may round to
        # the masked one.
        _use_converter(layer, _pass_on)
    # A layer's own `compute_dtype` may need what its constructor sets later.
    elif layer.dtype_policy.compute_dtype == "float32" or isinstance(
        layer, layers.DATA_LAYER
    ):
        _use_converter(layer, _recover)
    elif not layers.takes_casts(layer):
        _use_converter(layer, _remember)
    if not layers.is_structure(layer) and _of(layer) is None:
        layers.rematerialize_anew(layer)
        layers.attach(layer, layers.CALL, _LayerCall(layer))


def _of(layer: keras.Layer) -> Any:
    return layers.part(layer, layers.CALL)


def begin_exact(model: keras.Model) -> None:
    """Passes exact inputs from a Sequential to a model at its beginning."""
    is_sequential = isinstance(model, keras.Sequential) and model.layers
    # Keras has created its input by then, with the first model's shape.
    if is_sequential and hasattr(model.layers[0], "input_shape"):
        graphs.widen_inputs(model)


def build_exactly(
    model: keras.Sequential, build: Callable, *args: Any, **kwargs: Any
) -> None:
    """Builds a Sequential whose input rounds no ids and no raw features.

    Without an `Input` of the user's, Keras creates one in 16 bit.
    """
    first = layers.own_layers(model)[:1]
    build(*args, **kwargs)
    if not layers.is_input(first[0]):
        graphs.widen_inputs(model)


def make_float32(layer: keras.Layer) -> None:
    """Makes a layer compute in float32, on inputs before any cast."""
    layers.set_policy(layer, keras.DTypePolicy("float32"))
    _use_converter(layer, _recover)


# These convert an input of a layer, by Keras's `convert_input`.


def _use_converter(layer: keras.Layer, convert: Callable) -> None:
    """Gives the layer a policy of its own with another `convert_input`."""
    policy = layer.dtype_policy
    original = functools.partial(type(policy).convert_input, policy)
    convert = functools.partial(convert, original)
    layers.change_policy(layer, convert_input=convert)


def _remember(original: Callable, x: Any, autocast: bool, dtype: str) -> Any:
    """Notes on what a layer casts what it was before."""
    x = variables.read(x)
    tensor = original(x, False, dtype)
    converted = original(tensor, autocast, dtype)
    if converted is not tensor:
        tensors.note_cast(x, converted, tensor)
    return converted


def _recover(original: Callable, x: Any, autocast: bool, dtype: str) -> Any:
    """Gives a layer what it gets as it was before another layer cast it."""
    exact = tensors.before_cast(x)
    converted = original(exact, autocast, dtype)
    if converted is not exact:
        layers.copy_mask(exact, converted)
    return converted


def _pass_on(original: Callable, x: Any, autocast: bool, dtype: str) -> Any:
    """Gives a layer, which casts nothing, what it gets as it was before."""
    return original(tensors.before_cast(x), False, dtype)


@contextlib.contextmanager
def fresh(model: keras.Layer) -> Iterator[None]:
    """Gives a model's layers new fallbacks in a block, without messages."""
    inside = layers.flat_layers(model)
    before = [(layer, layers.by_role(layer)) for layer in inside]
    try:
        for layer in inside:
            if not layers.is_structure(layer):
                state = _LayerCall(layer, tells=False)
                layers.attach(layer, layers.CALL, state)
        yield
    finally:
        for layer, parts in before:
            layers.restore(layer, parts)


def reason(layer: keras.Layer) -> str:
    """Returns why a layer has fallen back to float32, "" if it has not."""
    state = _of(layer)
    return state.why if state is not None and state.is_float32() else ""


def reasons(model: keras.Layer) -> list[str]:
    """Lists which layers of a model have fallen back to float32, and why."""
    return [
        f"{layer.name} computes in float32: {cause}"
        for layer in layers.flat_layers(model)
        if (cause := reason(layer))
    ]


def assign_exactly(original: Callable, variable: Any, value: Any) -> Any:
    """Assigns to a variable; to a float32 one, what is behind a 16-bit value.

    If that is not known, the layer whose code assigns it falls back.
    """
    has_rules = policies.SIXTEEN_BIT in context.active_rules()
    is_rounded = has_rules and variables.is_float32(variable)
    if not is_rounded or context.on_shapes_only():
        return original(variable, value)
    value = tensors.before_cast(value)
    may_fall_back = context.block.get().users_code == SIXTEEN_BIT
    if may_fall_back and tensors.weight_of(value) is None:
        raise TypeError(
            f"16-bit numbers are assigned to the variable {variable.path!r}, "
            "which is float32."
        )
    return original(variable, tensors.to_float32(value))


class _LayerCall:
    """The inputs of one layer's `call`, and the dtype in which it computes."""

    def __init__(self, layer: keras.Layer, tells: bool = True) -> None:
        self._layer = layer
        self._tells = tells
        # Whether its code is not Keras's.
        self._is_users = not layers.in_library(type(layer).__module__)
        self.why = ""
        # The float32 policy after a fallback.
        self._policy: keras.DTypePolicy | None = None
        # The modes, training or not, in which its call has succeeded.
        self._proven: set[bool] = set()
        self.wrappers: Mapping[str, layers.Wrapper] = {"call": self.run}

    def is_float32(self) -> bool:
        """Returns whether it has fallen back, and kept that dtype since."""
        policy = self._policy
        return policy is not None and policy is layers.own_policy(self._layer)

    def run(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        around = context.block.get().users_code
        mode = kwargs.get("training") is True
        is_new = mode not in self._proven and not self.is_float32()
        outputs = self._run(original, args, kwargs, is_new)
        self._proven.add(mode)
        # What most layers return is 16 bit as it is.
        if not tensors.is_16_bit(outputs) and self._returns_16_bit():
            dtype = self._layer.compute_dtype
            outputs = tensors.map_leaves(
                outputs,
                lambda x: tensors.copy_notes(x, tensors.narrow(x, dtype)),
            )
        if around == FLOAT32:
            return tensors.map_leaves(outputs, tensors.to_float32_with_notes)
        return outputs

    def _run(
        self, original: Callable, args: Any, kwargs: Any, is_new: bool
    ) -> Any:
        """Calls the layer; if that fails, undoes it and tries in float32."""
        if self.is_float32():
            return self._in_float32(original, args, kwargs)
        # Keras's own layers do not fail after they have assigned.
        restore = _noted(self._layer, is_new and self._is_users)
        try:
            with self._attempt():
                return self._call(original, args, kwargs)
        except Exception as error:
            restore()
            if self.is_float32():
                # The code of another replica has failed first.
                return self._in_float32(original, args, kwargs)
            if _is_final(error) or not _may_change(self._layer):
                raise
            before = layers.own_policy(self._layer)
            make_float32(self._layer)
            self.why = _cause(error)
            self._policy = layers.own_policy(self._layer)
            try:
                outputs = self._in_float32(original, args, kwargs)
            except Exception:
                restore()
                layers.set_policy(self._layer, before)
                vars(error)[_FINAL] = True
                raise error from None
            self._tell(error)
            return outputs

    def _call(self, original: Callable, args: Any, kwargs: Any) -> Any:
        layer = self._layer
        if isinstance(layer, keras.layers.SpectralNormalization):
            # It writes its weights back, and so reads them as they are stored.
            # Layers inside it have a dtype of their own.
            with variables.autocast(None):
                return original(*args, **kwargs)
        if isinstance(layer, (keras.layers.Embedding, layers.DATA_LAYER)):
            # Keras does not convert all inputs of these layers.
            args, kwargs = tensors.map_leaves(
                (args, kwargs), tensors.before_cast
            )
        if isinstance(layer, keras.layers.Embedding):
            _warn_of_rounded_ids(layer, keras.tree.flatten((args, kwargs)))
        return original(*args, **kwargs)

    def _attempt(self) -> contextlib.AbstractContextManager[None]:
        """Says whose code runs: what it may assign, and what it is returned.

        Keras's own layers keep a 16-bit state, such as that of an RNN.
        """
        code = ""
        if self._is_users and self._layer.compute_dtype == "float32":
            # If it fell back before it was saved, it computes as before.
            code = FLOAT32
        elif self._is_users and _may_change(self._layer):
            code = SIXTEEN_BIT
        if code == context.block.get().users_code:
            return _AS_AROUND
        return context.holding(users_code=code)

    def _returns_16_bit(self) -> bool:
        """Returns whether what wide ops return to the layer's code is rounded.

        A layer of Keras hands on its own dtype, and so does a cell, whose
        states a loop carries. Probabilities are predictions, more often than
        not, and stay in float32.
        """
        layer = self._layer
        if layer.compute_dtype not in _formats.SIXTEEN_BIT:
            return False
        if layers.is_structure(layer) or layers.last_activation(layer):
            return False
        is_keras = layers.takes_casts(layer)
        return layer.autocast and (is_keras or _is_cell(layer))

    def _in_float32(self, original: Callable, args: Any, kwargs: Any) -> Any:
        args, kwargs = tensors.map_leaves((args, kwargs), _as_float32_input)
        with (
            variables.autocast("float32"),
            # Layers that it creates are float32, too.
            context.holding(policies=(_FLOAT32,), users_code=FLOAT32),
        ):
            return self._call(original, args, kwargs)

    def _tell(self, error: Exception) -> None:
        if not self._tells:
            return
        kind = type(self._layer)
        _messages.warn_once(
            "layer %r (%s) computes in float32 from now on, because its "
            "code cannot compute in 16 bit. %s To fix it, write `x.dtype` "
            "where that code makes a tensor or a constant, or compute in "
            "float32 there; to keep it so, make the layer with "
            'dtype="float32". The same line is not reported again; '
            "`model.summary()` lists every layer that it made float32.",
            self._layer.name,
            kind.__name__,
            self.why,
            # Errors name tensors and variables, which differ for each layer.
            about=(kind.call, _users_code.users_line(error)),
        )


def _warn_of_rounded_ids(layer: keras.layers.Embedding, given: list) -> None:
    ids = next(leaf for leaf in given if hasattr(leaf, "dtype"))
    dtype = keras.backend.standardize_dtype(ids.dtype)
    exact = _EXACT_UP_TO.get(dtype)
    if exact is None or context.on_shapes_only():
        return
    if layer.input_dim <= exact:
        return
    # A model runs this only while it is traced, so a few times, not each step.
    _messages.warn(
        "ids reach Embedding %r as %s, which rounds whole numbers "
        "above %d, and it has %d rows. Feed ids as integers, or slice and "
        "cast them to 'int32' in a layer made with autocast=False.",
        layer.name,
        dtype,
        exact,
        layer.input_dim,
    )


def _as_float32_input(value: Any) -> Any:
    """Returns a float tensor in float32, from before a layer's cast if known.

    It keeps its mask and its logits.
    """
    value = tensors.before_cast(value)
    if tensors.float_dtype(value) == "float64":
        return keras.ops.cast(value, "float32")
    return tensors.to_float32_with_notes(value)


def _is_final(error: BaseException | None) -> bool:
    """Returns whether float32 has been tried; Keras re-raises errors."""
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
    # AutoGraph prints the place before the message.
    first = [line for line in lines if line.startswith(kind)] or lines or [""]
    said = first[0].removeprefix(kind).rstrip(".")
    return f"{_users_code.users_line(error)}{kind}{said}."


def _is_cell(layer: keras.Layer) -> bool:
    return hasattr(layer, "state_size") and not isinstance(
        layer, keras.layers.RNN
    )


def _may_change(layer: keras.Layer) -> bool:
    """Returns whether a layer, or a layer inside it, computes in 16 bit."""
    return any(
        inner.compute_dtype in _formats.SIXTEEN_BIT
        for inner in layers.flat_layers(layer)
    )


def _noted(layer: keras.Layer, is_new: bool) -> Callable[[], None]:
    """Notes what a call may assign and add; returns a function that undoes it.

    Outside a stateless scope it notes only new calls, because it copies the
    values. In a graph of TensorFlow, the old values are assigned again.
    """
    scope: Any = context.open_scope()
    values = []
    if scope is not None:
        mapping, losses = dict(scope.state_mapping), list(scope.losses)
    elif is_new:
        values = [
            (variable, variables.read(variable))
            for inner in layers.flat_layers(layer)
            for variable in variables.own_state(inner)
            if variables.has_value(variable)
        ]

    def restore() -> None:
        if scope is not None:
            scope.state_mapping, scope.losses = dict(mapping), list(losses)
        for variable, value in values:
            # A replica cannot assign a variable without an aggregation, so
            # this has its value still.
            with contextlib.suppress(ValueError):
                variable.assign(value)
        # The losses of a failed call would count twice.
        layers.drop_losses(layer)

    return restore
