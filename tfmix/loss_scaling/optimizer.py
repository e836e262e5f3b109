"""The optimizer that scales the loss and skips steps that overflowed.

Like all wrappers it stands for the optimizer inside: `DelegatesToInner`.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from tfmix import _arguments, _messages, _users_code
from tfmix._keras import context, optimizers
from tfmix._keras import variables as keras_variables
from tfmix.gradient_scaling import model_call
from tfmix.loss_scaling import (
    rules,
    standstill,
    state,
)
from tfmix.ops import tensors
from tfmix.step import finite, guard, replicas

# Keras's class uses these names for a loss scale's state, so that tfmix can
# read a checkpoint of either.
_KERAS_NAMES = {"scale": "dynamic_scale", "good_steps": "step_counter"}
_NOT_SCALED = (
    "The gradients are divided by the loss scale, but the loss was not "
    "multiplied by it, so every update is too small by that factor. Take the "
    "gradients of the scaled loss: `scaled = optimizer.scale_loss(loss)` "
    "inside the tape, then `tape.gradient(scaled, ...)`; or, if the gradients "
    "are those of the loss, write optimizer.apply(grads, variables, "
    "unscaled=True)."
)


# Every optimizer has these of Keras's base class, even a wrapper that does not
# use them (Keras 3.12.4, 3.15.1).
_SHARED = (
    "clipnorm clipvalue ema_momentum ema_overwrite_frequency "
    "exclude_from_weight_decay global_clipnorm gradient_accumulation_steps "
    "iterations learning_rate use_ema weight_decay"
)


def checked(optimizer: Any) -> keras.optimizers.Optimizer:
    """Returns the optimizer to wrap, from an object, a name or a config."""
    if isinstance(optimizer, dict):
        # Keras changes the config that it gets.
        optimizer = keras.optimizers.get(dict(optimizer))
    elif isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "`inner_optimizer` must be a keras.optimizers.Optimizer of Keras "
            '3, such as keras.optimizers.Adam(), or a name such as "adam". '
            f"Received: inner_optimizer={optimizer!r} of type "
            f"{type(optimizer).__name__}."
        )
    if isinstance(optimizer, optimizers.KerasScaler):
        raise ValueError(
            "`inner_optimizer` scales the loss, which only the outermost "
            "optimizer may: two scales would be divided out twice, and master "
            f"weights need unscaled gradients. Received: inner_optimizer="
            f"{optimizer!r}. Wrap the optimizer inside it, in the order "
            "LossScaleOptimizer(MasterWeightOptimizer(Adam()))."
        )
    return optimizer


class DelegatesToInner(optimizers.OverwritesThroughInner):
    """Mixin for optimizers that leave the update to another optimizer.

    Every public attribute that the class does not declare, and those of
    `_SHARED`, are the inner optimizer's. List it before Keras's class among the
    bases.
    """

    built: bool
    # True if tfmix attached it by itself, and detaches it again.
    is_automatic = False

    def __getattr__(self, name: str) -> Any:
        """Looks up missing attributes on the inner optimizer."""
        # Private names are not delegated: Keras and TensorFlow read them to
        # track each object's own state.
        inner = vars(self).get("inner_optimizer")
        if inner is None or name.startswith("_"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets attributes that only the inner optimizer has there."""
        inner = vars(self).get("inner_optimizer")
        private = name.startswith("_")
        mine = private or name in vars(self) or hasattr(type(self), name)
        if name == "loss_scale_factor":
            # TensorFlow does not set a value that is there already.
            object.__setattr__(self, name, value)
        elif inner is None or mine or not hasattr(inner, name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    @property
    def loss_scale_factor(self) -> float | None:
        """The inner optimizer's fixed loss scale."""
        return self.inner_optimizer.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: float | None) -> None:
        scales = isinstance(self, optimizers.KerasScaler)
        # Keras's own loss scale sets `None` on the optimizer that it gets.
        if scales and (value is not None or "inner_optimizer" in vars(self)):
            raise ValueError(
                "An optimizer that scales the loss takes no second loss scale: "
                "the gradients would be divided by both. Received: "
                f"loss_scale_factor={value!r}. Set `optimizer.loss_scale`, and "
                "use it without another LossScaleOptimizer around it."
            )
        _write(self, "loss_scale_factor", value)

    def variables_of(
        self, grads: Sequence, trainable_variables: Sequence | None
    ) -> list[keras.Variable]:
        """Returns the gradients' variables; builds the optimizer on them.

        Raises:
            ValueError: If there are none yet, one is unknown, or their number
                is not that of the gradients.
        """
        if not self.built:
            if trainable_variables is None:
                raise ValueError(
                    "The optimizer is not built yet, so it does not know which "
                    "variables the gradients belong to. Received: "
                    "trainable_variables=None. Write "
                    "optimizer.apply(grads, model.trainable_variables)."
                )
            self.build(list(trainable_variables))
        known = optimizers.remembered(self)
        if trainable_variables is not None:
            # This finds the objects that `build` received.
            known = optimizers.recognised(self, list(trainable_variables))
        if len(grads) != len(known):
            raise ValueError(
                "There must be one gradient (or None) for each variable. "
                f"Received: {len(grads)} gradients for {len(known)} variables."
            )
        return known

    def set_weights(self: Any, weights: Sequence) -> None:
        """Sets all of `optimizer.variables`, one array each, or none.

        Raises:
            ValueError: If an array does not fit.
        """
        keras_variables.assign_all(self.variables, weights)


def _shared(name: str) -> property:
    return property(
        lambda self: getattr(self.inner_optimizer, name),
        lambda self, value: _write(self, name, value),
        doc=f"The inner optimizer's `{name}`.",
    )


def _write(wrapper: DelegatesToInner, name: str, value: Any) -> None:
    # Keras's base class sets its defaults before the inner one exists.
    if "inner_optimizer" in vars(wrapper):
        setattr(wrapper.inner_optimizer, name, value)


for _name in _SHARED.split():
    setattr(DelegatesToInner, _name, _shared(_name))


@keras.saving.register_keras_serializable(package="tfmix")
class LossScaleOptimizer(
    optimizers.StoredAsInner,
    DelegatesToInner,
    state.Counts,
    optimizers.KerasScaler,
):
    """Wraps any Keras optimizer; skips steps that are not finite.

    A drop-in for `keras.optimizers.LossScaleOptimizer`. In each step the
    gradients are summed over all replicas, divided by the loss scale in
    float32 and checked. If every number of every gradient is finite, the
    inner optimizer applies them; if not, no weight, optimizer state or average
    changes on any replica, the skip is counted, and the loss scale reacts.

    Losses of a Keras model under a tfmix policy need no scaling, because the
    model scales its gradients inside and returns them unscaled. An optimizer of
    such a model's variables multiplies and divides by 1, so you may call or
    omit `scale_loss` and `unscale_gradients`. The loss scale then moves the
    gradients within float16's range, by its ratio to its first value. In a step
    that `jax.jit` compiles it does so inside a `keras.StatelessScope` that has
    the values of `variables`.

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer`, or the name of one
            (`"adam"`). Clipping, weight decay, EMA and gradient accumulation
            are its arguments; clipping then acts on unscaled, summed gradients.
        initial_scale: Float, the first loss scale of the dynamic rule.
            Defaults to `2.0**15`.
        dynamic_growth_steps: Integer, finite steps before the dynamic scale
            doubles. Defaults to `2000`.
        loss_scale: `"dynamic"`, a positive number for a fixed scale, or a
            `tfmix.loss_scaling.LossScale` object, which then holds all
            settings. Defaults to `"dynamic"`.
        name: String. Defaults to `"loss_scale_optimizer"`.

    Attributes:
        inner_optimizer: The wrapped optimizer. It has `learning_rate`,
            `iterations` and every attribute that this class lacks, such as
            `beta_1`.
        loss_scale: Float, the current scale. Reading it copies a scalar to
            the host; inside a compiled function it is a tensor. It can be set.
        skipped_steps: Integer, the number of steps that were not applied.
        consecutive_skips: Integer, skipped steps since the last applied one.
        overflow_counts: Dict from variable path to the number of skipped
            steps in which that variable's gradient was not finite.

    Raises:
        TypeError: If `inner_optimizer` is not a Keras 3 optimizer, or a setting
            is not a number.
        ValueError: If a setting is out of range, contradicts another, or
            belongs to the inner optimizer.

    Examples:
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> optimizer = LossScaleOptimizer(keras.optimizers.Adam(1e-3))
        >>> model.compile(optimizer, loss="mse")
        >>> history = model.fit(ops.ones((4, 2)), ops.ones((4, 1)), verbose=0)
        >>> optimizer.loss_scale, optimizer.skipped_steps
        (32768.0, 0)

    For layers outside such a model, the contract is Keras's: `apply` takes the
    gradients of the scaled loss. For such a model the same loop works with
    `scale_loss` or without:

        with tf.GradientTape() as tape:
            loss = compute_loss()
            scaled = optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)

    To clip the gradients yourself, replace the last line:

        grads = optimizer.unscale_gradients(grads)
        grads, norm = tf.clip_by_global_norm(grads, 1.0)
        optimizer.apply(grads, model.trainable_variables, unscaled=True)

    `last_step_applied()` then returns whether the step was applied.
    """

    built: bool

    def __init__(
        self,
        inner_optimizer: str | keras.optimizers.Optimizer,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        *,
        loss_scale: Any = "dynamic",
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        rule = rules.from_arguments(
            loss_scale, initial_scale, dynamic_growth_steps
        )
        inner_optimizer = checked(inner_optimizer)
        factor = inner_optimizer.loss_scale_factor
        if factor is not None:
            _messages.warn(
                "the fixed loss_scale_factor=%r of %r is replaced by tfmix's "
                "loss scale. To keep it, write LossScaleOptimizer(..., "
                "loss_scale=%r).",
                factor,
                inner_optimizer.name,
                factor,
            )
        super().__init__(
            inner_optimizer,
            initial_scale=float(rule.init()[0]),
            dynamic_growth_steps=getattr(rule, "growth_steps", None),
            name=name,
            **kwargs,
        )
        # Whether losses are multiplied by the scale, once that is decided.
        self._is_scaling: bool | None = None
        # Also true after the warning that no loss was scaled.
        self._has_scaled = False
        # Whether `apply_gradients` gets unscaled gradients, as in tf.keras.
        self._gets_unscaled = False
        # A function that was compiled before the first step reads it.
        self.rule = rule
        self._state = state.State(rule, self._add)
        # Keras saves it beside the state.
        self._loss_scale_state = state.OwnState(
            functools.partial(optimizers.own_variables, self)
        )

    @property
    def loss_scale(self) -> Any:
        """The current scale: a float, or a tensor in a compiled function."""
        # NumPy cannot read a mirrored value inside a strategy's scope.
        scale = self._state.scale_by(keras_variables.host_value)
        if scale[0] is None:
            return self.rule_scale()
        return float(self.rule.current(scale))

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        wanted = np.float32(_arguments.positive("loss_scale", value))
        scale = self.rule.init()._replace(scale=wanted)
        if float(self.rule.current(scale)) != wanted:
            raise ValueError(
                f"{self.rule!r} does not allow this loss scale. "
                f"Received: loss_scale={value!r}."
            )
        for variable, new in zip(self._state.held.scale, scale, strict=True):
            variable.assign(new)

    @property
    def skips(self) -> keras.Variable:
        """The variable that holds `skipped_steps`."""
        skips: keras.Variable = self._state.held.skipped_steps
        return skips

    @property
    def applies(self) -> keras.Variable:
        """The variable that counts the calls of the inner `apply`."""
        return optimizers.applies(self)

    @property
    def counts_bad_data(self) -> bool:
        """Whether skips are counted of which the data or loss was not finite.

        These cannot be told from an overflow if the loss is multiplied by the
        scale, or there is no scale.
        """
        return self._is_scaling is not None and self._can_detect_bad_data()

    def check_health(self, max_consecutive_skips: int = 50) -> None:
        """Raises if training is stuck; call it now and then in a long loop.

        Args:
            max_consecutive_skips: Integer. Defaults to `50`: the scale falls
                from its ceiling to its floor in 24 steps.

        Raises:
            LossScaleError: If that many steps in a row were skipped. It names
                the variables whose gradients were not finite and says what to
                change.
        """
        limit = _arguments.count("max_consecutive_skips", max_consecutive_skips)
        standstill.check(self, limit)

    @context.untouched
    def scale_loss(self, loss: Any) -> Any:
        """Multiplies a loss by the loss scale, in float32 or wider.

        Args:
            loss: Scalar tensor, number, or a nest of them.

        Returns:
            The scaled loss, of the same structure. 16-bit losses become
            float32, because a float16 loss would overflow at once. If the model
            scales its gradients, the loss is returned unchanged.

        Raises:
            ValueError: If `jax.jit` would make a constant of the scale.

        Examples:
            >>> optimizer = LossScaleOptimizer("sgd", loss_scale=8.0)
            >>> float(optimizer.scale_loss(0.5))
            4.0
        """
        self._gets_unscaled = False
        return self.get_scaled_loss(loss)

    def rule_scale(self) -> Any:
        """Returns the rule's scale: a float32 scalar, not copied to the host.

        Raises:
            ValueError: If `jax.jit` would make a constant of it.
        """
        if not rules.is_constant(self.rule) and any(
            map(keras_variables.becomes_constant, self._state.held.scale)
        ):
            raise ValueError(
                "JAX is compiling this function, and the values of "
                "`optimizer.variables` are not among its arguments: the loss "
                "scale would keep its present value. Make them an argument "
                "`values`, and write `with keras.StatelessScope("
                "zip(optimizer.variables, values)):` around the call of "
                f"{self.name!r}'s `scale_loss`, `unscale_gradients` or "
                "`loss_scale`."
            )
        scale = self._state.scale_by(lambda variable: variable.value)
        return self.rule.current(scale)

    def place(self) -> Any:
        """Returns where gradients lie inside a model; see `State.place`."""
        return self._state.place()

    @context.untouched
    def unscale_gradients(self, grads: Sequence) -> list:
        """Divides gradients by the loss scale, for clipping or logging.

        To apply them, write `apply(grads, variables, unscaled=True)`. If the
        model scales its gradients, they are unscaled already. Numbers that are
        not finite, infinities included, become NaN, so that clipping by value
        cannot hide them. Under a `tf.distribute` strategy these are this
        replica's gradients; to clip the sum over all replicas, give
        `global_clipnorm` to the inner optimizer instead.

        Args:
            grads: Scaled gradients; `None` where there is none.

        Returns:
            A list of the unscaled gradients, float32 where they were 16-bit.

        Raises:
            ValueError: If `jax.jit` would make a constant of the scale.

        Examples:
            >>> optimizer = LossScaleOptimizer("sgd", loss_scale=8.0)
            >>> loss = optimizer.scale_loss(2.0)
            >>> true = optimizer.unscale_gradients([ops.array([loss])])
            >>> float(true[0][0])
            2.0
        """
        grads = list(grads)
        variables: list = optimizers.remembered(self)
        if len(variables) != len(grads):
            variables = [None] * len(grads)
        scale = self.rule_scale() if self._takes_scaled() else None
        true = finite.unscaled(grads, variables, scale)
        return [
            None if g is None else finite.without_infinities(g) for g in true
        ]

    @context.untouched
    def apply(
        self,
        grads: Sequence,
        trainable_variables: Sequence[keras.Variable] | None = None,
        *,
        unscaled: bool = False,
    ) -> None:
        """Applies gradients if all are finite; else skips the step.

        `last_step_applied()` returns which. Like Keras's method it returns
        nothing, so that a branch of a conditional may call it.

        Args:
            grads: Gradients of the scaled loss, one per variable, dense or
                `tf.IndexedSlices`; `None` where there is none.
            trainable_variables: The variables. Defaults to those that the
                optimizer was built with; on the first call they build it.
            unscaled: Bool, whether the gradients are already divided by the
                loss scale, as by `unscale_gradients`. Defaults to `False`: the
                step divides them, where that costs least. If the model scales
                its gradients, this makes no difference.

        Raises:
            ValueError: If there is no gradient at all, a variable is unknown,
                the call is outside `strategy.run` or inside `jax.jit`, or the
                distribution strategy cannot skip a step on all replicas.

        Examples:
            >>> optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0)
            >>> weight = keras.Variable([1.0])
            >>> optimizer.build([weight])
            >>> grads = [optimizer.scale_loss(ops.array([3.0]))]
            >>> clipped = ops.clip(optimizer.unscale_gradients(grads)[0], -1, 1)
            >>> optimizer.apply([clipped], [weight], unscaled=True)
            >>> bool(optimizer.last_step_applied()), float(weight[0])
            (True, 0.0)
        """
        grads = list(grads)
        if not grads:
            return
        variables = self.variables_of(grads, trainable_variables)
        guard.note_update(variables)
        unscaled = unscaled or context.block.get().takes_unscaled
        unscaled = unscaled or not self._takes_scaled(warns=True)
        self._step(grads, variables, unscaled)

    def stateless_apply(
        self,
        optimizer_variables: Sequence,
        grads: Sequence,
        trainable_variables: Sequence,
        *,
        unscaled: bool = False,
    ) -> tuple[list, list]:
        """Returns the values after the step; changes nothing (JAX).

        Args:
            optimizer_variables: Current values of `optimizer.variables`.
            grads: Gradients of the scaled loss, one per trainable variable.
            trainable_variables: Current values of the model's variables.
            unscaled: Bool, as in `apply`. Defaults to `False`.

        Returns:
            The new values of the model's variables and of the optimizer's.

        Raises:
            ValueError: If the optimizer is not built, the counts differ, or
                the backend is TensorFlow.
        """
        with context.holding(takes_unscaled=unscaled):
            values: tuple[list, list] = (
                keras.optimizers.Optimizer.stateless_apply(
                    self, optimizer_variables, grads, trainable_variables
                )
            )
        return values

    @context.untouched
    def apply_gradients(self, grads_and_vars: Iterable) -> Any:
        """Does what `apply` does with pairs of a gradient and its variable.

        As in Keras it takes scaled gradients. As in tf.keras it takes unscaled
        ones if `get_unscaled_gradients` was called since `scale_loss`. If the
        model scales its gradients, both are the same.

        Args:
            grads_and_vars: Pairs of a gradient and a variable.

        Returns:
            The inner optimizer's iteration count, like Keras's method.

        """
        pairs = list(grads_and_vars)
        if pairs:
            # Keras's method calls `apply`, and others may have replaced it.
            with context.holding(takes_unscaled=self._gets_unscaled):
                super().apply_gradients(pairs)
        return self.iterations

    @context.untouched
    def get_scaled_loss(self, loss: Any) -> Any:
        """Does what `scale_loss` does, under its old tf.keras name.

        A function that returns the loss becomes one that scales its result.
        """
        if callable(loss):
            return lambda: self.get_scaled_loss(loss())
        if not self._scales_losses():
            return loss
        self._has_scaled = True
        if (step := guard.current_step()) is not None:
            step.scaled.add(id(self))
        scale = self.rule_scale()

        def scaled(value: Any) -> Any:
            value = tensors.to_float32(ops.convert_to_tensor(value))
            return ops.multiply(value, ops.cast(scale, value.dtype))

        return tree.map_structure(scaled, loss)

    @context.untouched
    def get_unscaled_gradients(self, grads: Sequence) -> list:
        """Divides gradients for `apply_gradients`, as in the old tf.keras.

        After it, `apply_gradients` takes unscaled gradients until `scale_loss`
        is called again. Arguments and result are those of `unscale_gradients`.
        """
        self._gets_unscaled = True
        return self.unscale_gradients(grads)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the optimizer state and counts for a model's variables.

        A second call changes nothing.

        Args:
            variables: The trainable variables, in the order of the gradients
                to come.
        """
        if self.built:
            return
        variables = list({id(v): v for v in variables}.values())

        def create() -> None:
            self.inner_optimizer.build(variables)
            self._state.build(self.inner_optimizer.name, variables)

        # TensorFlow traces a function that creates variables a second time.
        replicas.once_for_all(create, variables)
        optimizers.remember(self, variables)
        self.built = True

    def save_own_variables(self, store: Any) -> None:
        """Writes what a run without loss scaling has in this place.

        Keras writes the rest of the state beside it.
        """
        *_, bare = optimizers.chain(self)
        for position, variable in enumerate(bare.variables):
            store[str(position)] = np.asarray(variable.numpy())

    def load_own_variables(self, store: Any) -> None:
        """Reads the state of a run with loss scaling or without.

        It warns, like Keras, if the optimizer is not built, or if the file has
        no state or that of other variables, because weights can be loaded into
        any model.

        Args:
            store: Maps positions, as strings, to arrays, as Keras opens a file.
        """
        state.read(store, self, self._loss_scale_state)

    def get_config(self) -> dict:
        """Returns the constructor's arguments, in Keras's form if they fit."""
        serialize = keras.saving.serialize_keras_object
        inner = serialize(self.inner_optimizer)
        arguments = {"name": self.name, "inner_optimizer": inner}
        of_keras = {
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
        }
        # The rule may differ from the default in other settings.
        if self.rule == rules.from_arguments("dynamic", *of_keras.values()):
            return arguments | of_keras
        return arguments | {"loss_scale": serialize(self.rule)}

    @classmethod
    def from_config(
        cls, config: dict, custom_objects: Any = None
    ) -> "LossScaleOptimizer":
        """Returns the optimizer that `get_config`, or Keras's, described."""
        with keras.saving.custom_object_scope(custom_objects or {}):
            return cls(**config)

    def last_step_applied(self) -> Any:
        """Returns whether the last `apply` changed anything.

        Returns:
            Boolean scalar tensor, not copied to the host; true before the first
            call.
        """
        return ops.equal(self._state.held.consecutive_skips.value, 0)

    def _scales_losses(self) -> bool:
        """Returns whether the optimizer multiplies losses by its scale.

        It does not if the models scale their gradients.
        """
        if self._is_scaling is None:
            step = guard.current_step()
            if step is not None and not self.built:
                variables = step.model.trainable_variables
                is_its = not step.is_own and step.model.optimizer is self
                if not (is_its and variables):
                    # The variables are not known yet. This step multiplies the
                    # loss and divides the gradients, which is right for any.
                    return True
                self.build(variables)
            # The decision is final, because later compiled code has to agree
            # with earlier code.
            inside = self.built and model_call.scales(
                optimizers.remembered(self)
            )
            self._is_scaling = not inside
        return self._is_scaling

    def _takes_scaled(self, warns: bool = False) -> bool:
        """Returns whether the gradients are those of a scaled loss.

        In a model's train step, they are if the step has scaled its loss, which
        it may have done before the optimizer knew its variables.

        Args:
            warns: Whether to warn if no loss was ever scaled.
        """
        if (step := guard.current_step()) is not None:
            return id(self) in step.scaled
        scales, rule = self._scales_losses(), self.rule
        if scales and warns and not self._has_scaled:
            self._has_scaled = True
            if not (rules.is_constant(rule) and rule.lowest_scale == 1.0):
                _users_code.warn(_NOT_SCALED)
        return scales

    def decide_anew(self) -> None:
        """Decides again whether to scale, since the model's dtypes changed."""
        self._is_scaling = None

    def _step(self, grads: list, variables: list, unscaled: bool) -> None:
        """Applies a step, or skips it.

        Args:
            grads: The gradients. Two networks that share a trunk may each give
                one for its variables.
            variables: The variable of each.
            unscaled: Whether they need no division by the loss scale.
        """
        own, rule = optimizers.remembered(self), self.rule
        inner = self.inner_optimizer
        if keras.backend.backend() == "tensorflow":
            replicas.check_replica_context()
        scale = None
        if not unscaled:
            with replicas.one_replica(self.variables + own):
                values = self._state.scale_by(keras_variables.reader())
            scale = rule.current(values)

        def count(applied: Any, bad: Any, summed: list) -> None:
            def is_data() -> Any:
                # `unscale_gradients` makes NaN of an overflow as well, but not
                # of each gradient.
                both = ops.logical_and if unscaled else ops.logical_or
                can_tell = self._can_detect_bad_data()
                return can_tell and finite.blames_data(summed, variables, both)

            self._state.count(applied, bad, variables, is_data)
            self.warn(applied)

        finite.apply_step(
            self,
            grads,
            variables,
            inner.apply,
            assigned=own + inner.variables,
            counters=[*self.variables, *state.place_variables(variables)],
            count=count,
            scale=scale,
            checks_unscaled=not unscaled and rule.lowest_scale < 1.0,
        )
        # The flag is read from the counter. For a separate boolean, XLA would
        # count in another kernel.
        guard.report(self.last_step_applied)

    def _can_detect_bad_data(self) -> bool:
        """Returns whether NaN in gradients means data that is not finite.

        Outside models that scale their gradients, it may be an overflow. Models
        without float16, which have no loss scale, do not tell either.
        """
        is_off = isinstance(self.rule, rules.NoLossScale)
        return not (is_off or self._scales_losses())

    def _add(self, name: str, value: Any, dtype: str) -> keras.Variable:
        """Adds a variable of the state."""
        variable = self.add_variable(
            shape=np.shape(value),
            dtype=dtype,
            initializer=functools.partial(_filled, value),
            name=_KERAS_NAMES.get(name, name),
        )
        # Keras tracks what is assigned, and must track what it made only once.
        setattr(self, _KERAS_NAMES.get(name, f"_loss_scale_{name}"), variable)
        return variable


def _filled(value: Any, shape: tuple, dtype: str | None = None) -> Any:
    """Initializes a variable with a number.

    Keras's initializers, and what JAX makes of a number or of a NumPy array,
    would each compile a program of their own.
    """
    array = np.full(shape, value, dtype)
    if keras.backend.backend() != "jax":
        return array
    import jax

    return jax.device_put(array)
