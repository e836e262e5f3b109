"""The columns of the table: the systems, as a script uses them."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

import tfmix

_FLOAT8 = keras.layers.Dense, keras.layers.EinsumDense


def _float8_policy() -> tfmix.Policy:
    return tfmix.Policy("mixed_float8", float8_layers=_FLOAT8)


class System(abc.ABC):
    """The code that a user of one library writes for the faults."""

    name: str
    # The dtype of variables that the faults create themselves.
    dtype = "float32"
    # The policies of layers in 16-bit models, and in all others.
    policy = "mixed_float16"
    layers = "float32"
    # The reasons why faults do not apply, by their names.
    inapplicable: Mapping[str, str] = {}
    # The arguments of `optimizer.apply` for gradients from `unscale`.
    unscaled: Mapping[str, bool] = {}

    def variable(self, values: Any, name: str | None = None) -> Any:
        """Creates a weight of the system's dtype."""
        return keras.Variable(values, dtype=self.dtype, name=name)

    @abc.abstractmethod
    def wrap(self, optimizer: Any, **settings: Any) -> Any:
        """Wraps an optimizer; the settings are those of both classes."""

    @abc.abstractmethod
    def fixed(self, optimizer: Any, scale: float) -> Any:
        """Returns an optimizer with a fixed loss scale."""

    @abc.abstractmethod
    def guard(self, model: Any) -> Any:
        """Protects a compiled model's train step, if the library can."""

    @abc.abstractmethod
    def unscale(self, optimizer: Any, grads: Sequence[Any]) -> list[Any]:
        """Returns gradients a user may clip, before `optimizer.apply`."""

    @abc.abstractmethod
    def convert(self, model: Any, policy: str) -> Callable[[], Any]:
        """Changes a model's dtypes; returns a function that restores them."""

    @abc.abstractmethod
    def float8(self, make: Callable[[], Any]) -> Any:
        """Creates a model whose Dense and EinsumDense multiply in float8."""

    @abc.abstractmethod
    def convert_to_float8(self, model: Any) -> Callable[[], Any]:
        """Makes a model's layers multiply in float8; returns a way back."""

    @abc.abstractmethod
    def set_policy(self, policy: Any) -> None:
        """Sets the global dtype policy."""

    @abc.abstractmethod
    def callbacks(self) -> list[Any]:
        """Returns the library's callbacks that monitor a `fit`."""


class Keras(System):
    """Keras's own classes, and nothing for features that it lacks."""

    name = "Keras"

    def wrap(self, optimizer: Any, **settings: Any) -> Any:
        return keras.optimizers.LossScaleOptimizer(optimizer, **settings)

    def fixed(self, optimizer: Any, scale: float) -> Any:
        # The error about `dynamic=False` recommends this.
        optimizer.loss_scale_factor = scale
        return optimizer

    def guard(self, model: Any) -> Any:
        return model

    def unscale(self, optimizer: Any, grads: Sequence[Any]) -> list[Any]:
        return list(grads)

    def convert(self, model: Any, policy: str) -> Callable[[], Any]:
        # This only works before a function was traced.
        layers = [model, *model.layers]
        before = [layer.dtype_policy for layer in layers]

        def set_policies(policies: Sequence[Any]) -> None:
            for layer, each in zip(layers, policies, strict=True):
                layer.dtype_policy = each
            model.make_train_function(force=True)

        set_policies([policy] * len(layers))
        return lambda: set_policies(before)

    def float8(self, make: Callable[[], Any]) -> Any:
        self.set_policy(self.policy)
        model = make()
        self.set_policy("float32")
        self.convert_to_float8(model)
        return model

    def convert_to_float8(self, model: Any) -> Callable[[], Any]:
        layers = [
            layer
            for layer in model._flatten_layers()
            if isinstance(layer, _FLOAT8) and layer.name != "head"
        ]
        for layer in layers:
            layer.quantize("float8")

        def undo() -> None:
            for layer in layers:
                layer.dtype_policy = "float32"

        return undo

    def set_policy(self, policy: Any) -> None:
        keras.config.set_dtype_policy(policy)

    def callbacks(self) -> list[Any]:
        return []


class Tfmix(System):
    """tfmix's classes."""

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

    def convert(self, model: Any, policy: str) -> Callable[[], Any]:
        return tfmix.apply_policy(model, policy).undo

    def float8(self, make: Callable[[], Any]) -> Any:
        with tfmix.policy_scope(_float8_policy()):
            return make()

    def convert_to_float8(self, model: Any) -> Callable[[], Any]:
        return tfmix.apply_policy(model, _float8_policy()).undo

    def set_policy(self, policy: Any) -> None:
        tfmix.set_global_policy(policy)

    def callbacks(self) -> list[Any]:
        return [tfmix.callbacks.LossScaleMonitor()]


_FLOAT8_ROWS = dict.fromkeys(
    (
        "float8-layer-used-twice",
        "float8-layer-frozen",
        "float8-small-gradients",
        "float8-outlier",
        "float8-infinity",
        "float8-ema",
        "float8-lora",
        "float8-and-back",
    ),
    "variables stay float32 under mixed_float8",
)
_BARE = dict.fromkeys(
    (
        "unscaled-mean-of-pixels",
        "unscaled-rows-of-an-embedding",
        "penalty-on-a-gradient-of-weights",
        "targets-of-50-000",
        "bad-batch-of-two-optimizers",
    ),
    "nothing is wrapped by hand",
)
_BY_COMPILE = "`compile` puts plain masters around an optimizer"
_KEPT = _FLOAT8_ROWS | _BARE
_REPLACED = _KEPT | {
    "static-scale-replaced": _BY_COMPILE,
    "policy-map": _BY_COMPILE,
    "activity-regularizer": _BY_COMPILE,
    "reload-under-float32": _BY_COMPILE,
}

_TOGETHER = {
    "variable-without-gradient": "flat masters need every gradient, and say so"
}


class Kept(Tfmix):
    """tfmix with an optimizer that keeps state in another form.

    Args:
        name: The name of the column.
        keep: Function that wraps an optimizer so that no update is lost.
        inapplicable: The reasons why faults do not apply, by their names.
        dtype: The dtype of 16-bit variables.
    """

    def __init__(
        self,
        name: str,
        keep: Callable[[Any], Any],
        inapplicable: Mapping[str, str],
        dtype: str | None = None,
    ) -> None:
        self.name = name
        if dtype is not None:
            self.dtype = self.policy = self.layers = dtype
        self.keep = keep
        self.inapplicable = inapplicable

    def wrap(self, optimizer: Any, **settings: Any) -> Any:
        return super().wrap(self.keep(optimizer), **settings)

    def fixed(self, optimizer: Any, scale: float) -> Any:
        return super().fixed(self.keep(optimizer), scale)


def _masters(**how: bool) -> Callable[[Any], Any]:
    return lambda inner: tfmix.optimizers.MasterWeightOptimizer(inner, **how)


def _rounded(**how: Any) -> Callable[[Any], Any]:
    return lambda inner: tfmix.optimizers.BFloat16Optimizer(inner, **how)


def _low(inner: Any) -> Any:
    return tfmix.optimizers.LowMemoryOptimizer(inner, **_INT8)


# The rule also covers the small variables of the faults.
_INT8: dict[str, Any] = {"slot_dtype": [("", "int8")], "seed": 7}
_NO_BROADCAST = {
    "nan-in-one-worker": "TensorFlow 2.21 has no bfloat16 broadcast, by which "
    "each worker gets the first one's variables"
}
# These faults do not apply to bfloat16 variables.
_NARROW = _REPLACED | _NO_BROADCAST

# Only float16 overflows; split masters and rounding are for bfloat16.
SIXTEEN_BIT = (
    Kept("masters", _masters(), _KEPT, "float16"),
    Kept("flat", _masters(flat=True), _REPLACED | _TOGETHER, "float16"),
    Kept("split", _masters(split=True), _NARROW, "bfloat16"),
    Kept("stochastic", _rounded(seed=7), _NARROW, "bfloat16"),
)
EIGHT_BIT_SLOTS = (
    Kept(
        "low",
        _low,
        {"pure-without-masters": "it is for float32 variables"} | _BARE,
    ),
    Kept("stochastic8", _rounded(**_INT8), _NARROW, "bfloat16"),
)
SYSTEMS = (Keras(), Tfmix())
ALL = {each.name: each for each in (*SYSTEMS, *SIXTEEN_BIT, *EIGHT_BIT_SLOTS)}


def by_name(name: str) -> System:
    """Returns the system of that name; Keras's own has no tfmix beside it."""
    if name == Keras.name:
        tfmix.set_global_policy("float32")
    return ALL[name]
