"""Undoes what a bad batch has written in a train step, or in a call.

Each `apply` in a step, of any optimizer, reports to the record of the step.
Keras's own step has one, and a `LossScaleOptimizer` knows what it did. A step
of the user's own may have others, and an unwrapped optimizer may apply in a
branch of a conditional, so TensorFlow counts reports in a variable. Under JAX a
step is a function of its state, of which only the counters of the model's
optimizer are a part.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix import _arguments
from tfmix._keras import context, files, layers, optimizers, training
from tfmix._keras import variables as keras_variables
from tfmix.step import finite, replicas


def guard(model: keras.Model) -> keras.Model:
    """Makes a model's whole train step atomic.

    The optimizer skips a step whose gradients are not finite. By then the
    forward pass has already written: BatchNormalization has averaged an
    infinity into its statistics, and the epoch's loss and metrics are NaN until
    it ends. If every `apply` of a guarded step skipped, each untrained variable
    and each metric gets its old value back, except dropout's seeds. In your own
    `train_step` this includes weights that no optimizer gets, such as averages
    of others. The step's logs are those of the metrics without it. If no step
    was applied since the metrics were reset, they are the skipped batch's own.

    If your own `train_step` calls no `apply`, or several of which only some
    skip, statistics and metrics that were finite stay finite.

    Under a 16-bit tfmix policy, `compile` does this for you. Any other model
    needs `compile(LossScaleOptimizer(optimizer, loss_scale=NoLossScale()))`,
    and `guard` again after it is loaded from a file. An applied step pays for
    one read of the guarded variables.

    Args:
        model: A `keras.Model`, compiled or not. Its own `train_step` is kept
            and guarded.

    Returns:
        The model itself.

    Raises:
        TypeError: If `model` is not a Keras 3 model.
        ValueError: If it is compiled with an optimizer that cannot skip a
            step, and its `train_step` is Keras's; in `fit`, if it was compiled
            with such an optimizer afterwards.

    Examples:
        >>> import tfmix
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile(tfmix.LossScaleOptimizer("adam"), loss="mse")
        >>> guard(model) is model
        True
    """
    _arguments.model(model)
    if getattr(model, "compiled", False):
        _check_optimizer(model)
    attach(model, asked_for=True)
    return model


def _check_optimizer(model: keras.Model) -> None:
    # The user's own step may use any optimizer.
    is_own = layers.has_own_step(model)
    if is_own or getattr(model.optimizer, "skips", None) is not None:
        return
    raise ValueError(
        "A model can be guarded only if its optimizer can skip a step. "
        f"Received: optimizer={model.optimizer!r}. Compile with "
        "tfmix.LossScaleOptimizer(optimizer), or, for a float32 or "
        "bfloat16 model, with tfmix.LossScaleOptimizer(optimizer, "
        "loss_scale=tfmix.NoLossScale())."
    )


def attach(model: keras.Model, *, asked_for: bool | None = None) -> None:
    """Guards a model; `None` keeps whether the user asked for that."""
    before = layers.part(model, layers.GUARD)
    if asked_for is None:
        asked_for = isinstance(before, _Guard) and before.asked_for
    layers.attach(model, layers.GUARD, _Guard(model, asked_for))
    # A step that was compiled before would run without the guard.
    model.train_function = None


@dataclasses.dataclass
class Step:
    """A train step while it runs or is traced.

    Attributes:
        model: The model whose step it is.
        is_own: Whether the user wrote the `train_step`. Keras's own applies
            gradients once, whatever happens.
        counter: The `Counter` of a step that no scaler decides (TensorFlow),
            else `None`.
        watched: The `id`s of what a guard restores if the step is skipped.
        updated: The `id`s of the variables that an `apply` got.
        scaled: The `id`s of the optimizers that scaled a loss.
        has_reported: Whether any `apply` has reported.
        place: The place that the model's optimizer gives its gradients.
    """

    model: keras.Model
    is_own: bool
    counter: "Counter | None" = None
    watched: frozenset[int] = frozenset()
    updated: set[int] = dataclasses.field(default_factory=set)
    scaled: set[int] = dataclasses.field(default_factory=set)
    has_reported: bool = False
    place: Any = None

    @property
    def scaler_decides(self) -> bool:
        """Whether a `LossScaleOptimizer` alone decides.

        It knows what it did, also in a branch of a conditional.
        """
        optimizer = self.model.optimizer
        return not self.is_own and hasattr(optimizer, "last_step_applied")

    def outcome(self, before: list, after: list) -> tuple[Any, Any]:
        """Returns whether an `apply` changed weights, and whether one did not.

        Args:
            before: The counts of applied and skipped `apply`s before a step
                that no scaler decides.
            after: Those after it. An unwrapped optimizer counts no skipped
                steps, so a skip in a user's own step cannot be known (JAX).

        Returns:
            Two booleans, or boolean scalar tensors.
        """
        if not self.has_reported:
            return False, False
        if self.scaler_decides:
            # This needs no count from before the step, which XLA would copy.
            applied = self.model.optimizer.last_step_applied()
            return applied, ops.logical_not(applied)
        pairs = zip(before, after, strict=True)
        applied, *skipped = (ops.not_equal(*pair) for pair in pairs)
        if not self.is_own:
            skipped = [ops.logical_not(applied)]
        return applied, *(skipped or [False])


def current_step() -> Step | None:
    """Returns the train step around the caller, `None` if there is none."""
    step: Step | None = context.block.get().step
    return step


def note_update(variables: Iterable) -> None:
    """Tells the step around an `apply` which variables it will update.

    Args:
        variables: The variables. If the step has written one itself before, as
            a search for flat minima does, the optimizer does not own it alone.
    """
    if (step := current_step()) is not None:
        # It is not known for an eager step, or under JAX.
        on_tensorflow = keras.backend.backend() == "tensorflow"
        step.updated |= {
            id(variable)
            for variable in variables
            if not (on_tensorflow and keras_variables.may_be_written(variable))
        }


def report(applied: Callable[[], Any]) -> None:
    """Reports an `apply` to the step around it, if there is one.

    Args:
        applied: Returns whether it changed anything: a bool or a boolean scalar
            tensor.
    """
    if (step := current_step()) is None:
        return
    step.has_reported = True
    if step.counter is not None:
        step.counter.add(applied())


class Counter:
    """Counts the applied and skipped `apply`s of one model's steps.

    The counts only grow, so that a nested step may share them: the result of a
    step is the difference between its end and its start.
    """

    def __init__(self) -> None:
        # The variable with the counts, once it exists.
        self.variables: list[keras.Variable] = []

    def read(self) -> list:
        """Returns both counts; creates the variable."""

        def create() -> None:
            zeros = np.zeros(2, "int32")
            self.variables += [keras.Variable(zeros, trainable=False)]

        if not self.variables:
            replicas.once_for_all(create)
        with replicas.one_replica(self.variables):
            counts = keras_variables.read(self.variables[0])
        return [counts[0], counts[1]]

    def add(self, applied: Any) -> None:
        """Counts one `apply`."""
        flags = ops.stack([applied, ops.logical_not(applied)])
        with replicas.one_replica(self.variables):
            self.variables[0].assign_add(ops.cast(flags, "int32"))


class _Guard:
    """The guard of one model, which wraps its methods."""

    def __init__(self, model: keras.Model, asked_for: bool) -> None:
        self._model = model
        self.asked_for = asked_for
        on_tensorflow = keras.backend.backend() == "tensorflow"
        self._counter = Counter() if on_tensorflow else None
        self.wrappers: dict[str, layers.Wrapper] = {
            "train_step": self._on_tensorflow
            if on_tensorflow
            else self._on_jax,
            "get_metrics_result": self._metrics_result,
        }
        if on_tensorflow:
            # A function that calls `train_step` is saved with these.
            children = functools.partial(files.children, self._used)
            self.wrappers |= {files.CHILDREN: children}

    def _on_tensorflow(
        self, original: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        watched = self._watched()
        before = {
            id(keras_variables.stored(variable)): keras_variables.read(variable)
            for variable in watched
        }

        # A model, or a metric, may be built in its first step.
        with keras_variables.noting_new(before), self._step(watched) as step:
            read = step.counter.read if step.counter else list
            counts = read()
            logs = original(*args, **kwargs)
            outcome = step.outcome(counts, read())
            return self._put_back(step, outcome, before, logs)

    def _on_jax(self, original: Callable, *args: Any, **kwargs: Any) -> tuple:
        model = self._model
        with self._step(self._watched()) as step:
            logs, after = original(*args, **kwargs)
            order = training.STEP_ON_JAX
            state = layers.argument(order, args, kwargs, "state")
            groups = (
                model.trainable_variables,
                model.non_trainable_variables,
                model.optimizer.variables,
                model.metrics_variables,
            )
            mapping: list = []
            before: dict[int, Any] = {}
            for group, new, old in zip(groups, after, state, strict=True):
                mapping += zip(group, new, strict=True)
                before |= zip(map(id, group), old, strict=True)

            skips = getattr(model.optimizer, "skips", None)
            counters = [optimizers.applies(model.optimizer)]
            counters += [] if skips is None else [skips]
            with keras.StatelessScope(state_mapping=mapping) as scope:
                value = scope.get_current_value
                counts = [before[id(counter)] for counter in counters]
                outcome = step.outcome(counts, [*map(value, counters)])
                logs = self._put_back(step, outcome, before, logs)
            return logs, tuple([*map(value, group)] for group in groups)

    @contextlib.contextmanager
    def _step(self, watched: Iterable) -> Iterator[Step]:
        """Makes every `apply` inside a block report to one step."""
        if self.asked_for:
            _check_optimizer(self._model)
        is_own, outside = layers.has_own_step(self._model), current_step()
        # Where only some of a user's `apply`s skip, each call of the model
        # keeps its statistics finite.
        ids = frozenset() if is_own else frozenset(map(id, watched))
        new = Step(self._model, is_own, watched=ids)
        if not new.scaler_decides:
            new.counter = self._counter
        if outside is not None:
            # What happens in this step happens in that one, too.
            new.counter = outside.counter or new.counter
        with context.holding(step=new):
            yield new
        if outside is not None:
            outside.has_reported = outside.has_reported or new.has_reported

    def _put_back(
        self,
        step: Step,
        outcome: tuple[Any, Any],
        before: Mapping[int, Any],
        logs: Any,
    ) -> Any:
        """Undoes a skipped step; returns the logs of the step.

        Args:
            step: The record of the step.
            outcome: What its `apply`s did.
            before: The values before the step, by the `id`s of variables as
                the backend stores them.
            logs: What the step returned, of any structure.
        """

        def pairs(variables: Iterable) -> list:
            stored = [*map(keras_variables.stored, variables)]
            known = [v for v in stored if id(v) in before]
            return finite.written(
                [(keras_variables.local(v), before[id(v)]) for v in known]
            )

        applied, skipped = outcome
        if not step.is_own and finite.known(skipped) is False:
            # An eager step that was not skipped is over.
            return logs
        watched = pairs(
            [v for v in self._watched() if id(v) not in step.updated]
        )
        with replicas.one_replica(self._model.metrics_variables):
            stays = ops.logical_not(skipped)
            if not step.is_own:
                finite.restore_unless(stays, watched)
                return self._logs(stays, logs)
            every_applied = ops.logical_and(applied, stays)
            stays = ops.logical_or(applied, stays)
            finite.restore_unless(stays, _values_to_restore(watched))
            # Without an `apply`, and where only some skip, a batch is only
            # known to be bad if something became NaN. Sums of gradients that it
            # has made NaN stay NaN, so that the later `apply` skips them and
            # counts that. The step may have called layers outside of any model,
            # whose call would have kept their statistics.
            of_layers = [
                variable
                for layer in self._model.layers
                for variable in layer.non_trainable_variables
            ]
            reported = pairs([*layers.reported(self._model), *of_layers])
            shown = ops.logical_or(every_applied, _none_lost(reported))
            finite.restore_unless(shown, reported)
            return self._logs(ops.logical_and(stays, shown), logs)

    def _logs(self, stays: Any, logs: Any) -> Any:
        """Returns the logs of a step: the metrics without a skipped one.

        If no step was applied since the reset, these are the skipped batch's
        own results.
        """
        results = self._model.get_metrics_result()
        if not (isinstance(logs, dict) and isinstance(results, dict)):
            return logs
        own = {name: logs[name] for name in logs if name in results}
        without = {name: results[name] for name in own}
        if counts := self._counts():
            # No step was applied since the reset.
            empty = [ops.equal(count, 0) for count in counts]
            stays = ops.logical_or(stays, ops.all(ops.stack(empty)))
        return logs | keras_variables.select(stays, own, without)

    def _metrics_result(self, original: Callable) -> Any:
        """Hides metrics that skipped steps left empty at the end of an epoch.

        Keras then uses the last step's logs, as it does for other keys.
        """
        if current_step() is not None:
            return original()
        results = original()
        counts = [*map(keras_variables.host_value, self._counts())]
        # They are not known in a function that is being compiled.
        is_empty = counts == [0] * len(counts)
        return {} if counts and is_empty else results

    def _counts(self) -> list[keras.Variable]:
        """Returns what the means among the metrics have counted so far."""
        return [
            metric.count
            for metric in layers.metrics(self._model)
            if isinstance(metric, keras.metrics.Mean)
        ]

    def _watched(self) -> list[keras.Variable]:
        """Returns the variables that a skipped step must not change."""
        model = self._model
        own = model.trainable_variables if layers.has_own_step(model) else []
        reported = layers.reported(model)
        others = layers.untrained_variables(model)
        return [*filter(keras_variables.is_state, others), *reported, *own]

    def _used(self) -> list:
        counts = self._counter.variables if self._counter else []
        return [*self._watched(), *counts]


def _values_to_restore(pairs: list) -> list:
    """Returns the values that a skipped step of the user's own restores.

    A user's step may sum gradients over a group of batches. If a sum was NaN
    before the step, the group is lost: the zeros that the step has written
    stay, and so do its integers, such as the number of batches.
    """
    floats = [old for _, old in pairs if finite.is_float(old)]
    begins_lost = ops.logical_not(finite.all_finite(floats))

    def mended(variable: Any, old: Any) -> Any:
        new = keras_variables.read(variable)
        stays = _is_lost(new, old) if finite.is_float(old) else begins_lost
        return keras_variables.select(stays, new, old)

    return [(variable, mended(variable, old)) for variable, old in pairs]


@contextlib.contextmanager
def statistics_kept_finite(
    model: keras.Model, training: bool | None
) -> Iterator[None]:
    """Undoes what a call of a model in training wrote if that is NaN.

    The step may be skipped, but BatchNormalization has already written. In your
    own loop, tfmix does not know when a step ends.

    If a float variable that is not trained was finite before the block and is
    not after it, all of these variables get their old values. Those that a
    guard watches are left to it.

    Args:
        model: The model.
        training: The mode that the call was given, `None` for that of the call
            around it.
    """
    if training is None:
        training = context.is_training()
    # JAX traces the mode of a model that it recomputes.
    if training is not True:
        yield
        return
    variables = layers.untrained_variables(model)
    step = current_step()
    # The guard restores the variables that it watches.
    watched = frozenset() if step is None else step.watched
    before = [
        (
            keras_variables.local(keras_variables.stored(v)),
            keras_variables.read(v),
        )
        for v in filter(keras_variables.is_state, variables)
        if id(v) not in watched
    ]
    yield
    if not before:
        return
    with replicas.one_replica([]):
        written = finite.written(before)
        finite.restore_unless(_none_lost(written), written)


def _none_lost(written: list) -> Any:
    """Returns whether all numbers that were finite are finite still.

    Args:
        written: Variables, each with its value before.
    """
    floats = [(v, old) for v, old in written if finite.is_float(old)]
    if not floats:
        return True
    new = [keras_variables.read(variable) for variable, _ in floats]
    old = [value for _, value in floats]

    def none_lost() -> Any:
        lost = map(_is_lost, old, new)
        return ops.logical_not(ops.any(ops.stack([*map(ops.any, lost)])))

    # Nearly every step ends here.
    return finite.either(finite.all_finite(new), none_lost)


def _is_lost(old: Any, new: Any) -> Any:
    was_finite = ops.isfinite(old)
    return ops.logical_and(was_finite, ops.logical_not(ops.isfinite(new)))
