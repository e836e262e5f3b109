"""Runs a layer forward and backward in one dtype and compares two runs."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np

from benchmarks import layer_deviation
from benchmarks.layer_recipes import Recipe
from tfmix import _formats
from tfmix.autocast import global_policy as state

# A function of inputs; it returns outputs, and gradients of inputs and weights.
Gradients = Callable[[Any], tuple[Any, Any, Any]]

KINDS = {
    "normal": lambda n: n,
    "scaled by 200": lambda n: 200.0 * n,
    "offset by 100": lambda n: 100.0 + n,
}


class Runs:
    """Measures one recipe; a layer built for a format serves all inputs.

    All three runs get the same numbers: inputs and weights are rounded to
    the format first, so that only the arithmetic differs.

    Args:
        recipe: The layer and its inputs.
        loss_scale: The factor of the outputs' gradient, by which the results
            are divided again. Defaults to 1.
    """

    def __init__(self, recipe: Recipe, loss_scale: float = 1.0) -> None:
        self._recipe = recipe
        self._loss_scale = loss_scale
        self._built: dict[tuple[str, str], _Run] = {}

    def deviations(
        self, fmt: str, kind: str
    ) -> dict[str, layer_deviation.Deviation]:
        """Compares Keras and tfmix in one format with float32.

        Args:
            fmt: `"float16"` or `"bfloat16"`.
            kind: A key of `KINDS`.

        Returns:
            `"keras"` and `"tfmix"`, each with its deviation. Errors of the
            float32 run are raised.
        """
        with keras_policy("float32"):
            inputs, weights, run = self.float32_run(fmt, kind)
            reference = run(inputs, weights)
        found = {}
        for who, scope in (
            ("keras", keras_policy(f"mixed_{fmt}")),
            ("tfmix", state.policy_scope(f"mixed_{fmt}")),
        ):
            try:
                with scope:
                    actual = self._run(who, fmt, inputs)(inputs, weights)
                found[who] = layer_deviation.compare(actual, reference, fmt)
            except Exception as error:
                # Missing kernels raise all kinds of errors.
                name = type(error).__name__
                found[who] = layer_deviation.Deviation(error=name)
        return found

    def rounded(self, fmt: str, kind: str) -> layer_deviation.Deviation:
        """Compares float32 with float32 on rounded inputs and weights.

        A layer may magnify their rounding even if it computes exactly after
        that. Roundings are random, so the worst of a few draws is taken.
        """
        with keras_policy("float32"):
            inputs, weights, run = self.float32_run(fmt, kind)
            reference = run(inputs, weights)
            found = [
                layer_deviation.compare(
                    run(*_moved((inputs, weights), fmt, seed)), reference, fmt
                )
                for seed in range(8)
            ]
        return max(found, key=lambda deviation: deviation.epsilons)

    def float32_run(
        self, fmt: str, kind: str
    ) -> tuple[Any, list[np.ndarray], "_Run"]:
        """Returns inputs and weights in the format's numbers, and float32.

        Call it, and the run, under Keras's float32 policy.
        """
        inputs = _inputs(self._recipe, fmt, kind)
        run = self._run("float32", "float32", inputs)
        weights = [rounded(w, fmt) for w in run.first_weights]
        return inputs, weights, run

    def _run(self, who: str, dtype: str, inputs: Any) -> "_Run":
        if (who, dtype) not in self._built:
            self._built[who, dtype] = _Run(
                self._recipe, dtype, inputs, self._loss_scale
            )
        return self._built[who, dtype]


def _moved(arrays: Any, fmt: str, seed: int) -> Any:
    """Changes each number by the largest rounding of the format."""
    rng = np.random.default_rng(seed)
    half = _formats.LIMITS[fmt].epsilon / 2

    def move(array: np.ndarray) -> np.ndarray:
        if array.dtype.kind != "f":
            return array
        part = rng.choice([-half, half], array.shape)
        return (array * (1 + part)).astype("float32")

    return keras.tree.map_structure(move, arrays)


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
        return rounded(KINDS[kind](rng.normal(size=shape)), fmt)

    return [draw(shape) for shape in recipe.shapes]


class _Run:
    """A layer built under the active policy, forward and backward."""

    def __init__(
        self, recipe: Recipe, dtype: str, inputs: Any, loss_scale: float
    ) -> None:
        keras.utils.set_random_seed(7)
        self._loss_scale = loss_scale
        self._layer = recipe.make()
        self._recipe = recipe
        self._dtype = dtype
        self.first_weights: list[np.ndarray] = []
        if isinstance(self._layer, keras.Layer):
            with drawn_by_numpy():
                _build(self._call, cast_all(inputs, dtype))
            self.first_weights = self._layer.get_weights()
        self._variables = list(getattr(self._layer, "trainable_variables", []))
        if keras.backend.backend() == "jax":
            others = getattr(self._layer, "non_trainable_variables", [])
            self._gradients = with_jax(
                self._call, self._variables, others, loss_scale
            )
        else:
            self._gradients = with_tape(self._call, self._variables, loss_scale)

    def __call__(
        self, inputs: Any, weights: list[np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Returns outputs and gradients by name."""
        if weights:
            self._layer.set_weights(weights)
        cast = cast_all(inputs, self._dtype)
        paths = [v.path.split("/")[-1] for v in self._variables]
        found = named(self._gradients(cast), paths)
        return {
            k: t / (1 if k.startswith("output") else self._loss_scale)
            for k, t in found.items()
        }

    def _call(self, tensors: Any) -> Any:
        recipe = self._recipe
        arguments = {k: v for k, v in recipe.call.items() if k != "ids"}
        if recipe.training is not None:
            arguments["training"] = recipe.training
        tensors = [tensors] if recipe.as_list else tensors
        return self._layer(*tensors, **arguments)


def named(
    found: tuple[Any, Any, Any], weights: Iterable[str] = ()
) -> dict[str, np.ndarray]:
    """Returns outputs, and gradients of inputs and named weights, by name."""
    outputs, by_input, by_weight = found
    tensors = {
        **{f"output {i}": t for i, t in enumerate(outputs)},
        **{f"d input {i}": t for i, t in enumerate(by_input)},
        **{
            f"d {path} {i}": t
            for i, (path, t) in enumerate(zip(weights, by_weight, strict=True))
        },
    }
    return {k: to_numpy(t) for k, t in tensors.items() if t is not None}


def _build(call: Any, inputs: Any) -> None:
    """Creates a layer's weights with one cheap call."""
    if keras.backend.backend() == "jax":
        # Shapes are enough here, and JAX would compile each op of a real call.
        inputs = keras.tree.map_structure(
            lambda t: keras.KerasTensor(t.shape, dtype=t.dtype), inputs
        )
    call(inputs)


def with_tape(call: Any, variables: Any, loss_scale: float) -> Gradients:
    import tensorflow as tf

    def gradients(inputs: Any) -> tuple[Any, Any, Any]:
        floats = [t for t in keras.tree.flatten(inputs) if t.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floats)
            outputs = _float_leaves(call(inputs))
            total = _weighted_sum(outputs) * loss_scale
        values = [v.value for v in variables]
        return outputs, *tape.gradient(total, (floats, values))

    return gradients


def with_jax(
    call: Any, variables: Any, others: Any, loss_scale: float
) -> Gradients:
    import jax
    from keras.src import backend

    def total(floats: Any, values: Any, states: Any, inputs: Any) -> Any:
        floats = iter(floats)
        leaves = [
            next(floats) if _is_float(t) else t
            for t in keras.tree.flatten(inputs)
        ]
        mapping = [
            *zip(variables, values, strict=True),
            *zip(others, states, strict=True),
        ]
        with backend.StatelessScope(state_mapping=mapping):
            outputs = _float_leaves(
                call(keras.tree.pack_sequence_as(inputs, leaves))
            )
        return _weighted_sum(outputs) * loss_scale, outputs

    # In `fit`, Keras also compiles the whole step.
    compiled = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))

    def gradients(inputs: Any) -> tuple[Any, Any, Any]:
        floats = [t for t in keras.tree.flatten(inputs) if _is_float(t)]
        values = [v.value for v in variables]
        states = [v.value for v in others]
        found, outputs = compiled(floats, values, states, inputs)
        by_input, by_weight = found
        return outputs, by_input, by_weight

    return gradients


def _weighted_sum(outputs: list[Any]) -> Any:
    """Sums outputs times fixed numbers, which are the outputs' gradients."""
    rng = np.random.default_rng(13)
    total = 0.0
    for output in outputs:
        above = rng.choice([-1.0, -0.5, 0.5, 1.0], size=output.shape)
        above = _opaque(above.astype("float32"))
        wide = keras.ops.cast(output, "float32")
        # Gradients outside of the range do not count, and inf * 0 must not
        # spoil the others.
        total = total + keras.ops.sum(wide * above)
    return total


def _opaque(constant: np.ndarray) -> Any:
    """Keeps XLA from computing with a constant while it compiles."""
    if keras.backend.backend() != "jax":
        return constant
    import jax

    return jax.lax.optimization_barrier(constant)


def _float_leaves(outputs: Any) -> list[Any]:
    return [t for t in keras.tree.flatten(outputs) if _is_float(t)]


def _is_float(tensor: Any) -> bool:
    return "float" in keras.backend.standardize_dtype(tensor.dtype)


def cast_all(inputs: Any, dtype: str) -> Any:
    def cast(array: np.ndarray) -> Any:
        tensor = keras.ops.convert_to_tensor(array)
        return (
            keras.ops.cast(tensor, dtype) if array.dtype.kind == "f" else tensor
        )

    return keras.tree.map_structure(cast, inputs)


def rounded(array: np.ndarray, fmt: str) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.kind != "f":
        return array
    narrow = keras.ops.cast(keras.ops.convert_to_tensor(array), fmt)
    return to_numpy(narrow).astype("float32")


def to_numpy(tensor: Any) -> np.ndarray:
    wide = keras.ops.cast(tensor, "float32")
    return np.asarray(keras.ops.convert_to_numpy(wide)).astype("float64")


_RANDOM = ("VarianceScaling", "RandomUniform", "RandomNormal", "Orthogonal")


@contextlib.contextmanager
def drawn_by_numpy() -> Iterator[None]:
    """Draws weights with NumPy; does nothing under TensorFlow.

    XLA takes a second to compile the random draw of every new shape.
    """
    with contextlib.ExitStack() as stack:
        if keras.backend.backend() == "jax":
            for name in _RANDOM:
                initializer = getattr(keras.initializers, name)
                stack.enter_context(
                    mock.patch.object(initializer, "__call__", _draw)
                )
        yield


def _draw(self: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """Glorot's uniform distribution."""
    generator = np.random.default_rng(7)
    fans = np.prod(shape[:-1], dtype=float) + shape[-1]
    values = generator.uniform(-1, 1, shape) * np.sqrt(6 / fans)
    return keras.ops.convert_to_tensor(values.astype("float32"), dtype)
