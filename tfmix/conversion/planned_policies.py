"""Plans the dtype policy of each layer of a model."""

import dataclasses
from collections.abc import Iterable

import keras

from tfmix import _formats
from tfmix._keras import graphs, layers
from tfmix.autocast import layer_calls
from tfmix.policy import float32_layers
from tfmix.policy import policy as policies

# These Keras layers hold layers of the user, which are decided one by one. In
# other Keras layers, inner layers (the projections of attention, the cell of
# an LSTM) follow the outer layer.
_WRAPPERS = ("Wrapper", "Bidirectional", "RNN", "StackedRNNCells", "Pipeline")

_OWN = "has its own dtype"


@dataclasses.dataclass(frozen=True)
class Step:
    """The plain policy that a layer gets, and why.

    Reports do not show inputs and models, which compute nothing themselves.

    Attributes:
        layer: The layer.
        policy: Its policy.
        why: The reason.
        shown: Whether reports show it.
        by_choice: Whether somebody chose float32 for it, so that a conversion
            leaves it, and the next one as well.
    """

    layer: keras.Layer
    policy: keras.DTypePolicy
    why: str
    shown: bool = True
    by_choice: bool = False


def plan(model: keras.Layer, policy: keras.DTypePolicy) -> list[Step]:
    """Decides on each layer of a model once, outer layers first."""
    return _Planner(model, policy).steps


def heads(model: keras.Layer) -> list[keras.Layer]:
    """Lists the layers, nested ones included, that produce a model's outputs.

    The list is empty for models that are neither Functional nor Sequential.
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
    """Lists the layers that produce tensors, looking through `keras.ops`."""
    makers: list[keras.Layer] = []
    seen: set[int] = set()
    waiting = list(tensors)
    while waiting:
        operation, inputs = graphs.maker(waiting.pop())
        if id(operation) in seen:
            continue
        seen.add(id(operation))
        if isinstance(operation, keras.Layer):
            makers.append(operation)
        # A cast to float32 shows that the user has dealt with the output.
        elif type(operation).__name__ != "Cast" or (
            keras.backend.standardize_dtype(operation.dtype) != "float32"
        ):
            waiting += inputs
    return makers


def entry(policy: keras.DTypePolicy, layer: keras.Layer) -> keras.DTypePolicy:
    """Returns a policy map's entry for a layer; other policies unchanged."""
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        policy = policy[layers.path_of(layer)]
    return policy


def unused_rules(
    model: keras.Layer, policy: keras.DTypePolicy
) -> tuple[str, ...]:
    """Returns a note on each layer rule of the user that matches no layer."""
    if not isinstance(policy, policies.Policy):
        return ()
    defaults = policies.Policy(policy.level or policy.name).float32_layers
    written = [("float32_layers", x) for x in policy.float32_layers]
    written += [("float8_layers", x) for x in policy.float8_layers or ()]
    return tuple(
        f"{item!r} in {argument} matches no layer."
        for argument, item in written
        if item not in defaults
        and not any(
            float32_layers.matches(item, type(x), x.name, layers.path_of(x))
            for x in layers.flat_layers(model)
        )
    )


class _Planner:
    def __init__(self, model: keras.Layer, policy: keras.DTypePolicy) -> None:
        self._policy = policy
        self._rules = policies.with_rules(policy)
        self._is_float32 = not policies.is_sixteen_bit(policy)
        self._heads = {id(layer) for layer in heads(model)}
        # The origin of each layer's dtype, outer layers first.
        self._origins: dict[int, str] = {}
        self._find_origins(model)
        narrow = [
            layer
            for layer in layers.that_compute(model)
            if layer.compute_dtype in _formats.SIXTEEN_BIT
        ]
        # In a file that has 16-bit layers, somebody chose float32 for others;
        # so did somebody beside 16-bit layers that no policy of ours has made.
        is_mixed = layers.FILE in [self._origins[id(x)] for x in narrow]
        is_others = any(not layers.marks(layer).origin for layer in narrow)
        self._is_choice = {
            layers.CODE: True,
            layers.DEFAULT: False,
            layers.FILE: is_mixed,
            "": is_mixed or is_others,
        }
        self._seen: set[int] = set()
        self.steps: list[Step] = []
        self._visit(model, None)

    def _find_origins(
        self, layer: keras.Layer, outer: keras.Layer | None = None
    ) -> None:
        if id(layer) in self._origins:
            return
        self._origins[id(layer)] = self._origin(layer, outer)
        for inner in layers.own_layers(layer):
            self._find_origins(inner, layer)

    def _origin(self, layer: keras.Layer, outer: keras.Layer | None) -> str:
        found = layers.dtype_origin(layer)
        if outer is None:
            return found
        around = self._origins[id(outer)]
        is_same = layer.compute_dtype == outer.compute_dtype
        if isinstance(outer, keras.layers.Bidirectional):
            # It runs copies made from the configuration of the user's layer.
            return around if is_same else layers.CODE
        # The code of a layer hands the dtype that it got on to inner layers.
        if found == "" and around != "" and is_same:
            is_default = layers.is_structure(outer) and around == layers.DEFAULT
            return found if is_default else around
        is_handed_on = found == layers.CODE and around == layers.FILE
        return layers.FILE if is_handed_on else found

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
            # It computes nothing, but Keras does not accept int8 here either.
            policy = inherited.policy if inherited else self._target(layer)
            return Step(layer, policy, "", shown=False)
        if layers.is_structure(layer):
            why = self._ruled(layer)
            target = (
                keras.DTypePolicy("float32") if why else self._target(layer)
            )
            return Step(layer, target, why or "", shown=False)
        if own := self._unchangeable(layer):
            return Step(layer, layer.dtype_policy, own)
        if inherited is not None:
            return Step(layer, inherited.policy, inherited.why)
        if self._is_chosen(layer):
            why = "computes in float32" if self._is_float32 else _OWN
            return Step(layer, layer.dtype_policy, why, by_choice=True)
        if why := self._why_float32(layer):
            return Step(layer, keras.DTypePolicy("float32"), why)
        target = self._target(layer)
        return Step(layer, target, f"computes in {target.compute_dtype}")

    def _passed_on(
        self, layer: keras.Layer, step: Step, inherited: Step | None
    ) -> Step | None:
        """Returns the step that inner layers inherit, `None` if they do not."""
        names = {base.__name__ for base in type(layer).__mro__}
        # LSTM, GRU and SimpleRNN are wrappers by class, but own their cells.
        composite = bool(names & {"LSTM", "GRU", "SimpleRNN"}) or (
            layers.is_builtin(layer)
            and not isinstance(layer, keras.Model)
            and not names.intersection(_WRAPPERS)
        )
        if inherited is None and not self._ruled(layer) and not composite:
            return None
        why = step.why if step.why.startswith("inside ") else ""
        return dataclasses.replace(step, why=why or f"inside {layer.name}")

    def _unchangeable(self, layer: keras.Layer) -> str:
        """Returns why a layer keeps any policy, "" if it does not."""
        if getattr(layer.dtype_policy, "quantization_mode", None) is not None:
            return "quantized"
        dtypes = (layer.compute_dtype, layer.variable_dtype)
        if any(dtype not in _formats.LIMITS for dtype in dtypes):
            return _OWN
        return ""

    def _is_chosen(self, layer: keras.Layer) -> bool:
        """Returns whether a layer is in float32 because somebody chose it."""
        if layer.dtype_policy.name != "float32" or layer_calls.reason(layer):
            return False
        return self._is_choice[self._origins[id(layer)]]

    def _why_float32(self, layer: keras.Layer) -> str | None:
        if self._is_float32:
            return None
        if why := self._ruled(layer):
            return why
        if self._rules.outside_white_list(type(layer)):
            return "level O1: no matmul"
        is_head = id(layer) in self._heads
        is_softmax = (
            getattr(layer, "activation", None) is keras.activations.softmax
        )
        if is_softmax and (is_head or self._rules.level != "O3"):
            return "a softmax head: in 16 bit it loses small probabilities"
        if is_head:
            return "the model's output"
        return layer_calls.reason(layer)

    def _ruled(self, layer: keras.Layer) -> str | None:
        path = layers.path_of(layer)
        return self._rules.why_float32(type(layer), layer.name, path)

    def _target(self, layer: keras.Layer) -> keras.DTypePolicy:
        return policies.plain(entry(self._policy, layer))
