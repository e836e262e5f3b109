"""Which dtype policy each layer of a model gets, or has while checked."""

import dataclasses
from collections.abc import Iterable

import keras

from tfmix import _formats
from tfmix._keras import layer_policies, layers
from tfmix.autocast import new_layers, own_code
from tfmix.policy import float32_layers
from tfmix.policy import policy as policies

# Layers of Keras's that hold layers of the user's: those are decided on
# their own. What other layers of Keras's hold (the projections of attention,
# the cell of an LSTM) follows the layer it is in.
_WRAPPERS = ("Wrapper", "Bidirectional", "RNN", "StackedRNNCells", "Pipeline")

_OWN = "has a dtype of its own"
Plan = dict[keras.Layer, keras.DTypePolicy]


@dataclasses.dataclass(frozen=True)
class Step:
    """The plain policy one layer gets, and why.

    A report does not show inputs and models that only pass tensors on.
    """

    layer: keras.Layer
    policy: keras.DTypePolicy
    why: str
    shown: bool = True


def plan(model: keras.Layer, policy: keras.DTypePolicy) -> list[Step]:
    """Decides on each layer of a model once, outer before inner."""
    return _Planner(model, policy).steps


def heads(model: keras.Layer) -> list[keras.Layer]:
    """Lists the layers, also of nested models, whose results a model returns.

    Of what is neither Functional nor Sequential nothing is known.
    """
    if not layers.is_structure(model):
        return []
    results = layers.results(model)
    if not results:
        return heads(model.layers[-1]) or list(model.layers[-1:])
    return [
        head for layer in _makers(results) for head in heads(layer) or [layer]
    ]


def _makers(tensors: Iterable[keras.KerasTensor]) -> list[keras.Layer]:
    """Lists the layers that results come from, through bare `keras.ops`."""
    makers: list[keras.Layer] = []
    seen: set[int] = set()
    waiting = list(tensors)
    while waiting:
        operation, taken = layers.maker(waiting.pop())
        if id(operation) in seen:
            continue
        seen.add(id(operation))
        if isinstance(operation, keras.Layer):
            makers.append(operation)
        # Else the user has cast the result to float32 already.
        elif type(operation).__name__ != "Cast" or (
            keras.backend.standardize_dtype(operation.dtype) != "float32"
        ):
            waiting += taken
    return makers


def entry(policy: keras.DTypePolicy, layer: keras.Layer) -> keras.DTypePolicy:
    """Returns the entry of a map for a layer, else the policy as it is."""
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        policy = policy[layer_policies.path_of(layer)]
    return policy


def unused_rules(
    model: keras.Layer, policy: keras.DTypePolicy
) -> tuple[str, ...]:
    """Says of each layer rule a user wrote, if misspelt, that none matches."""
    if not isinstance(policy, policies.Policy):
        return ()
    bare = policies.Policy(policy.level or policy.name)
    known = bare.float32_layers
    written = [("float32_layers", x) for x in policy.float32_layers]
    written += [("float8_layers", x) for x in policy.float8_layers or ()]
    return tuple(
        f"{item!r} in {argument} matches no layer."
        for argument, item in written
        if item not in known
        and not any(
            float32_layers.matches(
                item, type(x), x.name, layer_policies.path_of(x)
            )
            for x in layers.flat_layers(model)
        )
    )


class _Planner:
    def __init__(self, model: keras.Layer, policy: keras.DTypePolicy) -> None:
        self._policy = policy
        self._rules = policies.with_rules(policy)
        self._is_float32 = not policies.is_sixteen_bit(policy)
        self._heads = {id(layer) for layer in heads(model)}
        # In a model with 16-bit layers, a float32 one was chosen to be it.
        self._mixed_before = any(
            layer.compute_dtype in _formats.SIXTEEN_BIT
            for layer in own_code.layers_that_compute(model)
        )
        self._seen: set[int] = set()
        self.steps: list[Step] = []
        self._visit(model, None)

    def _visit(self, layer: keras.Layer, inherited: Step | None) -> None:
        if id(layer) in self._seen:
            return
        self._seen.add(id(layer))
        step = self._decide(layer, inherited)
        self.steps.append(step)
        passed_on = self._passed_on(layer, step, inherited)
        for inner in layers.own_layers(layer):
            self._visit(inner, passed_on)

    def _decide(self, layer: keras.Layer, inherited: Step | None) -> Step:
        if layers.is_input(layer):
            # It computes nothing, but Keras refuses int8 for its dtype too.
            policy = inherited.policy if inherited else self._target(layer)
            return Step(layer, policy, "", shown=False)
        if layers.is_structure(layer):
            why = self._ruled(layer)
            target = (
                keras.DTypePolicy("float32") if why else self._target(layer)
            )
            return Step(layer, target, why or "", shown=False)
        if own := self._own(layer):
            return Step(layer, layer.dtype_policy, own)
        if inherited is not None:
            return Step(layer, inherited.policy, inherited.why)
        if why := self._why_float32(layer) or self._fell_back(layer):
            return Step(layer, keras.DTypePolicy("float32"), why)
        target = self._target(layer)
        return Step(layer, target, f"computes in {target.compute_dtype}")

    def _passed_on(
        self, layer: keras.Layer, step: Step, inherited: Step | None
    ) -> Step | None:
        """Returns what the layers inside a layer get, `None` for their own."""
        names = {base.__name__ for base in type(layer).__mro__}
        # An RNN of Keras's with a cell of the user's decides on it, too.
        composite = bool(names & {"LSTM", "GRU", "SimpleRNN"}) or (
            layers.is_builtin(layer)
            and not isinstance(layer, keras.Model)
            and not names.intersection(_WRAPPERS)
        )
        if inherited is None and not self._ruled(layer) and not composite:
            return None
        why = step.why if step.why.startswith("inside ") else ""
        return dataclasses.replace(step, why=why or f"inside {layer.name}")

    def _own(self, layer: keras.Layer) -> str:
        """Returns why a layer is left alone, "" if it is not."""
        current = layer.dtype_policy
        if getattr(current, "quantization_mode", None) is not None:
            return "quantized"
        dtypes = (layer.compute_dtype, layer.variable_dtype)
        if any(dtype not in _formats.FORMATS for dtype in dtypes):
            return _OWN
        chosen = new_layers.is_chosen(layer) or own_code.why(layer)
        deliberate = self._mixed_before and not chosen
        if deliberate and current.name == "float32" and not self._is_float32:
            return _OWN
        return ""

    def _why_float32(self, layer: keras.Layer) -> str | None:
        if self._is_float32:
            return None
        if why := self._ruled(layer):
            return why
        if self._rules.outside_white_list(type(layer)):
            return "level O1: no matmul"
        if self._rules.level == "O3" and id(layer) not in self._heads:
            return None
        if getattr(layer, "activation", None) is keras.activations.softmax:
            return "a softmax head: in 16 bit it loses small probabilities"
        return "the model's output" if id(layer) in self._heads else None

    def _fell_back(self, layer: keras.Layer) -> str:
        return "" if self._is_float32 else own_code.why(layer)

    def _ruled(self, layer: keras.Layer) -> str | None:
        path = layer_policies.path_of(layer)
        return self._rules.why_float32(type(layer), layer.name, path)

    def _target(self, layer: keras.Layer) -> keras.DTypePolicy:
        return policies.plain(entry(self._policy, layer))


def sixteen_bit_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers of a model that compute in 16 bit now."""
    return [
        layer
        for layer in layers.flat_layers(model)
        if layer.compute_dtype in _formats.SIXTEEN_BIT
    ]


def reference(model: keras.Model) -> Plan:
    """Plans float32 for every layer that computes in floats.

    A quantized layer stays one: with the same integers, around float32.
    """
    return {
        layer: _in_float32(entry(layer.dtype_policy, layer))
        for layer in _movable(model)
    }


def _in_float32(policy: keras.DTypePolicy) -> keras.DTypePolicy:
    if policy.quantization_mode is None:
        return keras.DTypePolicy("float32")
    config = {**policy.get_config(), "source_name": "float32"}
    return type(policy).from_config(config)


def sixteen_bit(model: keras.Model, policy: keras.DTypePolicy | None) -> Plan:
    """Plans what a model is trained under, for layers that compute in floats.

    `None` is the model as it stands. A `Policy` does what `apply_policy` does
    with it; any other policy goes to every layer but those which the maker of
    a 16-bit model left in float32.
    """
    movable = _movable(model)
    if policy is None:
        return {layer: layer_policies.own(layer) for layer in movable}
    if isinstance(policy, policies.Policy):
        planned = {step.layer: step.policy for step in plan(model, policy)}
        return {layer: planned[layer] for layer in movable if layer in planned}
    mixed, whole = bool(sixteen_bit_layers(model)), policies.plain(policy)
    float32 = keras.DTypePolicy("float32")
    return {
        layer: float32 if mixed and layer.compute_dtype == "float32" else whole
        for layer in movable
        if layer.quantization_mode is None
    }


def dtype(planned: Plan, layer: keras.Layer) -> str:
    """Returns the compute dtype a plan has for a layer."""
    policy = planned.get(layer)
    if policy is None:
        return str(layer.compute_dtype)
    return str(entry(policy, layer).compute_dtype)


def _movable(model: keras.Model) -> list[keras.Layer]:
    return [
        layer
        for layer in layers.flat_layers(model)
        if keras.backend.is_float_dtype(
            keras.backend.standardize_dtype(layer.compute_dtype)
        )
    ]
