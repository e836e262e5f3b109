"""Existing models: into 16 bit, in place or as a copy, and back."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from tfmix import _arguments, _messages, _progress, _tables
from tfmix._keras import (
    compile_method,
    layer_policies,
    model_methods,
    optimizers,
    slots_by_variable,
    variables,
)
from tfmix.autocast import (
    compile_optimizer,
    global_policy,
    own_code,
)
from tfmix.autocast import model as mixed_model
from tfmix.conversion import (
    copying,
    layer_changes,
    optimizer_state,
    planned_policies,
)
from tfmix.float8 import chosen_layers
from tfmix.gradient_scaling import model_call
from tfmix.loss_scaling import optimizer as scaling
from tfmix.loss_scaling import train_step_guard
from tfmix.optimizers import sixteen_bit_optimizer
from tfmix.policy import policy as policies


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


class ConversionReport(_tables.Printed):
    """Says what `apply_policy` did; prints as a table.

    Args:
        policy: The policy that was applied.
        rows: One row per layer, in the model's order.
        undo: Takes the conversion back.
        notes: Sentences on what a reader should know besides.
        layers: The layer of each row. Defaults to none.

    Attributes:
        policy: The policy that was applied.
        rows: Tuple of `Row`. A layer that has fallen back to float32 since,
            because its code cannot compute in 16 bit, is shown as float32.
        notes: Tuple of sentences.

    Examples:
        >>> row = Row("dense", "Dense", "float32", "mixed_float16", "")
        >>> policy = keras.DTypePolicy("mixed_float16")
        >>> print(str(ConversionReport(policy, [row], print)).splitlines()[0])
        1 layer under mixed_float16: 1 changed, 0 in float32
    """

    def __init__(
        self,
        policy: keras.DTypePolicy,
        rows: list[Row],
        undo: layer_changes.Undo,
        notes: tuple[str, ...] = (),
        layers: Sequence[keras.Layer] = (),
    ) -> None:
        self.policy = policy
        self._rows, self._layers = tuple(rows), tuple(layers)
        self.notes = notes
        self._undo: layer_changes.Undo | None = undo

    def undo(self) -> None:
        """Puts every dtype, method and optimizer back as it was before.

        Trained weights and the inner optimizer's state stay as they are now:
        undoing a conversion does not undo training. An optimizer that the
        model was compiled with since stays, too; the wrapper that tfmix put
        on it goes.

        Raises:
            RuntimeError: If it has been called before, or the model, or a
                part of it, was converted again or quantized since.
        """
        if self._undo is None:
            raise RuntimeError(
                "This conversion has been undone already. Call "
                "`apply_policy(model, policy)` to convert the model again."
            )
        self._undo()
        self._undo = None

    @property
    def rows(self) -> tuple[Row, ...]:
        """One row per layer."""
        reasons = [own_code.why(layer) for layer in self._layers]
        reasons += [""] * (len(self._rows) - len(reasons))
        return tuple(
            dataclasses.replace(row, after="float32", why=why) if why else row
            for row, why in zip(self._rows, reasons, strict=True)
        )

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
    """What `prepare` returns.

    Attributes:
        model: The model that was given, converted in place.
        optimizer: The optimizer to compile with, wrapped where it is needed.
        report: The `ConversionReport`, with `undo()`.
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
    `evaluate` use the new dtypes. The model's outputs stay float32; those of
    a subclassed model where a layer with a softmax makes them, and a warning
    says where they do not. A compiled model's optimizer is wrapped if the
    new dtypes call for it.

    Args:
        model: A `keras.Model`: Functional, Sequential or subclassed, nested
            or with shared layers.
        policy: As for `set_global_policy`. Its rules decide which layers
            stay in float32; a layer quantized or of an integer dtype, and
            in a model with 16-bit layers a float32 one, is left alone.

    Returns:
        A `ConversionReport`: one row per layer, and `undo()`.

    Raises:
        TypeError: If `model` is no Keras 3 model or `policy` no policy.
        ValueError: If the policy is unknown or its dtype is no float.

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
    accepted = global_policy.asked(policy)
    _arguments.model(model)
    return _convert(model, accepted)[0]


def _convert(
    model: keras.Model,
    policy: keras.DTypePolicy,
    given: keras.optimizers.Optimizer | None = None,
) -> tuple[ConversionReport, Any]:
    """Converts, and returns the report and the optimizer to train with."""
    steps = planned_policies.plan(model, policy)
    rows = [
        Row(
            layer_policies.path_of(step.layer),
            type(step.layer).__name__,
            planned_policies.entry(step.layer.dtype_policy, step.layer).name,
            step.policy.name,
            step.why,
        )
        for step in steps
        if step.shown
    ]
    notes = planned_policies.unused_rules(model, policy)
    float8 = policies.with_rules(policy).is_float8
    if all(row.before == row.after for row in rows) and not (
        float8 or chosen_layers.reasons(model)
    ):
        if any(row.after == policy.name for row in rows):
            note = f"The model was {policy.name} already: no layer changes."
        else:
            note = "No layer changes: the last column says why."
        notes = (note, *notes)
    with variables.strategy_scope(model):
        undo, optimizer = _converted(model, policy, steps, given)
    for note in notes:
        _messages.warn("%s", note)
    shown = [step.layer for step in steps if step.shown]
    report = ConversionReport(policy, rows, undo, notes, shown)
    return report, optimizer


def _converted(
    model: keras.Model,
    policy: keras.DTypePolicy,
    steps: list[planned_policies.Step],
    given: keras.optimizers.Optimizer | None,
) -> tuple[layer_changes.Undo, keras.optimizers.Optimizer | None]:
    """Changes a model, or after an error nothing; returns the way back."""
    before = optimizer_state.optimizer_of(model)
    state_before = optimizer_state.take(model)
    known = [
        slots_by_variable.remembered(optimizer, model.variables)
        for optimizer in (before, given)
    ]
    with contextlib.ExitStack() as way_back, contextlib.ExitStack() as failed:
        way_back.callback(layer_changes.forget_compiled, model)
        failed.callback(_adopt, model, before)
        for know_again in known:
            way_back.callback(know_again)
        way_back.callback(_inside(given or before))
        check = layer_changes.stand(steps, way_back)
        methods = model_methods.by_role(model)
        way_back.callback(model_methods.restore, model, methods)
        scaled = model_methods.RULES in methods
        way_back.callback(model_call.note_scaling, model, scaled)
        layer_changes.set_dtypes(steps, way_back)
        for know_again in known:
            know_again()
        chosen = chosen_layers.reasons(model)
        way_back.callback(chosen_layers.restore, model, chosen)
        mixed_model.set_policy(model, policy)
        installed = _suit_optimizer(model, policy, state_before, given)
        if isinstance(installed, scaling.LossScaleOptimizer):
            train_step_guard.put_on(model)
        elif installed is not before and train_step_guard.is_guarded(model):
            # What could skip a step was tfmix's own, and is gone.
            train_step_guard.put_on(model, asked_for=False)
        layer_changes.forget_compiled(model)
        failed.pop_all()
        undone = way_back.pop_all()

    def undo() -> None:
        check()
        with variables.strategy_scope(model):
            _take_back(model, undone, installed, before)

    return undo, installed


def _take_back(
    model: keras.Model,
    way_back: contextlib.ExitStack,
    installed: keras.optimizers.Optimizer | None,
    before: keras.optimizers.Optimizer | None,
) -> None:
    """Undoes a conversion that `installed` an optimizer for that `before`."""
    trained = optimizer_state.take(model)
    current = optimizer_state.optimizer_of(model)
    known = slots_by_variable.remembered(current, model.variables)
    way_back.close()
    known()
    if current is installed:
        _adopt(model, before)
        optimizer_state.give(model, trained)
    else:
        # The user has compiled anew since, and goes on with this optimizer.
        carries = mixed_model.policy_of(model) or model.dtype_policy
        _suit_optimizer(model, carries, trained)


def convert_model(
    model: keras.Model,
    policy: str | keras.DTypePolicy,
    *,
    inference: bool = False,
) -> keras.Model:
    """Makes a converted copy of a model; the source is left untouched.

    Use it for a second, 16-bit version: to compare, to serve, or to save at
    half the size under `"float16"` or `"bfloat16"`, whose variables are cast.

    Args:
        model: A `keras.Model`. A subclassed one must be loadable, that is
            have a `get_config` that says how to make it.
        policy: As for `apply_policy`.
        inference: Boolean, whether the copy is only for prediction: it is
            then not compiled, carries no optimizer state and has nothing
            trainable. Defaults to `False`.

    Returns:
        The copy, weights carried over; compiled, with the optimizer's state,
        if the source is.

    Raises:
        TypeError: If `model` is no Keras 3 model, or cannot be copied.
        ValueError: As `apply_policy`.

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
    accepted = global_policy.asked(policy)
    _arguments.model(model)
    with _progress.shown(f"Converting {model.name} to {accepted.name}"):
        twin = copying.copied(model)
        if inference:
            twin.trainable = twin.compiled = False
            twin.optimizer = None
        apply_policy(twin, accepted)
    return twin


def prepare(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer | str,
    level: str | keras.DTypePolicy = "O2",
    *,
    keep_batchnorm_fp32: bool | None = None,
) -> Prepared:
    """Converts a model, wraps its optimizer and guards it, in one call.

    The form other libraries have: Apex's `amp.initialize`, MindSpore's
    `build_train_network`. `compile` the model with the optimizer returned.

    Args:
        model: A `keras.Model`, changed in place.
        optimizer: A Keras optimizer or the name of one.
        level: `"O0"` to `"O3"`, or any policy. Defaults to `"O2"`:
            `mixed_float16`, normalisation layers in float32, dynamic loss
            scale.
        keep_batchnorm_fp32: Boolean, overrides the level's choice. Defaults
            to `None`, the level's own.

    Returns:
        A named tuple `(model, optimizer, report)`.

    Raises:
        TypeError, ValueError: As `apply_policy`; also if both a policy object
            and `keep_batchnorm_fp32` are given.

    Examples:
        >>> model = keras.Sequential(
        ...     [keras.Input((4,)), keras.layers.Dense(8),
        ...      keras.layers.Dense(2)]
        ... )
        >>> model, optimizer, report = prepare(model, "sgd", level="O2")
        >>> type(optimizer).__name__
        'LossScaleOptimizer'
    """
    if keep_batchnorm_fp32 is not None:
        if not isinstance(level, str):
            raise ValueError(
                "`keep_batchnorm_fp32` goes with a level's name. Received: "
                f"level={level!r}. Give it to the Policy instead."
            )
        level = policies.Policy(level, keep_batchnorm_fp32=keep_batchnorm_fp32)
    accepted = global_policy.asked(level)
    _arguments.model(model)
    instance = keras.optimizers.get(optimizer)
    report, instance = _convert(model, accepted, instance)
    return Prepared(model, instance, report)


def _suit_optimizer(
    model: keras.Model,
    policy: keras.DTypePolicy,
    state: optimizer_state.Handover | None,
    given: keras.optimizers.Optimizer | None = None,
) -> keras.optimizers.Optimizer | None:
    """Gives a model the wrappers its dtypes need, and takes ours off."""
    level = policies.with_rules(policy).level
    optimizer = optimizer_state.optimizer_of(model)
    if given is not None:
        suited = compile_optimizer.suited(given, model, level)
        if optimizer is not None:
            _adopt(model, suited)
        return suited
    if optimizer is None:
        return None
    bare, anew = _bare(optimizer, model, state)
    suited = compile_optimizer.suited(bare, model, level)
    if (
        not anew
        and isinstance(suited, scaling.LossScaleOptimizer)
        and isinstance(optimizer, scaling.LossScaleOptimizer)
        and suited.inner_optimizer is optimizer.inner_optimizer
        and suited.rule == optimizer.rule
    ):
        # It scales the loss of the same optimizer alike.
        suited = optimizer
    _adopt(model, suited)
    optimizer_state.give(model, state)
    return suited


def _bare(
    optimizer: keras.optimizers.Optimizer,
    model: keras.Model,
    state: optimizer_state.Handover | None,
) -> tuple[keras.optimizers.Optimizer, bool]:
    """Returns an optimizer to be wrapped, and whether it is another one."""
    pure = own_code.has_sixteen_bit_variables(model)
    cast = state is not None and state.cast
    on_masters = sixteen_bit_optimizer.owner(optimizer) is not None
    if pure and on_masters and not cast:
        return optimizer, False
    bare = compile_optimizer.without_automatic(optimizer)
    # Masters, and slots of another dtype, want one that is not built. One
    # whose masters go has float32 slots already.
    masters_go = on_masters and sixteen_bit_optimizer.owner(bare) is None
    if not bare.built or not (pure or (cast and not masters_go)):
        return bare, False
    moved = {} if state is None else state.homes
    return slots_by_variable.fresh(bare, moved), True


def _inside(optimizer: keras.optimizers.Optimizer | None) -> layer_changes.Undo:
    """Notes what fitting an optimizer to a model changes inside it."""
    noted = [
        (part, name, vars(part)[name])
        for part in optimizers.with_nested(optimizer)
        for name in ("inner_optimizer", "loss_scale_factor")
        if name in vars(part)
    ]

    def restore() -> None:
        for part, name, value in noted:
            setattr(part, name, value)

    return restore


def _adopt(model: keras.Model, optimizer: Any) -> None:
    if optimizer is not None:
        compile_method.adopt_optimizer(model, optimizer)
    for part in optimizers.chain(optimizer):
        if isinstance(part, scaling.LossScaleOptimizer):
            part.decide_anew()
