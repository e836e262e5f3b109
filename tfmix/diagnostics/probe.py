"""Which layers of a model are watched, and hooks on each of their calls."""

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
from keras import ops, tree

from tfmix._keras import layers as host
from tfmix.conversion import planned_policies


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A layer, or an op of a functional graph, that is judged by itself."""

    operation: keras.Operation
    name: str  # its path where another has the same name
    inside: tuple[str, ...]  # the watched layers that hold it, outermost first
    # Whether the parts inside it are judged with it, not by themselves: all
    # of Keras's own layers, and layers without parts.
    whole: bool

    @property
    def layers(self) -> list[Any]:
        """The layers whose dtypes decide how this one computes."""
        return host.flat_layers(self.operation)

    @property
    def weights(self) -> list[Any]:
        """The trainable variables of these layers, each once."""
        variables = [
            variable
            for at in self.layers
            for variable in at.trainable_variables
        ]
        return list({id(variable): variable for variable in variables}.values())

    def planned(self, plan: planned_policies.Plan) -> planned_policies.Plan:
        """The part of a plan that is about these layers."""
        return {layer: plan[layer] for layer in self.layers if layer in plan}


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a watched layer, about to be made with arguments it cast."""

    target: Target
    # The target's index and how often it was called before.
    key: tuple[int, int]
    watched: Callable[..., Any]
    unwatched: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def proceed(self) -> Any:
        """Makes the call as it is; the layers inside are watched."""
        return self.watched(*self.args, **self.kwargs)

    def proceed_with(self, tensors: Sequence[Any]) -> Any:
        """Makes the call with other tensors in place of the float ones."""
        args, kwargs = replaced((self.args, self.kwargs), tensors)
        return self.watched(*args, **kwargs)

    def try_with(self, tensors: Sequence[Any]) -> Any:
        """Makes the call as well, with other tensors; nothing is watched."""
        args, kwargs = replaced((self.args, self.kwargs), tensors)
        return self.unwatched(*args, **kwargs)

    @property
    def tensors(self) -> list[Any]:
        """The float tensors among the arguments."""
        return floats((self.args, self.kwargs))


def targets(model: keras.Model) -> list[Target]:
    """Lists what is judged by itself in a built model, outer layers first."""
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
    """Hands each call of the targets to a function, for a block.

    `on_call` returns the outputs to go on with. What it calls itself, other
    than by proceeding, is not handed to it.
    """
    counts: Counter[int] = Counter()
    is_watching = True

    @contextlib.contextmanager
    def watching(whether: bool) -> Iterator[None]:
        nonlocal is_watching
        before, is_watching = is_watching, whether
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
                # Another mask in 16 bit would look like an error of it.
                kwargs["training"] = False
            if not is_watching:
                return original(*args, **kwargs)
            counts[index] += 1
            with watching(False):
                return on_call(
                    Call(target, key, proceed, original, args, kwargs)
                )

        return call

    with host.calls_replaced([target.operation for target in targets], make):
        yield


def around(names: Iterable[str], targets: Sequence[Target]) -> set[str]:
    """Names the layers that hold others: the fault of one inside is not theirs.

    Args:
        names: Of the layers at fault.
        targets: All layers that are watched.
    """
    inside = {target.name: target.inside for target in targets}
    return {outer for name in names for outer in inside.get(name, ())}


def is_finite(nest: Any) -> bool:
    """Says whether all numbers in the float tensors of a nest are finite."""
    return all(bool(ops.all(ops.isfinite(leaf))) for leaf in floats(nest))


def floats(nest: Any) -> list[Any]:
    """Returns the float tensors of a nest, in order."""
    return [leaf for leaf in tree.flatten(nest) if is_float(leaf)]


def replaced(nest: Any, tensors: Sequence[Any]) -> Any:
    """Puts other tensors in the places of a nest's float tensors."""
    rest = iter(tensors)

    def replacement(leaf: Any) -> Any:
        if not is_float(leaf):
            return leaf
        new = next(rest)
        host.copy_mask(leaf, new)
        return new

    return tree.map_structure(replacement, nest)


def is_float(leaf: Any) -> bool:
    """Says whether something is a tensor of a float dtype."""
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
    # An op of a graph has no dtype of its own.
    floats = not is_layer or keras.backend.is_float_dtype(
        keras.backend.standardize_dtype(operation.compute_dtype)
    )
    if floats and not structure:
        by_id[id(operation)] = Target(operation, operation.name, inside, whole)
        inside = (*inside, operation.name)
    if not whole:
        for part in inner:
            _visit(part, inside, by_id)
