"""Which dtype policy each layer of an existing model gets, and why."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import keras

from tfmix import _formats
from tfmix._keras import layer_policies, layers
from tfmix.policy import layer_rules
from tfmix.policy import policy as policies
from tfmix.policy.in_force import new_layers, suited_optimizer

# Layers of Keras's that hold layers of the user's: those are decided on
# their own. What other layers of Keras's hold (the projections of attention,
# the cell of an LSTM) follows the layer it is in.
_WRAPPERS = ("Wrapper", "Bidirectional", "RNN", "StackedRNNCells", "Pipeline")

_OUTPUT = "the model's output"
_SOFTMAX_HEAD = "a softmax head: in 16 bit it loses logits recovery"
_OWN = "has a dtype of its own"


@dataclasses.dataclass(frozen=True)
class Step:
    """What happens to one layer.

    Attributes:
        layer: The layer.
        policy: The plain policy it gets.
        why: The reason, in words.
        shown: Whether a report lists it; models that only pass tensors on
            are left out.
    """

    layer: Any
    policy: keras.DTypePolicy
    why: str
    shown: bool = True


def plan(model: Any, policy: keras.DTypePolicy) -> list[Step]:
    """Decides on every layer of a model, changing nothing.

    Args:
        model: A Keras model or layer.
        policy: The policy to apply.

    Returns:
        One step per layer, each layer once, outer before inner.
    """
    return _Planner(model, policy).steps


def heads(model: Any) -> list[Any]:
    """Lists the layers whose results a model returns.

    Args:
        model: A Functional or Sequential model; of others nothing is known.

    Returns:
        The layers; nested models are looked into.
    """
    if not suited_optimizer.is_graph(model):
        return []
    results = layers.results(model)
    if not results:
        return heads(model.layers[-1]) or list(model.layers[-1:])
    return [
        head for layer in _makers(results) for head in heads(layer) or [layer]
    ]


def _makers(tensors: Iterable[Any]) -> list[Any]:
    """Lists the layers that results come from, through bare `keras.ops`."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting = list(tensors)
    while waiting:
        operation, taken = layers.maker(waiting.pop())
        if id(operation) in seen:
            continue
        seen.add(id(operation))
        if isinstance(operation, keras.Layer):
            found.append(operation)
        elif not _casts_to_float32(operation):
            waiting += taken
    return found


def _casts_to_float32(operation: Any) -> bool:
    """Says whether what the user wrote makes the result float32 already."""
    if type(operation).__name__ != "Cast":
        return False
    found: str = keras.backend.standardize_dtype(operation.dtype)
    return found == "float32"


def unused_rules(model: Any, policy: keras.DTypePolicy) -> tuple[str, ...]:
    """Names the layer rules a user wrote that match nothing, as misspelt ones.

    Args:
        model: A Keras model.
        policy: The policy to apply.

    Returns:
        One sentence per rule.
    """
    if not isinstance(policy, policies.Policy):
        return ()
    bare = policies.Policy(policy.level or policy.name)
    written = set(policy.float32_layers) - set(bare.float32_layers)
    return tuple(
        f"{item!r} in float32_layers matches no layer."
        for item in policy.float32_layers
        if item in written
        and not any(
            layer_rules.matches(
                item, type(x), x.name, layer_policies.path_of(x)
            )
            for x in layers.flat_layers(model)
        )
    )


class _Planner:
    def __init__(self, model: Any, policy: keras.DTypePolicy) -> None:
        self._policy = policy
        self._rules = policies.with_rules(policy)
        self._is_float32 = not policies.is_sixteen_bit(policy)
        self._heads = {id(layer) for layer in heads(model)}
        # In a model with 16-bit layers, a float32 one was chosen to be it.
        self._mixed_before = any(
            layer.compute_dtype in _formats.SIXTEEN_BIT
            for layer in suited_optimizer.computing_layers(model)
        )
        self._seen: set[int] = set()
        self.steps: list[Step] = []
        self._visit(model, None)

    def _visit(self, layer: Any, inherited: Step | None) -> None:
        if id(layer) in self._seen:
            return
        self._seen.add(id(layer))
        if isinstance(layer, keras.layers.InputLayer):
            return
        step = self._decide(layer, inherited)
        self.steps.append(step)
        passed_on = self._passed_on(layer, step, inherited)
        for inner in layers.parts(layer):
            self._visit(inner, passed_on)

    def _decide(self, layer: Any, inherited: Step | None) -> Step:
        if suited_optimizer.is_graph(layer):
            why = self._rules.why_float32(
                type(layer), layer.name, layer_policies.path_of(layer)
            )
            target = _float32() if why else self._target(layer)
            return Step(layer, target, why or "", shown=False)
        own = self._own(layer)
        if own:
            return Step(layer, layer.dtype_policy, own)
        if inherited is not None:
            return Step(layer, inherited.policy, inherited.why)
        why = self._why_float32(layer)
        if why:
            return Step(layer, _float32(), why)
        target = self._target(layer)
        return Step(layer, target, f"computes in {target.compute_dtype}")

    def _passed_on(
        self, layer: Any, step: Step, inherited: Step | None
    ) -> Step | None:
        """Returns what the layers inside a layer get, `None` for their own."""
        ruled = self._rules.why_float32(
            type(layer), layer.name, layer_policies.path_of(layer)
        )
        names = {base.__name__ for base in type(layer).__mro__}
        composite = layer.__class__.__module__.split(".")[0] == "keras"
        composite = composite and not isinstance(layer, keras.Model)
        # An RNN of Keras's with a cell of the user's decides on it, too.
        if "LSTM" in names or "GRU" in names or "SimpleRNN" in names:
            composite = True
        elif names.intersection(_WRAPPERS):
            composite = False
        if inherited is None and not ruled and not composite:
            return None
        why = step.why if step.why.startswith("inside ") else ""
        return dataclasses.replace(step, why=why or f"inside {layer.name}")

    def _own(self, layer: Any) -> str:
        """Returns why a layer is left alone, "" if it is not."""
        current = layer.dtype_policy
        if getattr(current, "quantization_mode", None) is not None:
            return "quantized"
        dtypes = (layer.compute_dtype, layer.variable_dtype)
        if any(dtype not in _formats.FORMATS for dtype in dtypes):
            return _OWN
        deliberate = self._mixed_before and not new_layers.is_chosen(layer)
        if deliberate and current.name == "float32" and not self._is_float32:
            return _OWN
        return ""

    def _why_float32(self, layer: Any) -> str | None:
        if self._is_float32:
            return None
        path = layer_policies.path_of(layer)
        why = self._rules.why_float32(type(layer), layer.name, path)
        if why:
            return why
        if self._rules.outside_white_list(type(layer)):
            return "level O1: no matmul"
        if self._rules.level == "O3" and id(layer) not in self._heads:
            return None
        activation = getattr(layer, "activation", None)
        if activation is keras.activations.softmax:
            return _SOFTMAX_HEAD
        return _OUTPUT if id(layer) in self._heads else None

    def _target(self, layer: Any) -> keras.DTypePolicy:
        if isinstance(self._policy, keras.dtype_policies.DTypePolicyMap):
            found: keras.DTypePolicy = self._policy[
                layer_policies.path_of(layer)
            ]
            return policies.plain(found)
        return policies.plain(self._policy)


def _float32() -> keras.DTypePolicy:
    return keras.DTypePolicy("float32")
