"""The optimizer whose inner optimizer keeps its slots in 8 bits."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import ops

from tfmix._keras import compilation, optimizers, replacements, variables
from tfmix.variables import eight_bit, sixteen_bit_optimizer
from tfmix.variables.bfloat16_rounding import WIDE_SLOTS, checked_seed

# What second moments are called in Keras; such a slot is never negative.
_SECOND_MOMENTS = re.compile("velocity|accumul|norm|squared")
# Elements of a variable whose slots are not worth it.
_SMALL = 4096
# What a slot's place is multiplied by, to draw numbers of its own.
_STREAM = 0x3C6EF372


class EightBitSlot(variables.Float32View):
    """A float32 slot that is stored as codes and scales.

    Within a step the number just assigned is read back as it is; it is
    rounded for the next step alone.
    """

    def __init__(
        self,
        codes: keras.Variable,
        scales: keras.Variable,
        code: eight_bit.Code,
        noise: Callable[[tuple], Any],
    ) -> None:
        super().__init__(codes)
        self.scales, self.code, self.noise = scales, code, noise
        # The trace in which a value was assigned, and the value.
        self.fresh: tuple[Any, Any] | None = None

    def load(self) -> Any:
        """Returns the float32 value as a tensor."""
        if self.fresh is not None and self.fresh[0] == compilation.trace():
            return self.fresh[1]
        codes = ops.convert_to_tensor(self.stored)
        scales = ops.convert_to_tensor(self.scales)
        return eight_bit.decode(codes, scales, self.code)

    def store(self, value: Any) -> None:
        """Keeps a float32 tensor, rounded."""
        noise = self.noise(tuple(value.shape))
        codes, scales = eight_bit.encode(value, self.code, noise)
        self.stored.assign(codes)
        self.scales.assign(scales)
        self.fresh = compilation.trace(), value


class _EightBitSlots(sixteen_bit_optimizer.StandIns):
    """Lets the inner optimizer create its slots in 8 bits."""

    optimizer: "LowMemoryOptimizer"

    def make(self) -> dict[int, keras.Variable]:
        self.slots: list[EightBitSlot] = []
        return {}

    @contextlib.contextmanager
    def creating_slots(self) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for each in optimizers.workers(self.optimizer.inner_optimizer):
                self._narrow(undo, each)
            yield

    def refresh(self) -> None:
        for slot in self.slots:
            slot.fresh = None

    write_back = refresh

    def _narrow(self, undo: contextlib.ExitStack, worker: Any) -> None:
        in_float32 = worker.add_variable_from_reference
        add_variable = worker.add_variable

        def from_reference(
            reference_variable: keras.Variable,
            name: str | None = None,
            initializer: Any = "zeros",
        ) -> keras.Variable:
            wide = name in WIDE_SLOTS
            if wide or self.optimizer.keeps_float32(reference_variable):
                with contextlib.ExitStack() as inside:
                    replacements.swap(
                        inside, worker, "add_variable", add_variable
                    )
                    return in_float32(reference_variable, name, initializer)
            slot = self._make(
                add_variable, reference_variable, name or "var", initializer
            )
            optimizers.count_as_tracked(worker, slot)
            self.slots.append(slot)
            return slot

        def of_another_shape(
            shape: Sequence, *args: Any, **settings: Any
        ) -> keras.Variable:
            if len(shape):
                raise ValueError(
                    "LowMemoryOptimizer keeps slots that are shaped like "
                    f"their variable. Received: inner_optimizer="
                    f"{type(worker).__name__}, which has one of shape "
                    f"{tuple(shape)}. Use it without LowMemoryOptimizer."
                )
            return add_variable(shape, *args, **settings)

        swaps = {
            "add_variable_from_reference": from_reference,
            "add_variable": of_another_shape,
        }
        for name, function in swaps.items():
            replacements.swap(undo, worker, name, function)

    def _make(
        self,
        add_variable: Callable[..., keras.Variable],
        variable: keras.Variable,
        name: str,
        initializer: Any,
    ) -> EightBitSlot:
        second = bool(_SECOND_MOMENTS.search(name))
        code = eight_bit.UNSIGNED if second else eight_bit.SIGNED
        shape = tuple(variable.shape)
        first = keras.initializers.get(initializer)

        def encoded(part: int) -> Callable[..., Any]:
            def initial(_: Any, dtype: Any = None) -> Any:
                value = ops.cast(first(shape, "float32"), "float32")
                return eight_bit.encode(value, code, _nearest())[part]

            return initial

        path = f"{variable.path.replace('/', '_')}_{name}"
        codes = add_variable(
            shape=shape,
            initializer=encoded(0),
            dtype="uint8",
            name=path,
            **variables.placement(variable),
        )
        scales = add_variable(
            shape=(eight_bit.blocks(shape),),
            initializer=encoded(1),
            dtype="float32",
            name=f"{path}_scales",
        )
        stream = len(self.slots) * _STREAM
        return EightBitSlot(codes, scales, code, self._noise(stream))

    def _noise(self, stream: int) -> Callable[[tuple], Any]:
        optimizer = self.optimizer
        if optimizer.rounding == "nearest":
            return lambda shape: _nearest()

        def draw(shape: tuple) -> Any:
            seed = ops.convert_to_tensor(optimizer.seed_variable)
            step = ops.cast(optimizer.iterations, "int32")
            key = eight_bit.mix(eight_bit.mix(seed + _wrapped(stream)) + step)
            return eight_bit.noise(shape, key)

        return draw


@keras.saving.register_keras_serializable(package="tfmix")
class LowMemoryOptimizer(sixteen_bit_optimizer.SixteenBitOptimizer):
    """Keeps the slots of an optimizer in 8 bits instead of 32.

    For models with float32 variables, mixed ones among them. With Adam it
    takes 2.03 bytes a weight for both moments instead of 8. Each number is
    an 8-bit float, in blocks of 256 that share a scale (as in arXiv
    2110.02861, whose code is a table); a step computes in float32.

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer`, its name or config.
            Its slots must be shaped like the variables.
        slot_dtype: `"int8"`. Defaults to `"int8"`.
        rounding: `"stochastic"` or `"nearest"`. Defaults to `"stochastic"`:
            a second moment moves by 0.1 % a step, which rounding to nearest
            drops.
        float32_slots: Strings. A variable whose path contains one of them has
            float32 slots, as has one of fewer than 4096 elements, where
            there is nothing to save. Defaults to `("embedding",)`: the
            gradients of rare rows differ most.
        seed: Integer of 31 bits that decides the stochastic rounding.
            Defaults to `None`: drawn from Python's `random`, which
            `keras.utils.set_random_seed` seeds.
        name: String. Defaults to the snake-case class name.

    Raises:
        ValueError: If an argument is wrong or, when built, if a variable is
            16-bit or a slot is not shaped like its variable.
        TypeError: If `inner_optimizer` is no optimizer, or `seed` no integer.

    Example:
        >>> dense = keras.layers.Dense(64)
        >>> dense.build((None, 64))
        >>> optimizer = LowMemoryOptimizer(keras.optimizers.Adam(1e-3))
        >>> optimizer.build(dense.trainable_variables)
        >>> slots = [v for v in optimizer.variables if v.dtype == "uint8"]
        >>> [v.shape for v in slots]
        [(64, 64), (64, 64)]
    """

    # Declared, so that an inner optimizer's of the same name is left alone.
    slot_dtype = rounding = ""
    float32_slots: tuple[str, ...] = ()
    seed: int | None = None
    seed_variable: keras.Variable | None = None

    def __init__(
        self,
        inner_optimizer: Any,
        slot_dtype: str = "int8",
        *,
        rounding: str = "stochastic",
        float32_slots: Sequence[str] = ("embedding",),
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        if slot_dtype != "int8":
            raise ValueError(
                "`slot_dtype` must be 'int8'; without LowMemoryOptimizer slots "
                f"are float32. Received: slot_dtype={slot_dtype!r}."
            )
        if rounding not in ("stochastic", "nearest"):
            raise ValueError(
                "`rounding` must be 'stochastic' or 'nearest'. Received: "
                f"rounding={rounding!r}."
            )
        if seed is not None and rounding != "stochastic":
            raise ValueError(
                f"rounding={rounding!r} draws no random numbers. "
                f"Received: seed={seed!r}. Leave `seed` out."
            )
        super().__init__(inner_optimizer, name=name)
        self.slot_dtype, self.rounding = slot_dtype, rounding
        self.float32_slots = _checked_parts(float32_slots)
        self.seed = checked_seed(seed) if rounding == "stochastic" else None
        if self.seed is not None:
            # In a variable, so that a checkpoint continues the same numbers.
            self.seed_variable = self.add_variable(
                shape=(),
                initializer=keras.initializers.Constant(self.seed),
                dtype="int32",
                aggregation="only_first_replica",
                name="seed",
            )

    def keeps_float32(self, variable: keras.Variable) -> bool:
        """Says whether a variable's slots stay float32."""
        size = math.prod(variable.shape)
        named = any(part in variable.path for part in self.float32_slots)
        return named or size < _SMALL

    def make_stand_ins(
        self, model_variables: sixteen_bit_optimizer.Variables
    ) -> sixteen_bit_optimizer.StandIns:
        """Creates the slots; see `SixteenBitOptimizer`."""
        for variable in filter(variables.is_sixteen_bit, model_variables):
            raise ValueError(
                "LowMemoryOptimizer is for float32 variables. Received: "
                f"variable {variable.path!r} of dtype {variable.dtype!r}. Use "
                "MasterWeightOptimizer or BFloat16Optimizer for a model in "
                "pure 16 bit."
            )
        return _EightBitSlots(self, model_variables)

    def get_config(self) -> dict:
        """Returns the settings `from_config` needs."""
        names = "slot_dtype", "rounding", "float32_slots", "seed"
        return super().get_config() | {n: getattr(self, n) for n in names}


def _checked_parts(parts: Sequence[str]) -> tuple[str, ...]:
    parts = (parts,) if isinstance(parts, str) else tuple(parts)
    if not all(isinstance(part, str) for part in parts):
        raise TypeError(
            "`float32_slots` holds parts of variables' paths, as strings. "
            f"Received: float32_slots={parts!r}."
        )
    return parts


def _nearest() -> Any:
    return ops.cast(2**19, "int32")


def _wrapped(number: int) -> Any:
    return ops.cast((number + 2**31) % 2**32 - 2**31, "int32")
