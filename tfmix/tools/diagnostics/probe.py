"""Hooks into each call of a model's layers."""

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
from keras import ops, tree

from tfmix._keras import graphs
from tfmix._keras import layers as host
from tfmix.tools.diagnostics import plans


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A layer, or an op of a functional graph, that a check judges."""

    operation: keras.Operation
    name: str  # the layer's path if another has the same name
    inside: tuple[str, ...]  # the outer layers of this one, outermost first
    # Keras's own layers and layers without parts are judged as a whole. Parts
    # of other layers are judged by themselves.
    whole: bool

    @property
    def layers(self) -> list[Any]:
        """The layers whose dtypes decide how this one computes."""
        return host.flat_layers(self.operation)

    @property
    def weights(self) -> list[Any]:
        """The trainable variables of `layers`, without duplicates."""
        variables = [
            variable
            for at in self.layers
            for variable in at.trainable_variables
        ]
        return list({id(variable): variable for variable in variables}.values())

    def planned(self, plan: plans.Plan) -> plans.Plan:
        """Returns the part of a plan that is about `layers`."""
        return {layer: plan[layer] for layer in self.layers if layer in plan}


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of a watched layer that has cast its arguments."""

    target: Target
    key: tuple[int, int]  # the target's index, and its number of earlier calls
    watched: Callable[..., Any]
    unwatched: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def proceed(self) -> Any:
        """Makes the call; inner layers are watched."""
        return self.watched(*self.args, **self.kwargs)

    def try_with(self, tensors: Sequence[Any]) -> Any:
        """Makes the call with other float tensors, and watches nothing."""
        args, kwargs = replaced((self.args, self.kwargs), tensors)
        return self.unwatched(*args, **kwargs)

    @property
    def tensors(self) -> list[Any]:
        """The float tensors among the arguments."""
        return floats((self.args, self.kwargs))


def targets(model: keras.Model) -> list[Target]:
    """Lists the layers of a built model to judge, outer layers first."""
    by_id: dict[int, Target] = {}
    _visit(model, (), by_id)
    names = Counter(target.name for target in by_id.values())
    for key, target in by_id.items():
        if names[target.name] > 1:
            path = getattr(target.operation, "path", None)
            by_id[key] = dataclasses.replace(target, name=path or target.name)
    return list(by_id.values())


@contextlib.contextmanager
def watched(
    targets: Sequence[Target], on_call: Callable[[Call], Any]
) -> Iterator[None]:
    """Passes each call of the targets to a function, inside a block.

    `on_call` returns the outputs to continue with. Layers that it calls itself
    are not passed to it, unless it calls `proceed`.
    """
    counts: Counter[int] = Counter()
    is_watching = True

    @contextlib.contextmanager
    def watching(enabled: bool) -> Iterator[None]:
        nonlocal is_watching
        before, is_watching = is_watching, enabled
        try:
            yield
        finally:
            is_watching = before

    def make(index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        proceed = watching(True)(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            target, key = targets[index], (index, counts[index])
            is_random = host.owns_random_numbers
            if "training" in kwargs and is_random(target.operation):
                # Another dropout mask in 16 bit would look like an error.
                kwargs["training"] = False
            if not is_watching:
                return original(*args, **kwargs)
            counts[index] += 1
            with watching(False):
                return on_call(
                    Call(target, key, proceed, original, args, kwargs)
                )

        return call

    with graphs.calls_replaced([target.operation for target in targets], make):
        yield


def around(names: Iterable[str], targets: Sequence[Target]) -> set[str]:
    """Returns the outer layers of faulty layers, which are not at fault.

    Args:
        names: The names of the faulty layers.
        targets: All watched layers.
    """
    inside = {target.name: target.inside for target in targets}
    return {outer for name in names for outer in inside.get(name, ())}


def is_finite(nest: Any) -> bool:
    """Returns whether the float tensors of a nest are all finite."""
    return all(bool(ops.all(ops.isfinite(leaf))) for leaf in floats(nest))


def floats(nest: Any) -> list[Any]:
    """Returns the float tensors of a nest, in order."""
    return [leaf for leaf in tree.flatten(nest) if is_float(leaf)]


def replaced(nest: Any, tensors: Sequence[Any]) -> Any:
    """Replaces the float tensors of a nest."""
    rest = iter(tensors)

    def replacement(leaf: Any) -> Any:
        if not is_float(leaf):
            return leaf
        new = next(rest)
        host.copy_mask(leaf, new)
        return new

    return tree.map_structure(replacement, nest)


def is_float(leaf: Any) -> bool:
    """Returns whether a leaf is a tensor of a float dtype."""
    return ops.is_tensor(leaf) and keras.backend.is_float_dtype(dtype(leaf))


def dtype(tensor: Any) -> str:
    """Returns the name of a tensor's dtype."""
    return str(keras.backend.standardize_dtype(tensor.dtype))


def _visit(
    operation: Any, inside: tuple[str, ...], by_id: dict[int, Target]
) -> None:
    if id(operation) in by_id or host.is_input(operation):
        return
    is_layer = isinstance(operation, keras.Layer)
    inner = host.inner_operations(operation) if is_layer else []
    structure = is_layer and host.is_structure(operation)
    whole = not inner or (host.is_builtin(operation) and not structure)
    # An op of a graph has no dtype policy.
    floats = not is_layer or keras.backend.is_float_dtype(
        keras.backend.standardize_dtype(operation.compute_dtype)
    )
    if floats and not structure:
        by_id[id(operation)] = Target(operation, operation.name, inside, whole)
        inside = (*inside, operation.name)
    if not whole:
        for part in inner:
            _visit(part, inside, by_id)
