"""Runs a layer forward and backward in one dtype and compares two runs."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from benchmarks import layer_deviation
from benchmarks.layer_recipe import Recipe
from tfmix.policy import state

KINDS = {
    "normal": lambda n: n,
    "scaled by 200": lambda n: 200.0 * n,
    "offset by 100": lambda n: 100.0 + n,
}


def deviations(
    recipe: Recipe, fmt: str, kind: str
) -> dict[str, layer_deviation.Deviation]:
    """Compares Keras and tfmix in one format with float32.

    All three runs get the same numbers: inputs and weights are rounded to
    the format first, so that what differs is the arithmetic.

    Args:
        recipe: What to build and on what input.
        fmt: `"float16"` or `"bfloat16"`.
        kind: A key of `KINDS`.

    Returns:
        `"keras"` and `"tfmix"`, each with its deviation. Raises what the
        float32 run raises.
    """
    inputs = _inputs(recipe, fmt, kind)
    with keras_policy("float32"):
        weights, reference = _run(recipe, inputs, "float32", None, fmt)
    found = {}
    for who, scope in (
        ("keras", keras_policy(f"mixed_{fmt}")),
        ("tfmix", state.policy_scope(f"mixed_{fmt}")),
    ):
        try:
            with scope:
                _, actual = _run(recipe, inputs, fmt, weights, fmt)
            found[who] = layer_deviation.compare(actual, reference, fmt)
        except Exception as error:
            # Kernels that are missing raise anything; the sweep goes on.
            found[who] = layer_deviation.Deviation(error=type(error).__name__)
    return found


@contextlib.contextmanager
def keras_policy(name: str) -> Iterator[None]:
    """Runs a block under one of Keras's own policies."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _inputs(recipe: Recipe, fmt: str, kind: str) -> Any:
    rng = np.random.default_rng(11)

    def draw(shape: Any) -> Any:
        if isinstance(shape[0], tuple):
            return [draw(part) for part in shape]
        if "ids" in recipe.call:
            return rng.integers(0, recipe.call["ids"], shape)
        return _rounded(KINDS[kind](rng.normal(size=shape)), fmt)

    return [draw(shape) for shape in recipe.shapes]


def _run(
    recipe: Recipe,
    inputs: Any,
    dtype: str,
    weights: list[np.ndarray] | None,
    fmt: str,
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    keras.utils.set_random_seed(7)
    layer = recipe.make()
    arguments = {k: v for k, v in recipe.call.items() if k != "ids"}
    if recipe.training is not None:
        arguments["training"] = recipe.training

    def call(tensors: Any) -> Any:
        return layer(*([tensors] if recipe.as_list else tensors), **arguments)

    cast = _cast_all(inputs, dtype)
    if isinstance(layer, keras.Layer):
        _build(call, cast)
        if weights is None:
            weights = [_rounded(w, fmt) for w in layer.get_weights()]
        layer.set_weights(weights)
    return weights or [], _gradients(call, cast, layer)


def _build(call: Any, inputs: Any) -> None:
    """Creates a layer's weights with one call, the cheapest there is."""
    if keras.backend.backend() == "jax":
        # Op by op, JAX compiles each of them; shapes are enough here.
        inputs = keras.tree.map_structure(
            lambda t: keras.KerasTensor(t.shape, dtype=t.dtype), inputs
        )
    call(inputs)


def _gradients(call: Any, inputs: Any, layer: Any) -> dict[str, np.ndarray]:
    variables = list(getattr(layer, "trainable_variables", []))
    if keras.backend.backend() == "jax":
        outputs, by_input, by_weight = _with_jax(call, inputs, layer, variables)
    else:
        outputs, by_input, by_weight = _with_tape(call, inputs, variables)
    named = {f"output {i}": t for i, t in enumerate(outputs)}
    named.update({f"d input {i}": t for i, t in enumerate(by_input)})
    paths = [v.path.split("/")[-1] for v in variables]
    named.update(
        {
            f"d {p} {i}": t
            for i, (p, t) in enumerate(zip(paths, by_weight, strict=True))
        }
    )
    return {k: _to_numpy(t) for k, t in named.items() if t is not None}


def _with_tape(call: Any, inputs: Any, variables: Any) -> tuple[Any, Any, Any]:
    import tensorflow as tf

    floats = [t for t in keras.tree.flatten(inputs) if t.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(floats)
        outputs = _float_leaves(call(inputs))
        total = _weighted_sum(outputs)
    values = [v.value for v in variables]
    by_input, by_weight = tape.gradient(total, (floats, values))
    return outputs, by_input, by_weight


def _with_jax(
    call: Any, inputs: Any, layer: Any, variables: Any
) -> tuple[Any, Any, Any]:
    import jax
    from keras.src import backend

    flat = keras.tree.flatten(inputs)
    where = [i for i, t in enumerate(flat) if "float" in str(t.dtype)]

    def total(floats: Any, values: Any) -> Any:
        leaves = list(flat)
        for index, value in zip(where, floats, strict=True):
            leaves[index] = value
        mapping = list(zip(variables, values, strict=True))
        with backend.StatelessScope(state_mapping=mapping):
            outputs = _float_leaves(
                call(keras.tree.pack_sequence_as(inputs, leaves))
            )
        return _weighted_sum(outputs), outputs

    # As in `fit`, where Keras compiles the whole step.
    gradient = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
    (by_input, by_weight), outputs = gradient(
        [flat[i] for i in where], [v.value for v in variables]
    )
    return outputs, by_input, by_weight


def _weighted_sum(outputs: list[Any]) -> Any:
    """Sums float32 products with fixed numbers: the gradient from above."""
    rng = np.random.default_rng(13)
    total = 0.0
    for output in outputs:
        above = rng.choice([-1.0, -0.5, 0.5, 1.0], size=output.shape)
        wide = keras.ops.cast(output, "float32")
        # Off the range the gradient is nobody's concern, and inf * 0 is not
        # to spoil the others.
        total = total + keras.ops.sum(wide * above.astype("float32"))
    return total


def _float_leaves(outputs: Any) -> list[Any]:
    leaves = keras.tree.flatten(outputs)
    return [
        t for t in leaves if "float" in keras.backend.standardize_dtype(t.dtype)
    ]


def _cast_all(inputs: Any, dtype: str) -> Any:
    def cast(array: np.ndarray) -> Any:
        tensor = keras.ops.convert_to_tensor(array)
        return (
            keras.ops.cast(tensor, dtype) if array.dtype.kind == "f" else tensor
        )

    return keras.tree.map_structure(cast, inputs)


def _rounded(array: np.ndarray, fmt: str) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.kind != "f":
        return array
    narrow = keras.ops.cast(keras.ops.convert_to_tensor(array), fmt)
    return _to_numpy(narrow).astype("float32")


def _to_numpy(tensor: Any) -> np.ndarray:
    wide = keras.ops.cast(tensor, "float32")
    return np.asarray(keras.ops.convert_to_numpy(wide)).astype("float64")
