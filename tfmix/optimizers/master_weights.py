"""`MasterWeightOptimizer` keeps float32 masters of 16-bit variables."""

from typing import Any

import keras
from keras import ops

from tfmix._keras import optimizers, variables
from tfmix.optimizers import (
    bits,
    eight_bit_slots,
    flat,
    sixteen_bit_optimizer,
    views,
)


@keras.saving.register_keras_serializable(package="tfmix")
class MasterWeightOptimizer(sixteen_bit_optimizer.SixteenBitOptimizer):
    """Updates float32 masters and rounds them into 16-bit variables.

    Use it for models whose variables are float16 or bfloat16 (the policies
    `"float16"` and `"bfloat16"`), where an update smaller than half a step of
    the format would be lost. Gradients, masters and state of the inner
    optimizer are all in float32. Its weight decay, clipping, constraints, EMA
    and accumulation act on the masters. Variables that are not 16-bit are
    passed to it unchanged. Put it inside the loss-scale optimizer:
    `LossScaleOptimizer(MasterWeightOptimizer(Adam()))`.

    If you assign weights to the model after the optimizer was built, by
    loading a file for example, the next step updates the masters.

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer`, its name or config.
        flat: Boolean. Joins the masters into one vector per dtype: one update
            instead of one per variable. For element-wise optimizers only.
            Defaults to `False`.
        split: Boolean. Keeps only the 16 bits that a bfloat16 variable lacks:
            4 bytes per weight instead of 6, with exact float32 results.
            Defaults to `False`.
        slot_dtype: `"float32"`, or `"int8"` or a list of rules, as in
            `LowMemoryOptimizer`. Defaults to `"float32"`.
        seed: Integer of 31 bits that decides how 8-bit state is rounded.
            Defaults to `None`: drawn from Python's `random`.
        name: String. Defaults to the snake-case class name.

    Raises:
        ValueError: If the arguments contradict each other, or (when built)
            if `flat` or `split` does not fit the optimizer or the variables.
        TypeError: If `inner_optimizer` is not an optimizer.

    Examples:
        >>> weight = keras.Variable([1.0], dtype="bfloat16")
        >>> sgd = keras.optimizers.SGD(0.001)
        >>> optimizer = MasterWeightOptimizer(sgd)
        >>> for _ in range(8):
        ...     optimizer.apply([keras.ops.ones(1, "bfloat16")], [weight])
        >>> float(weight[0])
        0.9921875
    """

    # These are class attributes, so that setting them does not reach an inner
    # optimizer with attributes of the same names.
    flat = split = False

    def __init__(
        self,
        inner_optimizer: Any,
        *,
        flat: bool = False,
        split: bool = False,
        slot_dtype: eight_bit_slots.Rules = "float32",
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        for argument, value in (("flat", flat), ("split", split)):
            if not isinstance(value, bool):
                raise TypeError(
                    f"`{argument}` must be True or False. "
                    f"Received: {argument}={value!r}."
                )
        if flat and split:
            raise ValueError(
                "`flat` joins float32 masters, and `split` keeps none. "
                "Received: flat=True, split=True. Choose flat=True for speed "
                "or split=True for memory."
            )
        super().__init__(inner_optimizer, name, slot_dtype, seed)
        self.flat, self.split = flat, split

    def make_stand_ins(
        self, model_variables: sixteen_bit_optimizer.Variables
    ) -> sixteen_bit_optimizer.StandIns:
        """Creates the masters; see `SixteenBitOptimizer`."""
        kind: type[sixteen_bit_optimizer.StandIns] = _PerVariableMasters
        if self.flat or self.split:
            kind = flat.FlatMasters if self.flat else _SplitMasters
        return kind(self, model_variables)

    def get_config(self) -> dict:
        """Returns the settings `from_config` needs."""
        return super().get_config() | {"flat": self.flat, "split": self.split}


class _PerVariableMasters(sixteen_bit_optimizer.StandIns):
    """Keeps a float32 variable behind every 16-bit one."""

    def make_one(self, variable: keras.Variable) -> keras.Variable:
        master = optimizers.add_variable(
            self.optimizer,
            shape=variable.shape,
            initializer=lambda shape, dtype: ops.cast(variable.value, dtype),
            dtype="float32",
            name=variable.name,
            **variables.placement(variable),
        )
        return variables.adopt(master, variable)

    def refresh(self) -> None:
        for variable in self.narrow:
            master = self.target(variable)
            master.assign(bits.refresh_master(master, variable))

    def write_back(self) -> None:
        for variable in self.narrow:
            variable.assign(ops.cast(self.target(variable), variable.dtype))


class _SplitView(variables.Float32View):
    """An exact float32: the model's bfloat16 variable and 16 more bits."""

    def __init__(self, variable: keras.Variable, rest: keras.Variable) -> None:
        super().__init__(variable)
        self.rest = rest

    def load(self) -> Any:
        return bits.join(self.stored, self.rest)

    def store(self, value: Any) -> None:
        upper, lower = bits.split(value)
        self.stored.assign(upper)
        self.rest.assign(lower)


class _SplitMasters(views.Views):
    """Keeps the lower half of the master of every bfloat16 variable.

    Fingerprints of the variables show which ones were assigned since the last
    step, such as by `load_weights`: their old lower half is not theirs any
    more, and would shift a weight by up to half a step of bfloat16.
    """

    only_bfloat16 = (
        "split=True stores the 16 bits of a float32 that a bfloat16 lacks; a "
        "float16 is not part of a float32"
    )

    def make(self) -> dict[int, keras.Variable]:
        made = super().make()
        self.views: list[Any] = list(made.values())
        if made:
            self.seen = optimizers.add_variable(
                self.optimizer,
                shape=(len(made),),
                initializer=lambda shape, dtype: self._fingerprints(),
                dtype="int32",
                name="fingerprints",
                aggregation="only_first_replica",
            )
        return made

    def make_one(self, variable: keras.Variable) -> _SplitView:
        path = variable.path.replace("/", "_")
        rest = self.optimizer.add_variable(
            shape=variable.shape,
            dtype="int16",
            name=f"{path}_lost_bits",
            **variables.placement(variable),
        )
        return _SplitView(variable, rest)

    def refresh(self) -> None:
        if not self.views:
            return
        now, seen = self._fingerprints(), ops.convert_to_tensor(self.seen)
        for i, view in enumerate(self.views):
            rest = ops.convert_to_tensor(view.rest)
            same = ops.equal(now[i], seen[i])
            view.rest.assign(ops.where(same, rest, ops.zeros_like(rest)))

    def write_back(self) -> None:
        if self.views:
            self.seen.assign(self._fingerprints())

    def _fingerprints(self) -> Any:
        return bits.fingerprints([view.stored for view in self.views])

    def assign(self, variable: keras.Variable, value: Any) -> None:
        target: Any = self.target(variable)
        target.assign(value)
        if target is not variable:
            # Only this fingerprint changes: other variables may have been
            # assigned as well, which `refresh` must still notice.
            row = [[list(map(id, self.views)).index(id(target))]]
            now = bits.fingerprints([target.stored])
            self.seen.assign(ops.scatter_update(self.seen, row, now))
