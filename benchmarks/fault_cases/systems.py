"""The systems that meet the faults, as a script uses them."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import keras

import tfmix
from tfmix._keras import replacing

_FLOAT8 = keras.layers.Dense, keras.layers.EinsumDense


class System:
    """The code that a user writes for the faults: here of Keras alone."""

    name = "Keras"
    # The dtype of variables that the faults create themselves.
    dtype = "float32"
    # The policies of layers in 16-bit models, and in all others.
    policy = "mixed_float16"
    layers = "float32"
    # The names of faults that do not apply.
    inapplicable: Set[str] = frozenset()
    # The arguments of `optimizer.apply` for gradients from `unscale`.
    unscaled: Mapping[str, bool] = {}

    def variable(self, values: Any, name: str | None = None) -> Any:
        """Creates a weight of the system's dtype."""
        return keras.Variable(values, dtype=self.dtype, name=name)

    def wrap(self, optimizer: Any, **settings: Any) -> Any:
        """Wraps an optimizer; the settings are those of both classes."""
        return keras.optimizers.LossScaleOptimizer(optimizer, **settings)

    def fixed(self, optimizer: Any, scale: float) -> Any:
        """Returns an optimizer with a fixed loss scale."""
        # The error about `dynamic=False` recommends this.
        optimizer.loss_scale_factor = scale
        return optimizer

    def guard(self, model: Any) -> Any:
        """Protects a compiled model's train step, if the library can."""
        return model

    def unscale(self, optimizer: Any, grads: Sequence[Any]) -> list[Any]:
        """Returns gradients a user may clip, before `optimizer.apply`."""
        return list(grads)

    def float8(self, make: Callable[[], Any]) -> Any:
        """Creates a model whose Dense and EinsumDense multiply in float8."""
        with self.under(self.policy):
            model = make()
        for layer in model._flatten_layers():
            if isinstance(layer, _FLOAT8) and layer.name != "head":
                layer.quantize("float8")
        return model

    def set_policy(self, policy: Any) -> None:
        """Sets the global dtype policy."""
        keras.config.set_dtype_policy(policy)

    @contextlib.contextmanager
    def under(self, policy: Any) -> Iterator[None]:
        """Runs a block under a policy, and everything after it in float32."""
        self.set_policy(policy)
        try:
            yield
        finally:
            self.set_policy("float32")

    def callbacks(self) -> list[Any]:
        """Returns the library's callbacks that monitor a `fit`."""
        return []


class Tfmix(System):
    """The same with tfmix."""

    name = "tfmix"
    unscaled: Mapping[str, bool] = {"unscaled": True}

    def wrap(self, optimizer: Any, **settings: Any) -> Any:
        return tfmix.LossScaleOptimizer(optimizer, **settings)

    def fixed(self, optimizer: Any, scale: float) -> Any:
        return tfmix.LossScaleOptimizer(optimizer, loss_scale=scale)

    def guard(self, model: Any) -> Any:
        return tfmix.guard(model)

    def unscale(self, optimizer: Any, grads: Sequence[Any]) -> list[Any]:
        return optimizer.unscale_gradients(grads)

    def float8(self, make: Callable[[], Any]) -> Any:
        policy = tfmix.Policy("mixed_float8", float8_layers=_FLOAT8)
        with tfmix.policy_scope(policy):
            return make()

    def set_policy(self, policy: Any) -> None:
        tfmix.set_global_policy(policy)

    def callbacks(self) -> list[Any]:
        return [tfmix.callbacks.LossScaleMonitor()]


# Variables stay float32 under mixed_float8.
_FLOAT8_ROWS = {
    "float8-layer-used-twice",
    "float8-layer-frozen",
    "float8-small-gradients",
    "float8-ema",
    "float8-lora",
}
# `compile` puts plain masters around an optimizer.
_REPLACED = _FLOAT8_ROWS | {
    "static-scale-replaced",
    "policy-map",
    "activity-regularizer",
    "reload-under-float32",
}
# TensorFlow 2.21 has no bfloat16 broadcast, by which each worker gets the first
# one's variables.
_NARROW = _REPLACED | {"nan-in-one-worker"}


class Kept(Tfmix):
    """tfmix with an optimizer that keeps state in another form.

    Args:
        name: The name of the column.
        keep: Function that wraps an optimizer so that no update is lost.
        inapplicable: The names of faults that do not apply.
        dtype: The dtype of 16-bit variables.
    """

    def __init__(
        self,
        name: str,
        keep: Callable[[Any], Any],
        inapplicable: Set[str],
        dtype: str,
    ) -> None:
        self.name = name
        self.dtype = self.policy = self.layers = dtype
        self.keep = keep
        self.inapplicable = inapplicable

    def wrap(self, optimizer: Any, **settings: Any) -> Any:
        return super().wrap(self.keep(optimizer), **settings)

    def fixed(self, optimizer: Any, scale: float) -> Any:
        return super().fixed(self.keep(optimizer), scale)


# Only float16 overflows; stochastic rounding is for bfloat16.
SIXTEEN_BIT = (
    Kept(
        "masters",
        tfmix.optimizers.MasterWeightOptimizer,
        # Under float32 nothing keeps masters of a loaded model.
        _FLOAT8_ROWS | {"reload-under-float32"},
        "float16",
    ),
    Kept(
        "stochastic",
        functools.partial(tfmix.optimizers.BFloat16Optimizer, seed=7),
        _NARROW,
        "bfloat16",
    ),
)
_ALL = {each.name: each for each in (System(), Tfmix(), *SIXTEEN_BIT)}
LIBRARIES = ("Keras", "tfmix")


def by_name(name: str) -> System:
    """Returns the system of that name; Keras's own has no tfmix beside it."""
    tfmix.set_global_policy("float32")
    if name != System.name:
        # The policy above switched off what `import tfmix` does.
        replacing.want(replacing.COMPILE, True)
    return _ALL[name]
