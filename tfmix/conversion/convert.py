"""`apply_policy`, `convert_model` and `prepare`: converts existing models."""

import contextlib
import dataclasses
from typing import Any, NamedTuple

import keras

from tfmix import _arguments, _messages, _progress, _tables
from tfmix._keras import layers, optimizers
from tfmix.autocast import global_policy
from tfmix.autocast import record as mixed_model
from tfmix.conversion import (
    copying,
    layer_changes,
    planned_policies,
)
from tfmix.float8 import chosen_layers
from tfmix.gradient_scaling import model_call
from tfmix.loss_scaling import optimizer as scaling
from tfmix.policy import policy as policies
from tfmix.step import guard


@dataclasses.dataclass(frozen=True)
class Row:
    """One layer of a converted model.

    Attributes:
        layer: The layer's path, or its name where it has none.
        layer_class: The name of its class.
        before: The name of its dtype policy before.
        after: The name of its dtype policy now.
        why: Why it has that policy.
    """

    layer: str
    layer_class: str
    before: str
    after: str
    why: str


@dataclasses.dataclass
class ConversionReport(_tables.Printed):
    """The changes that `apply_policy` made; prints as a table.

    Attributes:
        policy: The policy that was applied.
        rows: One `Row` per layer, in the model's order.
        notes: Sentences to print below the table.
        way_back: What `undo` calls; `None` after it, and for a copy whose
            variables were cast.

    Examples:
        >>> row = Row("dense", "Dense", "float32", "mixed_float16", "")
        >>> policy = keras.DTypePolicy("mixed_float16")
        >>> print(str(ConversionReport(policy, (row,))).splitlines()[0])
        1 layer under mixed_float16: 1 changed, 0 in float32
    """

    policy: keras.DTypePolicy
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    way_back: layer_changes.Undo | None = None

    def undo(self) -> None:
        """Restores every dtype, method and optimizer.

        Trained weights and the inner optimizer's state stay as they are now:
        undoing a conversion does not undo training. If you have compiled the
        model again since, the new optimizer stays, without tfmix's wrapper.

        Raises:
            RuntimeError: If you call it twice, if the model or a part of it
                was converted again or quantized since, or if the variables of
                a copy were cast.
        """
        if self.way_back is None:
            raise RuntimeError(
                "This conversion has been undone already, or made a copy. Call "
                "`apply_policy(model, policy)` to convert the model again."
            )
        self.way_back()
        self.way_back = None

    @property
    def kept(self) -> tuple[Row, ...]:
        """The rows of the layers that compute in float32."""
        return tuple(row for row in self.rows if row.after == "float32")

    def __repr__(self) -> str:
        return f"<ConversionReport {self._summary()}>"

    def tables(self) -> list[_tables.Table]:
        """Returns what to print."""
        heads = ("layer", "class", "from", "to", "why")
        rows = [dataclasses.astuple(row) for row in self.rows]
        return [_tables.Table(heads, rows, self._summary(), self.notes)]

    def _summary(self) -> str:
        changed = sum(row.before != row.after for row in self.rows)
        layers = "layer" if len(self.rows) == 1 else "layers"
        return (
            f"{len(self.rows)} {layers} under {self.policy.name}: {changed} "
            f"changed, {len(self.kept)} in float32"
        )


class Prepared(NamedTuple):
    """The result of `prepare`.

    Attributes:
        model: Your model, converted in place, or a copy if variables had to be
            cast (`"O3"`).
        optimizer: The optimizer to compile with, wrapped if necessary.
        report: The `ConversionReport`, with `undo()` unless it is a copy.
    """

    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    report: ConversionReport


def apply_policy(
    model: keras.Model, policy: str | keras.DTypePolicy
) -> ConversionReport:
    """Changes the dtypes of an existing model, in place.

    Use it on a model that exists already: loaded, from `keras.applications`,
    trained, compiled or not. Its weights stay; the next `fit`, `predict` and
    `evaluate` use the new dtypes. Layers that produce the outputs stay in
    float32. In a subclassed model only those with a softmax are recognised;
    a warning names others. The optimizer of a compiled model is wrapped if
    the new dtypes require it.

    Args:
        model: A `keras.Model`: Functional, Sequential or subclassed, nested
            or with shared layers.
        policy: As for `set_global_policy`, but one that casts no variables of
            the model. Its rules decide which layers stay in float32. Quantized
            and integer layers are not changed, nor are layers that somebody put
            into float32: by `dtype="float32"` in code, or in a file that has
            16-bit layers. All others are converted, those of a float32 file
            included, whatever the model has beside them.

    Returns:
        A `ConversionReport`: one row per layer, and `undo()`.

    Raises:
        TypeError: If `model` is not a Keras 3 model or `policy` not a policy.
        ValueError: If the policy is unknown, its dtype is not a float, or
            variables would be cast, as by `"bfloat16"`: `convert_model`
            returns such a model as a copy.

    Examples:
        >>> model = keras.Sequential(
        ...     [keras.Input((4,)), keras.layers.Dense(8),
        ...      keras.layers.Dense(2, "softmax")]
        ... )
        >>> report = apply_policy(model, "mixed_float16")
        >>> [row.after for row in report.rows]
        ['mixed_float16', 'float32']
        >>> report.undo()
        >>> model.layers[0].compute_dtype
        'float32'
    """
    accepted = global_policy.resolve_policy(policy)
    _arguments.model(model)
    return _convert(model, accepted)[0]


def _convert(
    model: keras.Model,
    policy: keras.DTypePolicy,
    optimizer: keras.optimizers.Optimizer | None = None,
    may_cast: bool = False,
) -> tuple[ConversionReport, Any]:
    """Converts a model; returns the report and the optimizer to train with."""
    steps = planned_policies.plan(model, policy)
    for layer, before, after in layer_changes.casts(steps):
        if not may_cast:
            raise ValueError(
                "A conversion in place casts no variables. Received: policy="
                f"{policy.name!r}, under which those of layer {layer.name!r} "
                f"become {after} instead of {before}. Write `model = "
                f"tfmix.convert_model(model, {policy.name!r})`, which returns "
                "a copy."
            )
    rows = tuple(
        Row(
            layers.path_of(step.layer),
            type(step.layer).__name__,
            planned_policies.entry(step.layer.dtype_policy, step.layer).name,
            step.policy.name,
            step.why,
        )
        for step in steps
        if step.shown
    )
    notes = planned_policies.unused_rules(model, policy)
    float8 = policies.with_rules(policy).is_float8
    if all(row.before == row.after for row in rows) and not (
        float8 or chosen_layers.reasons(model)
    ):
        notes = ("No layer changes: the last column says why.", *notes)
    undo, optimizer = _change(model, policy, steps, optimizer)
    for note in notes:
        _messages.warn("%s", note)
    return ConversionReport(policy, rows, notes, undo), optimizer


def _change(
    model: keras.Model,
    policy: keras.DTypePolicy,
    steps: list[planned_policies.Step],
    optimizer: keras.optimizers.Optimizer | None,
) -> tuple[layer_changes.Undo, keras.optimizers.Optimizer | None]:
    """Changes a model, and returns a function that undoes the change.

    After an error, the model is as it was before.
    """
    before = _optimizer_of(model)
    with contextlib.ExitStack() as way_back, contextlib.ExitStack() as failed:
        way_back.callback(layer_changes.forget_compiled, model)
        failed.callback(_adopt, model, before)
        for part in optimizers.with_nested(optimizer or before):
            for name in ("inner_optimizer", "loss_scale_factor"):
                if name in vars(part):
                    way_back.callback(setattr, part, name, vars(part)[name])
        for part in (model, *mixed_model.models_inside(model)):
            methods = layers.by_role(part)
            way_back.callback(layers.restore, part, methods)
            scaled = layers.RULES in methods
            way_back.callback(model_call.note_scaling, part, scaled)
        layer_changes.set_dtypes(steps, way_back)
        chosen = chosen_layers.reasons(model)
        way_back.callback(chosen_layers.restore, model, chosen)
        mixed_model.set_policy(model, policy)
        mixed_model.set_policy_inside(model, policy)
        installed = _wrap_optimizer(model, policy, optimizer)
        if isinstance(installed, scaling.LossScaleOptimizer):
            guard.attach(model)
        elif installed is not before:
            # Only tfmix's wrapper could skip a step, and it is gone.
            layers.detach(model, layers.GUARD)
        layer_changes.forget_compiled(model)
        failed.pop_all()
        undone = way_back.pop_all()

    def undo() -> None:
        layer_changes.check_undo(steps)
        undone.close()
        if _optimizer_of(model) is installed:
            _adopt(model, before)
        else:
            # The user has compiled the model again, and keeps this optimizer.
            now = mixed_model.policy_of(model) or model.dtype_policy
            _wrap_optimizer(model, now)

    return undo, installed


def converted_copy(
    model: keras.Model,
    policy: keras.DTypePolicy,
    optimizer: keras.optimizers.Optimizer | None = None,
) -> tuple[keras.Model, ConversionReport, Any]:
    """Converts a copy of a model, whose variables are cast if necessary.

    An optimizer's state belongs to variables, so the copy's optimizer starts
    anew if they are cast.
    """
    twin = copying.copy_model(model)
    casts = layer_changes.casts(planned_policies.plan(twin, policy))
    current = _optimizer_of(twin)
    if casts and current is not None and optimizer is None:
        optimizer = mixed_model.without_automatic(current)
        optimizer = type(optimizer).from_config(optimizer.get_config())
    report, optimizer = _convert(twin, policy, optimizer, may_cast=True)
    if casts:
        report.way_back = None
    return twin, report, optimizer


def convert_model(
    model: keras.Model,
    policy: str | keras.DTypePolicy,
    *,
    inference: bool = False,
) -> keras.Model:
    """Returns a converted copy of a model, and does not change the model.

    Use it for a second, 16-bit version: to compare, to serve, or to save at
    half the size under `"float16"` or `"bfloat16"`, which cast the variables.

    Args:
        model: A `keras.Model`. A subclassed model must be loadable: it needs
            a `get_config` from which Keras can create it again.
        policy: As for `set_global_policy`.
        inference: Boolean, whether the copy is only for prediction: it is
            then not compiled, and has no optimizer state and no trainable
            weights. Defaults to `False`.

    Returns:
        The copy, with the same weights. If the model is compiled, so is the
        copy, with the optimizer's state; the optimizer starts anew where the
        variables are cast.

    Raises:
        TypeError: If `model` is not a Keras 3 model, or cannot be copied.
        ValueError: If the policy is unknown, or its dtype is not a float.

    Examples:
        >>> model = keras.Sequential(
        ...     [keras.Input((4,)), keras.layers.Dense(8),
        ...      keras.layers.Dense(2)]
        ... )
        >>> convert_model(model, "mixed_bfloat16").layers[0].compute_dtype
        'bfloat16'
        >>> model.layers[0].compute_dtype
        'float32'
    """
    accepted = global_policy.resolve_policy(policy)
    _arguments.model(model)
    with _progress.shown(f"Converting {model.name} to {accepted.name}"):
        twin, *_ = converted_copy(model, accepted)
        if inference:
            twin.trainable = twin.compiled = False
            twin.optimizer = None
    return twin


def prepare(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer | str,
    level: str | keras.DTypePolicy = "O2",
) -> Prepared:
    """Converts a model, wraps its optimizer and guards it, in one call.

    It works like Apex's `amp.initialize` and MindSpore's
    `build_train_network`. Compile the model with the optimizer it returns.

    Args:
        model: A `keras.Model`, changed in place; a policy with 16-bit variables
            changes a copy instead.
        optimizer: A Keras optimizer or the name of one.
        level: `"O0"` to `"O3"`, or any policy. Defaults to `"O2"`:
            `mixed_float16`, normalisation layers in float32, dynamic loss
            scale.

    Returns:
        A named tuple `(model, optimizer, report)`.

    Raises:
        TypeError, ValueError: As for `apply_policy`.

    Examples:
        >>> model = keras.Sequential(
        ...     [keras.Input((4,)), keras.layers.Dense(8),
        ...      keras.layers.Dense(2)]
        ... )
        >>> model, optimizer, report = prepare(model, "sgd", level="O2")
        >>> type(optimizer).__name__
        'LossScaleOptimizer'
    """
    accepted = global_policy.resolve_policy(level)
    _arguments.model(model)
    instance = keras.optimizers.get(optimizer)
    if layer_changes.casts(planned_policies.plan(model, accepted)):
        model, report, instance = converted_copy(model, accepted, instance)
        return Prepared(model, instance, report)
    report, instance = _convert(model, accepted, instance)
    return Prepared(model, instance, report)


def _wrap_optimizer(
    model: keras.Model,
    policy: keras.DTypePolicy,
    optimizer: keras.optimizers.Optimizer | None = None,
) -> keras.optimizers.Optimizer | None:
    """Wraps an optimizer, by default the model's, as the dtypes require."""
    level = policies.with_rules(policy).level
    current = _optimizer_of(model)
    if optimizer is None and current is not None:
        optimizer = mixed_model.without_automatic(current)
    if optimizer is None:
        return None
    wrapped = mixed_model.choose(optimizer, model, level)
    if (
        isinstance(wrapped, scaling.LossScaleOptimizer)
        and isinstance(current, scaling.LossScaleOptimizer)
        and wrapped.inner_optimizer is current.inner_optimizer
        and wrapped.rule == current.rule
    ):
        # The present wrapper does the same, and keeps its counts.
        wrapped = current
    if current is not None:
        _adopt(model, wrapped)
    return wrapped


def _optimizer_of(model: keras.Model) -> keras.optimizers.Optimizer | None:
    """Returns a compiled model's optimizer, `None` for other models."""
    compiled = getattr(model, "compiled", False)
    return getattr(model, "optimizer", None) if compiled else None


def _adopt(model: keras.Model, optimizer: Any) -> None:
    if optimizer is not None:
        saved = mixed_model.optimizer_in_files(optimizer, model)
        layers.adopt_optimizer(model, optimizer, saved)
    for part in optimizers.chain(optimizer):
        if isinstance(part, scaling.LossScaleOptimizer):
            part.decide_anew()
