"""The optimizer that scales the loss and skips steps that overflowed."""

import contextlib
import contextvars
import numbers
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from tfmix import _arguments, _errors, _messages
from tfmix._keras import (
    compilation,
    compile_method,
    global_state,
    optimizers,
)
from tfmix._keras import variables as keras_variables
from tfmix.scaling import rules, settings
from tfmix.scaling.step import replicas, unscale
from tfmix.variables import inner_attributes

# How the variables of a loss scale's state are called in Keras's own class,
# so that a checkpoint written by either can be read by tfmix.
_KERAS_NAMES = {"scale": "dynamic_scale", "good_steps": "step_counter"}
# Notes on tensors: a loss that was scaled; a gradient that is the result of a
# division, or that was given to one.
_LOSS, _GRADIENT = "_tfmix_scaled_loss", "_tfmix_gradient"
_TRUE, _SCALED = "true", "scaled"
# Keys of a saved state: own variables by name, the inner ones by position.
_OWN, _INNER = "own_", "inner_"
# Keras's class stores its variables by position: these four, then the inner
# optimizer's.
_KERAS_OWN = ("iteration", "learning_rate", "step_counter", "dynamic_scale")
_MOST_NAMED = 5
# The scales that a loss was multiplied by in the train step around the caller,
# by the `id` of their `_Use`; `None` outside of one.
_scaled_in_step: contextvars.ContextVar[set[int] | None] = (
    contextvars.ContextVar("tfmix_scaled_in_step", default=None)
)


@keras.saving.register_keras_serializable(package="tfmix")
class LossScaleOptimizer(
    inner_attributes.DelegatesToInner, keras.optimizers.LossScaleOptimizer
):
    """Wraps any Keras optimizer with loss scaling that survives every fault.

    A drop-in for `keras.optimizers.LossScaleOptimizer`. In each step the
    gradients are summed over all replicas, divided by the loss scale in
    float32 and checked. If every number of every gradient is finite, the
    inner optimizer applies them; if not, no variable, slot, counter or
    average changes on any replica, and the loss scale reacts.

    A Keras model under a tfmix policy needs no scaled loss: its gradients are
    scaled inside it, and true outside. There the loss scale says where in
    float16 they are placed, by its ratio to its first value, and a train step
    of the model's may leave out `scale_loss`: `apply` then takes its gradients
    as they are.

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer`, or the name of one
            (`"adam"`). Clipping, weight decay, EMA and gradient accumulation
            are its arguments; clipping then acts on true, summed gradients.
        initial_scale: Float, the first loss scale of the dynamic rule.
            Defaults to `2.0**15`.
        dynamic_growth_steps: Integer, finite steps before the dynamic scale
            doubles. Defaults to `2000`.
        loss_scale: `"dynamic"`, a positive number for a fixed scale, a
            `tfmix.LossScale` object, which then holds all settings, or a
            `LossScaleOptimizer` whose scale this one is to share: either
            lowers it, and the other one's steps let it grow. A file does not
            keep the sharing; loading it says how to share again. Defaults to
            `"dynamic"`.
        reduce_dtype: `"float16"` or `"bfloat16"`, in which the gradients are
            summed over the replicas of a `tf.distribute` strategy: half the
            bytes of float32. They are checked after the sum, so that one
            which overflows is a skipped step. Defaults to `None`: the dtype
            of each gradient. Needs the TensorFlow backend.
        name: String. Defaults to `"loss_scale_optimizer"`.

    Attributes:
        inner_optimizer: The wrapped optimizer. `learning_rate`, `iterations`
            and every attribute this class has not, such as `beta_1`, are its.
        loss_scale: Float, the scale in force. Reading it copies a scalar to
            the host; inside a compiled function it is a tensor. It can be set.
        skipped_steps: Integer, steps not applied so far.
        consecutive_skips: Integer, steps not applied since the last that was.
        overflow_counts: Dict from variable path to the number of skipped
            steps in which that variable's gradient was not finite.

    Raises:
        TypeError: If `inner_optimizer` is no Keras 3 optimizer, or a setting
            is not a number.
        ValueError: If a setting is out of range, contradicts another, or
            belongs to the inner optimizer; under a distribution strategy
            that cannot skip a step on all replicas; if `reduce_dtype` is
            given under JAX, whose compiler places the sum.

    Examples:
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> optimizer = LossScaleOptimizer(keras.optimizers.Adam(1e-3))
        >>> model.compile(optimizer, loss="mse")
        >>> history = model.fit(ops.ones((4, 2)), ops.ones((4, 1)), verbose=0)
        >>> optimizer.loss_scale, optimizer.skipped_steps
        (32768.0, 0)

    In a loop of your own this optimizer takes gradients of the scaled loss.
    (A Keras optimizer that nobody wrapped takes those of the loss, and skips
    as well while a 16-bit policy is set.) Give them to `apply` as they are:

        with tf.GradientTape() as tape:
            loss = compute_loss()
            scaled = optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, model.trainable_variables)
        applied = optimizer.apply(grads, model.trainable_variables)

    To clip them yourself, in place of the last line:

        grads = optimizer.unscale_gradients(grads)
        grads, norm = tf.clip_by_global_norm(grads, 1.0)
        applied = optimizer.apply(
            grads, model.trainable_variables, unscaled=True
        )
    """

    built: bool

    def __init__(
        self,
        inner_optimizer: str | keras.optimizers.Optimizer,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        *,
        loss_scale: Any = "dynamic",
        reduce_dtype: str | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not kwargs.pop("dynamic", True):
            raise ValueError(
                "`dynamic=False` is an argument of the old tf.keras. For a "
                "fixed scale write LossScaleOptimizer(optimizer, loss_scale="
                "128.0). (Keras says to set `loss_scale_factor` on the inner "
                "optimizer; that applies steps that are not finite.)"
            )
        settings.refuse_misspelt(kwargs)
        leader = None
        if isinstance(loss_scale, LossScaleOptimizer):
            leader, loss_scale = loss_scale, loss_scale.rule
        rule = settings.loss_scale_rule(
            loss_scale, initial_scale, dynamic_growth_steps
        )
        inner_optimizer = settings.inner_optimizer(inner_optimizer)
        reduce_dtype = settings.reduce_dtype(reduce_dtype, rule)
        replicas.check_strategy()
        super().__init__(
            inner_optimizer,
            initial_scale=float(rule.init()[0]),
            dynamic_growth_steps=getattr(rule, "growth_steps", None),
            name=name,
            **kwargs,
        )
        self.reduce_dtype = reduce_dtype
        self.in_guarded_step = False
        # Whether `compile` put it on, so that a loop may know nothing of it.
        self.unasked = self._told_of_unscaled = False
        self._gradient_norm: keras.Variable | None = None
        # What `apply_gradients` is given, and whether it was given scaled ones.
        self._next_are_true = self._applied_scaled = False
        # The trace in which gradients were divided that may yet be applied.
        self._divided_in: Any = None
        # Who shares a scale may scale another's losses.
        self._use: _Use = leader._use if leader else _Use()
        self._create_state(rule, leader)

    @property
    def loss_scale(self) -> Any:
        """The scale in force: a float, or a tensor in a compiled function."""
        variables = self._state_variables()
        if not all(map(_has_value_here, variables)):
            return self.current_scale()
        # NumPy cannot read a mirrored value inside a strategy's scope.
        state = self._state_type(*map(_host, variables))
        return float(self.rule.current(state))

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        wanted = np.float32(_arguments.positive("loss_scale", value))
        state = self.rule.init()._replace(scale=wanted)
        if float(self.rule.current(state)) != wanted:
            raise ValueError(
                f"{self.rule!r} does not allow this loss scale. "
                f"Received: loss_scale={value!r}."
            )
        self._assign_state(state)

    @property
    def skipped_steps(self) -> int:
        """Steps not applied so far; reading it waits for the device."""
        return int(_host(self._skipped_steps))

    @property
    def consecutive_skips(self) -> int:
        """Steps not applied since the last that was; waits for the device."""
        return int(_host(self._consecutive_skips))

    @property
    def overflow_counts(self) -> dict[str, int]:
        """Skipped steps per variable; reading it waits for the device."""
        if not self.built:
            return {}
        counts = _host(self._overflow_counts).tolist()
        paths = [getattr(v, "path", v.name) for v in self.model_variables]
        return dict(zip(paths, counts, strict=True))

    @property
    def gradient_norm(self) -> float:
        """Norm of the last applied step's true gradients, before clipping.

        NaN before `keep_gradient_norm` was called and a step applied; reading
        it waits for the device.
        """
        kept = self._gradient_norm
        return float("nan") if kept is None else float(_host(kept))

    def keep_gradient_norm(self) -> bool:
        """Lets each step note the norm of its gradients in `gradient_norm`.

        Call it before the first step: a step that is compiled already goes on
        without. It reads every gradient once more. Under a `tf.distribute`
        strategy it is the norm of the sum over all replicas.

        Returns:
            Bool, whether it was not kept before.

        Raises:
            ValueError: If an optimizer inside accumulates gradients.

        Examples:
            >>> optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0)
            >>> optimizer.keep_gradient_norm()
            True
            >>> weight = keras.Variable([0.0, 0.0])
            >>> grads = [optimizer.scale_loss(ops.array([3.0, 4.0]))]
            >>> bool(optimizer.apply(grads, [weight]))
            True
            >>> optimizer.gradient_norm
            5.0
        """
        for each in optimizers.with_nested(self.inner_optimizer):
            steps = getattr(each, "gradient_accumulation_steps", None)
            if steps is not None:
                raise ValueError(
                    "`gradient_norm` cannot be kept where gradients are "
                    "accumulated: an update takes the mean of several "
                    "batches, and none of theirs is its norm. Received: "
                    f"gradient_accumulation_steps={steps!r} in {each.name!r}. "
                    "Leave out one of the two."
                )
        if self._gradient_norm is not None:
            return False
        self._gradient_norm = self.add_variable(
            shape=(),
            initializer=keras.initializers.Constant(float("nan")),
            dtype="float32",
            name="gradient_norm",
        )
        return True

    def check_health(self, max_consecutive_skips: int = 50) -> None:
        """Raises if training is stuck; call it now and then in a long loop.

        Args:
            max_consecutive_skips: Integer. Defaults to `50`: the scale falls
                from its ceiling to its floor in 24 steps.

        Raises:
            LossScaleError: If two steps in a row are skipped and the scale is
                at its floor, or that many anywhere. It names the variables
                whose gradients were not finite and says what to change.
        """
        limit = _arguments.count("max_consecutive_skips", max_consecutive_skips)
        skips, rule = self.consecutive_skips, self.rule
        is_dynamic = isinstance(rule, rules.DynamicLossScale)
        floor = rule.lowest_scale if is_dynamic else 0.0
        # One at the floor is a bad batch; another in a row no scale can save.
        if skips > 1 and self.loss_scale <= floor:
            where = f"The loss scale has reached its floor, {floor:g}"
        elif skips >= limit:
            where = f"The loss scale is {self.loss_scale:g}"
        else:
            return
        raise _errors.LossScaleError(
            f"{where}, and the last {skips} step(s) were skipped: their "
            "gradients were not finite. No update is being applied.\n"
            f"{_named(self.overflow_counts)}\n{_ADVICE}"
        )

    @compilation.untouched
    def scale_loss(self, loss: Any) -> Any:
        """Multiplies a loss by the loss scale, in float32 or wider.

        Args:
            loss: Scalar tensor, number, or a nest of them.

        Returns:
            The scaled loss, of the same structure; float32 where it was
            16-bit, since a float16 loss would overflow at once.

        Raises:
            ValueError: If the loss was scaled already, or if `jax.jit` would
                make a constant of the scale.

        Examples:
            >>> optimizer = LossScaleOptimizer("sgd", loss_scale=8.0)
            >>> float(optimizer.scale_loss(0.5))
            4.0
        """
        self._next_are_true, self._divided_in = False, None
        return self._scaled(loss)

    @compilation.untouched
    def current_scale(self) -> Any:
        """Returns the scale as a float32 scalar tensor, not copied to host.

        A train step that asks for it is taken to multiply its loss by it,
        unless `compile` has put this optimizer on by itself.

        Raises:
            ValueError: If `jax.jit` would make a constant of it.

        Examples:
            >>> float(LossScaleOptimizer("sgd", 64.0).current_scale())
            64.0
        """
        if not self.unasked:
            self._use.note_in_step()
        return self._scale_here()

    def _scale_here(self) -> Any:
        if not self._is_constant and any(
            map(compilation.becomes_constant, self._state_variables())
        ):
            raise ValueError(
                "JAX is compiling this function, and the values of "
                "`optimizer.variables` are none of its arguments: the loss "
                "scale would stay what it is now. Make them an argument "
                "`values`, and write `with keras.StatelessScope("
                "zip(optimizer.variables, values)):` around the call of "
                f"{self.name!r}'s `scale_loss`, `unscale_gradients`, "
                "`current_scale` or `loss_scale`."
            )
        return self.rule.current(self.state())

    def placing(self) -> Any:
        """Returns where gradients are placed inside a model: 1.0 at first.

        It moves as the loss scale does, a factor of its first value: float, or
        a float32 scalar tensor, not copied to the host.
        """
        if self._is_constant:
            return 1.0
        return self.rule.current(self.state()) / self.rule.init()[0]

    @property
    def _is_constant(self) -> bool:
        return isinstance(self.rule, rules.FixedLossScale | rules.NoLossScale)

    @compilation.untouched
    def unscale_gradients(self, grads: Sequence) -> list:
        """Divides gradients by the loss scale, for clipping or logging.

        To apply them, write `apply(grads, variables, unscaled=True)`. What is
        not finite comes back as NaN, an infinity too, so that clipping by
        value cannot hide it. Under a `tf.distribute` strategy these are this
        replica's gradients; to clip the sum over all replicas, give
        `global_clipnorm` to the inner optimizer instead.

        Args:
            grads: Scaled gradients; `None` where there is none.

        Returns:
            A list of the true gradients, float32 where they were 16-bit.

        Raises:
            ValueError: If one was divided already, or if `jax.jit` would make
                a constant of the scale.

        Examples:
            >>> optimizer = LossScaleOptimizer("sgd", loss_scale=8.0)
            >>> loss = optimizer.scale_loss(2.0)
            >>> true = optimizer.unscale_gradients([ops.array([loss])])
            >>> float(true[0][0])
            2.0
        """
        self._divided_in = compilation.trace()
        return self._unscaled(grads)

    @compilation.untouched
    def apply(
        self,
        grads: Sequence,
        trainable_variables: Sequence[keras.Variable] | None = None,
        *,
        unscaled: bool = False,
    ) -> Any:
        """Applies gradients if all are finite; else skips the step.

        Args:
            grads: Gradients of the scaled loss, one per variable, dense or
                `tf.IndexedSlices`; `None` where there is none.
            trainable_variables: The variables. Defaults to those that the
                optimizer was built with; on the first call they build it.
            unscaled: Bool, whether the gradients are divided by the loss
                scale already, as by `unscale_gradients`. Defaults to `False`:
                the step divides them, where that costs least.

        Returns:
            Boolean scalar tensor, not copied to host: was the step applied?

        Raises:
            ValueError: If there is no gradient at all, a variable is unknown,
                `unscaled` is surely wrong, or the call stands outside of
                `strategy.run` or inside `jax.jit`.

        Examples:
            >>> optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0)
            >>> weight = keras.Variable([1.0])
            >>> optimizer.build([weight])
            >>> grads = [optimizer.scale_loss(ops.array([3.0]))]
            >>> clipped = ops.clip(optimizer.unscale_gradients(grads)[0], -1, 1)
            >>> bool(optimizer.apply([clipped], [weight], unscaled=True))
            True
            >>> float(weight[0])
            0.0
        """
        grads = list(grads)
        if not grads:
            return ops.convert_to_tensor(False)
        variables = self._variables_of(grads, trainable_variables)
        unscaled = self._takes_true(grads, unscaled)
        if keras.backend.backend() == "tensorflow":
            from tfmix.scaling.step import tensorflow_step

            return tensorflow_step.apply(self, grads, variables, unscaled)
        if compilation.becomes_constant(self._skipped_steps):
            raise ValueError(
                "`apply` cannot assign variables inside a function that JAX "
                "compiles. Write `optimizer.stateless_apply("
                "optimizer_variables, grads, trainable_variables)` there."
            )
        from tfmix.scaling.step import jax_step

        return jax_step.apply(self, grads, variables, unscaled)

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
            ValueError: If the optimizer is not built, the counts differ,
                `unscaled` is surely wrong, or the backend is TensorFlow.
        """
        if keras.backend.backend() != "jax":
            raise ValueError(
                "`stateless_apply` needs the JAX backend; under TensorFlow "
                "call `optimizer.apply(grads, variables)`. Received: "
                f"backend={keras.backend.backend()!r}."
            )
        if not self.built:
            raise ValueError(
                "`stateless_apply` needs a built optimizer. Call "
                "`optimizer.build(model.trainable_variables)` first."
            )
        from tfmix.scaling.step import jax_step

        grads = list(grads)
        unscaled = self._takes_true(grads, unscaled)
        slots, values = list(optimizer_variables), list(trainable_variables)
        return jax_step.stateless_apply(self, slots, grads, values, unscaled)

    @compilation.untouched
    def apply_gradients(self, grads_and_vars: Iterable) -> Any:
        """Does what `apply` does with pairs of a gradient and its variable.

        As in Keras the gradients are scaled ones; as in tf.keras they are
        true ones if `get_unscaled_gradients` was called since `scale_loss`.

        Args:
            grads_and_vars: Pairs of a gradient and a variable.

        Returns:
            The inner optimizer's count of iterations, as Keras does.

        Raises:
            ValueError: If `unscale_gradients` was called since `scale_loss`,
                and it cannot be told which gradients these are.
        """
        pairs = list(grads_and_vars)
        grads = [pair[0] for pair in pairs]
        notes = _notes(grads)
        unscaled = self._next_are_true or _TRUE in notes
        if not (unscaled or notes) and self._divided_in is not None:
            raise ValueError(
                "`unscale_gradients` was called in this step, and "
                "`apply_gradients` cannot tell scaled gradients from "
                f"divided ones. {_APPLY}"
            )
        if not unscaled and not self.in_guarded_step:
            self._applied_scaled = True
        self.apply(grads, [pair[1] for pair in pairs], unscaled=unscaled)
        return self.iterations

    @compilation.untouched
    def get_scaled_loss(self, loss: Any) -> Any:
        """Does what `scale_loss` does, by its old tf.keras name."""
        return self._scaled(loss)

    @compilation.untouched
    def get_unscaled_gradients(self, grads: Sequence) -> list:
        """Divides gradients for `apply_gradients`, as the old tf.keras did.

        `apply_gradients` then takes true gradients until `scale_loss` is
        called again. Arguments and result are those of `unscale_gradients`.

        Raises:
            ValueError: If `apply_gradients` was given scaled gradients in a
                loop before: a compiled step would go on dividing.
        """
        if self._applied_scaled:
            raise ValueError(
                "`apply_gradients` was called with scaled gradients before, "
                "so that a step already compiled would divide these once "
                "more. To log or to clip, write `optimizer.unscale_gradients("
                f"grads)`. {_APPLY}"
            )
        self._next_are_true = True
        return self._unscaled(grads)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the slots and counts for a model's trainable variables.

        Args:
            variables: The variables, in the order of the gradients to come. A
                second call changes nothing.
        """
        if self.built:
            return
        variables = list(variables)
        self.inner_optimizer.build(variables)
        self._overflow_counts = self._counter("overflow_counts", len(variables))
        optimizers.remember(self, variables)
        self.built = True

    def save_own_variables(self, store: Any) -> None:
        """Writes the whole state, the inner optimizer's included."""
        # Before it is built the inner one has settings alone, which its
        # config holds as well.
        inner = self.inner_optimizer.variables if self.built else ()
        for variable in self._saved_variables():
            store[_OWN + variable.name] = np.asarray(variable.numpy())
        for position, variable in enumerate(inner):
            store[f"{_INNER}{position}"] = np.asarray(variable.numpy())

    def load_own_variables(self, store: Any) -> None:
        """Reads the whole state; also one that Keras's class has written.

        An optimizer that is not built, or a file without state or with that
        of other variables, gets a warning, as in Keras: weights can be loaded
        into any model.

        Args:
            store: What Keras opens of a file: places, as strings, to arrays.

        Raises:
            ValueError: If it does not fit. Nothing is changed then.
        """
        keys = list(store.keys())
        # Neither was built: there are no slots on either side.
        alike = all(key.startswith(_OWN) for key in keys)
        counts = _OWN + "overflow_counts"
        saved = len(store[counts]) if counts in keys else 0
        other = self.built and saved not in (0, len(self.model_variables))
        fits = keys and (self.built or alike) and not other
        if fits and not _is_unbuilt(store):
            inner = self.inner_optimizer.variables if self.built else []
            _load(store, self._saved_variables(), inner)
            return
        reason = "the file holds no optimizer state"
        if other:
            reason = (
                f"it was saved for {saved} trainable variables, and "
                f"{len(self.model_variables)} are trainable now; to go on "
                "with it, change what is trainable after loading"
            )
        if not self.built:
            reason = (
                "it is not built yet; to restore its state as well, call "
                "`optimizer.build(model.trainable_variables)` before loading"
            )
        _messages.warn(
            "the state of optimizer %r was not restored: %s.", self.name, reason
        )

    def get_config(self) -> dict:
        """Returns the constructor's arguments, in Keras's form if they fit."""
        serialize = keras.saving.serialize_keras_object
        inner = serialize(self.inner_optimizer)
        config = {"name": self.name, "inner_optimizer": inner}
        keras_form = {
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
        }
        # The rule may differ from the default in more.
        if type(self.rule) is rules.DynamicLossScale and self.rule == (
            settings.loss_scale_rule("dynamic", *keras_form.values())
        ):
            config |= keras_form
        else:
            config["loss_scale"] = serialize(self.rule)
        if self.reduce_dtype is not None:
            config["reduce_dtype"] = self.reduce_dtype
        if self._leader_name is not None:
            config["shared_scale_of"] = self._leader_name
        if self.unasked:
            config["unasked"] = True
        return config

    @classmethod
    def from_config(
        cls, config: dict, custom_objects: Any = None
    ) -> "LossScaleOptimizer":
        """Returns the optimizer that `get_config` described."""
        config = dict(config)
        for key in ("inner_optimizer", "loss_scale"):
            if isinstance(config.get(key), dict):
                config[key] = keras.saving.deserialize_keras_object(
                    config[key], custom_objects=custom_objects
                )
        settings.drop_unsupported(config)
        if config.pop("guarded", False):
            # The model is compiled with it next, and guarded by that.
            compile_method.stand_by()
        leader_name = config.pop("shared_scale_of", None)
        unasked = config.pop("unasked", False)
        optimizer = cls(**config)
        optimizer.unasked = unasked
        if leader_name is not None:
            _messages.warn(
                "the optimizer %r shared the loss scale of %r and has one of "
                "its own now. To share it again, write "
                "tfmix.LossScaleOptimizer(optimizer.inner_optimizer, "
                "loss_scale=other), where `other` is %r.",
                optimizer.name,
                leader_name,
                leader_name,
            )
        return optimizer

    @property
    def own_variables(self) -> list[keras.Variable]:
        """The variables of the loss scale and its counters."""
        return optimizers.own_variables(self)

    @property
    def model_variables(self) -> list[keras.Variable]:
        """The model's variables that the optimizer was built with."""
        return optimizers.remembered(self)

    def state(self) -> Any:
        """Returns the rule's state as its named tuple of variables' values."""
        return self._state_type(*(v.value for v in self._state_variables()))

    def record(self, state: Any, applied: Any) -> None:
        """Moves the loss scale and the counters on; `state` is from before.

        Args:
            state: What `state()` returned before the step.
            applied: Bool or boolean scalar tensor.
        """
        after = self.rule.update(state, applied)
        if self._leader_name is not None:
            # Of optimizers that share a scale each lowers it, one raises it.
            pairs = zip(state, after, strict=True)
            after = [rules.select(applied, *pair) for pair in pairs]
        self._assign_state(after)
        more = rules.select(applied, 0, self._consecutive_skips + 1)
        self._consecutive_skips.assign(more)
        if applied is not True:
            skipped = rules.select(applied, 0, 1)
            self._skipped_steps.assign(self._skipped_steps + skipped)

    def count_overflows(self, bad: Any, variables: Sequence) -> None:
        """Counts the variables whose flag in `bad` is set."""
        counts = self._overflow_counts
        bad = ops.cast(bad, counts.dtype)
        rows = optimizers.positions(self, variables)
        if rows != list(range(len(self.model_variables))):
            # A step on some of the variables, or in another order.
            column = np.reshape(rows, (-1, 1))
            bad = ops.scatter(column, bad, tuple(counts.shape))
        counts.assign(counts + bad)

    def note_gradient_norm(
        self, true: Sequence, variables: Sequence, applied: Any
    ) -> None:
        """Keeps the norm of an applied step's true gradients, if asked to."""
        if self._gradient_norm is None:
            return
        norm = unscale.norm(true, variables)
        norm = rules.select(applied, norm, self._gradient_norm.value)
        self._gradient_norm.assign(norm)

    def last_step_applied(self) -> Any:
        """Returns a boolean scalar tensor; nothing is copied to the host."""
        return ops.logical_not(self.skipped_in_a_row(1))

    def skipped_in_a_row(self, steps: int) -> Any:
        """Returns a boolean scalar tensor: so many skips or more, just now?"""
        return ops.greater_equal(self._consecutive_skips.value, steps)

    def _scaled(self, loss: Any) -> Any:
        losses = tree.flatten(loss)
        if any(global_state.note(each, _LOSS) for each in losses):
            raise ValueError(
                "This loss was scaled already, and would be scaled twice. "
                f"Received: loss={loss!r}. Call `scale_loss` once, on the "
                "loss itself."
            )
        scale = self._scale_here()
        self._use.note()

        def scaled(value: Any) -> Any:
            value = unscale.to_float32(ops.convert_to_tensor(value))
            value = ops.multiply(value, ops.cast(scale, value.dtype))
            global_state.put_note(value, _LOSS, True)
            return value

        return tree.map_structure(scaled, loss)

    def _unscaled(self, grads: Sequence) -> list:
        grads = list(grads)
        if _TRUE in _notes(grads):
            raise ValueError(
                "These gradients were divided by the loss scale already, and "
                "would be divided twice. Call `unscale_gradients` once, on "
                "what the gradient tape or jax.grad returns."
            )
        variables: list = self.model_variables
        if len(variables) != len(grads):
            variables = [None] * len(grads)
        scale = None if self._are_true() else self._scale_here()
        true = unscale.true_gradients(grads, variables, scale)
        true = [
            after if after is before else unscale.without_infinities(after)
            for before, after in zip(grads, true, strict=True)
        ]
        for before, after in zip(grads, true, strict=True):
            if after is not before:
                global_state.put_note(before, _GRADIENT, _SCALED)
                global_state.put_note(after, _GRADIENT, _TRUE)
        return true

    def _variables_of(self, grads: list, trainable_variables: Any) -> list:
        """Returns the gradients' variables; builds the optimizer on them."""
        if trainable_variables is not None:
            variables = list(trainable_variables)
            if not self.built:
                self.build(variables)
            optimizers.recognised(self, variables)
        elif self.built:
            variables = self.model_variables
        else:
            raise ValueError(
                "The optimizer is not built yet, so it must be told which "
                "variables the gradients belong to. Write "
                "optimizer.apply(grads, model.trainable_variables)."
            )
        if len(grads) != len(variables):
            raise ValueError(
                "There must be one gradient (or None) for each variable. "
                f"Received: {len(grads)} gradients for {len(variables)} "
                "variables."
            )
        if all(gradient is None for gradient in grads):
            raise ValueError(
                "No gradients provided for any variable: all are None. Is the "
                "loss computed from the model's variables, inside the "
                "gradient tape?"
            )
        return variables

    def _takes_true(self, grads: Sequence, unscaled: bool) -> bool:
        """Refuses gradients that `unscaled` is surely wrong for.

        Returns:
            Whether to take them as they are.
        """
        notes = _notes(grads)
        if not unscaled and _TRUE in notes:
            raise ValueError(
                "These gradients come from `unscale_gradients`, and would be "
                "divided by the loss scale twice. Write optimizer.apply(grads, "
                "variables, unscaled=True)."
            )
        if unscaled and _SCALED in notes:
            raise ValueError(
                "These gradients were given to `unscale_gradients` and are "
                "still scaled, so the update would be too large by the loss "
                "scale. Give its result to `apply`, or leave out unscaled=True."
            )
        divided_in, self._divided_in = self._divided_in, None
        if unscaled or self._are_true():
            return True
        new = _SCALED not in notes and divided_in is not None
        if new and divided_in == compilation.trace():
            _errors.warn(
                "`unscale_gradients` was called in this step, and now other "
                "gradients than it was given are divided by the loss scale. "
                "That is right for sums of what it was given; if they were "
                "made of its result, as by clipping, write "
                "optimizer.apply(grads, variables, unscaled=True)."
            )
        return False

    def _are_true(self) -> bool:
        """Says whether gradients are true ones: nobody scaled their loss."""
        scaled_in_step = _scaled_in_step.get()
        if scaled_in_step is not None:
            return id(self._use) not in scaled_in_step
        if self._use.in_loops or self._is_one:
            return False
        if not self.unasked and not self._told_of_unscaled:
            self._told_of_unscaled = True
            _errors.warn(
                "The gradients are divided by the loss scale, but the loss was "
                "not multiplied by it, so every update is too small by that "
                "factor. Take the gradients of the scaled loss: `scaled = "
                "optimizer.scale_loss(loss)` inside the tape, then "
                "`tape.gradient(scaled, ...)`; or, if gradients need no "
                "scaling, as those of a Keras model under a tfmix policy, "
                "write optimizer.apply(grads, variables, unscaled=True)."
            )
        return self.unasked

    @property
    def _is_one(self) -> bool:
        # A fixed scale of 1 changes nothing either.
        return self._is_constant and self.rule.lowest_scale == 1.0

    def _create_state(self, rule: rules.LossScale, leader: Any) -> None:
        """Creates variables for what the rule remembers, or uses a leader's."""
        # From the start: a function compiled before the first step reads it.
        self.rule = rule
        self._leader_name = leader.name if leader else None
        initial = rule.init()
        self._state_type = type(initial)
        # Keras's order, so that its files can be read by position.
        fields = sorted(initial._fields, key=lambda name: name != "good_steps")
        for field in fields:
            if leader is None:
                value = getattr(initial, field)
                whole = isinstance(value, numbers.Integral)
                variable = self.add_variable(
                    shape=np.shape(value),
                    dtype="int" if whole else "float32",
                    initializer=keras.initializers.Constant(value),
                    name=_KERAS_NAMES.get(field, field),
                )
            else:
                variable = vars(leader)[_attribute(field)]
            # Keras tracks what is assigned, and what it has made only once.
            setattr(self, _attribute(field), variable)
        self._skipped_steps = self._counter("skipped_steps")
        self._consecutive_skips = self._counter("consecutive_skips")

    def _counter(self, name: str, *shape: int) -> keras.Variable:
        return self.add_variable(shape, "zeros", "int32", name=name)

    def _saved_variables(self) -> list[keras.Variable]:
        # A norm is no state: a file is the same with it and without.
        own = self.own_variables
        return [each for each in own if each is not self._gradient_norm]

    def _state_variables(self) -> list[keras.Variable]:
        return [vars(self)[_attribute(n)] for n in self._state_type._fields]

    def _assign_state(self, state: Any) -> None:
        for variable, value in zip(self._state_variables(), state, strict=True):
            variable.assign(value)


@contextlib.contextmanager
def guarded_step(optimizer: LossScaleOptimizer) -> Iterator[None]:
    """Tells `apply` that the step around it leaves no trace if skipped."""
    optimizer.in_guarded_step = True
    try:
        with train_step():
            yield
    finally:
        optimizer.in_guarded_step = False


@contextlib.contextmanager
def train_step() -> Iterator[None]:
    """Lets `apply` take true gradients, unless the step around it scales."""
    token = _scaled_in_step.set(set())
    try:
        yield
    finally:
        _scaled_in_step.reset(token)


class _Use:
    """Whether losses are multiplied by a scale, for all who share it."""

    in_loops = False

    def note(self) -> None:
        """Notes that a loss is multiplied by the scale."""
        self.in_loops = self.in_loops or _scaled_in_step.get() is None
        self.note_in_step()

    def note_in_step(self) -> None:
        """Notes that a train step, if one is around, multiplies its loss."""
        scaled_in_step = _scaled_in_step.get()
        if scaled_in_step is not None:
            scaled_in_step.add(id(self))


def _is_unbuilt(store: Mapping) -> bool:
    """Says whether Keras's class wrote settings alone: it was not built."""
    keys = sorted(map(str, store.keys()))
    return keys == list("0123") and not any(np.ndim(store[k]) for k in keys)


def _load(store: Mapping, own: Sequence, inner: Sequence) -> None:
    """Reads a state that this class, an older one or Keras's has written."""
    # A variable that an older version did not have keeps its initial value, and
    # so does an inner optimizer that was saved before it was built.
    arrays = {str(key): np.asarray(store[key]) for key in store.keys()}
    if all(re.fullmatch(r"\d+", key) for key in arrays):
        keys = [_OWN + name for name in _KERAS_OWN]
        if len(arrays) != len(keys) + len(inner):
            # The inner optimizer's alone: a run without loss scaling can go
            # on with it. It is refused below if the count differs.
            keys = []
        keys += [f"{_INNER}{n}" for n in range(len(arrays) - len(keys))]
        arrays = {key: arrays[str(n)] for n, key in enumerate(keys)}
    targets = {_OWN + variable.name: variable for variable in own}
    is_new = all(v.numpy() == 0 for v in inner if v.name == "iteration")
    if any(key.startswith(_INNER) for key in arrays) or not is_new:
        targets |= {f"{_INNER}{n}": each for n, each in enumerate(inner)}
    missing = {key for key in targets if key.startswith(_INNER)} - set(arrays)
    surplus = set(arrays) - set(targets)
    if missing or surplus:
        raise ValueError(
            "The saved optimizer state does not fit this optimizer, whose "
            f"inner optimizer has {len(inner)} variables. Received: a state "
            f"without {sorted(missing)} and with {sorted(surplus)} besides. "
            "Load it into the optimizer it was saved from, built on the same "
            "variables (`optimizer.build(model.trainable_variables)`)."
        )
    keras_variables.assign_all(
        [targets[key] for key in arrays], [*arrays.values()]
    )


def _named(counts: Mapping[str, int]) -> str:
    # A fault spreads from the output towards the input. The counts are in the
    # order of the model and a sort is stable: of two variables with equal
    # counts the one nearer the output comes first.
    named = [(path, count) for path, count in counts.items() if count]
    named = sorted(reversed(named), key=lambda item: -item[1])
    if not named:
        return "No gradient was seen that was not finite by itself."
    lines = [
        f"  {path}: not finite in {count} skipped step(s)"
        for path, count in named[:_MOST_NAMED]
    ]
    if len(named) > _MOST_NAMED:
        lines.append(f"  and {len(named) - _MOST_NAMED} more")
    return "\n".join(["Most often, nearest the output first:", *lines])


def _attribute(field: str) -> str:
    return _KERAS_NAMES.get(field, f"_loss_scale_{field}")


def _notes(grads: Sequence) -> set[str]:
    """Returns what is noted on any of the gradients."""
    return {global_state.note(each, _GRADIENT) for each in grads} - {None}


def _has_value_here(variable: keras.Variable) -> bool:
    """Says whether a variable has a number here that is no constant later."""
    return compilation.is_host_readable(
        variable
    ) and not compilation.becomes_constant(variable)


def _host(variable: keras.Variable) -> np.ndarray:
    if not _has_value_here(variable):
        raise ValueError(
            "This function is being compiled, and counters are numbers of the "
            f"host. Received: a call that reads {variable.path!r} in it. Read "
            "`skipped_steps`, `consecutive_skips`, `overflow_counts` and "
            "`gradient_norm`, and call `check_health`, outside of the compiled "
            "function, between two steps; in it, `apply` returns whether the "
            "step takes place."
        )
    return np.asarray(ops.convert_to_numpy(variable))


_APPLY = (
    "Write `optimizer.apply(grads, variables)` for scaled gradients, or "
    "`optimizer.apply(grads, variables, unscaled=True)` for those that "
    "`unscale_gradients` returned."
)

_ADVICE = """What to change, most likely first:
  - if the loss is not finite: rows with NaN, infinity or, in float16, numbers
    beyond 65504 in the data; drop or mend them;
  - if it is finite and large, as of targets of 5e4: standardise the targets,
    y = (y - y.mean()) / y.std();
  - keep the layer named first in float32: Layer(..., dtype="float32"), and
    end the model in tfmix.float32_output(...);
  - lower the learning rate or clip: Adam(..., global_clipnorm=1.0);
  - train in "mixed_bfloat16", which has the range of float32;
  - allow a smaller scale: DynamicLossScale(min_scale=2.0**-14).
tfmix.check(model, x, y) names the layer and the line to change."""
