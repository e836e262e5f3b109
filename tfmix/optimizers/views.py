"""Float32 views of bfloat16 variables, which notice loaded weights."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from tfmix._keras import optimizers, replacements, variables
from tfmix.optimizers import bits, sixteen_bit_optimizer


class RestView(variables.Float32View):
    """A view that stores bits beyond the model's variable, in a `rest`."""

    rest_dtype: str
    rest_name: str

    def __init__(self, variable: keras.Variable, rest: keras.Variable) -> None:
        super().__init__(variable)
        self.rest = rest


class Views(sixteen_bit_optimizer.StandIns):
    """Makes the inner optimizer update float32 views of bfloat16 variables."""

    view: type[RestView]
    # The message about a float16 variable opens with this reason.
    only_bfloat16 = (
        "BFloat16Optimizer rounds to bfloat16; updates of float16 variables "
        "need float32 masters"
    )

    def make(self) -> dict[int, keras.Variable]:
        """Creates the views, and fingerprints of their variables."""
        for variable in self.narrow:
            dtype = keras.backend.standardize_dtype(variable.dtype)
            if dtype != "bfloat16":
                raise ValueError(
                    f"{self.only_bfloat16}. Received: variable "
                    f"{variable.path!r} of dtype {dtype!r}. Use the policy "
                    "'bfloat16', or MasterWeightOptimizer(optimizer) for "
                    "float16."
                )
        views = {
            id(variable): self.make_view(variable) for variable in self.narrow
        }
        self.with_rest = [v for v in views.values() if isinstance(v, RestView)]
        if self.with_rest:
            self.seen = optimizers.add_variable(
                self.optimizer,
                shape=(len(self.with_rest),),
                initializer=lambda shape, dtype: self._fingerprints(),
                dtype="int32",
                name="fingerprints",
                aggregation="only_first_replica",
            )
        return views

    def make_view(self, variable: keras.Variable) -> variables.Float32View:
        """Creates the view of a bfloat16 variable, and its rest of zeros."""
        path = variable.path.replace("/", "_")
        rest = self.optimizer.add_variable(
            shape=variable.shape,
            dtype=self.view.rest_dtype,
            name=f"{path}_{self.view.rest_name}",
            **variables.placement(variable),
        )
        return self.view(variable, rest)

    @contextlib.contextmanager
    def creating_slots(self) -> Iterator[None]:
        """Makes the inner optimizer place its state beside the variables."""
        with contextlib.ExitStack() as undo:
            for view in self.stand_ins.values():
                replacements.swap(undo, view, "colocating", True)
            yield

    def refresh(self) -> None:
        """Clears the rest of every variable that was assigned since."""
        # After `load_weights`, the old rest would shift a weight by up to half
        # a step of bfloat16.
        if not self.with_rest:
            return
        now, seen = self._fingerprints(), ops.convert_to_tensor(self.seen)
        for i, view in enumerate(self.with_rest):
            rest = ops.convert_to_tensor(view.rest)
            same = ops.equal(now[i], seen[i])
            view.rest.assign(ops.where(same, rest, ops.zeros_like(rest)))

    def write_back(self) -> None:
        """Records the fingerprints of the variables."""
        if self.with_rest:
            self.seen.assign(self._fingerprints())

    def _fingerprints(self) -> Any:
        stored = [view.stored for view in self.with_rest]
        return bits.fingerprints(stored)

    def assign(self, variable: keras.Variable, value: Any) -> None:
        """Sets the float32 value behind a variable, and the variable."""
        target = self.target(variable)
        target.assign(value)
        if isinstance(target, RestView):
            # Only this fingerprint changes: other variables may have been
            # assigned as well, which `refresh` must still notice.
            row = [[list(map(id, self.with_rest)).index(id(target))]]
            now = bits.fingerprints([target.stored])
            self.seen.assign(ops.scatter_update(self.seen, row, now))
