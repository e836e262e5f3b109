"""The optimizer applies unscaled gradients as a whole, or leaves no trace."""

import math

import keras
import numpy as np
import pytest

from tests import helpers, steps
from tfmix.autocast import global_policy
from tfmix.loss_scaling import errors, rules
from tfmix.loss_scaling import optimizer as optimizers

# These tests scale the gradients for `apply` themselves.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The gradients are divided by the loss scale"
)
Wrapped = optimizers.LossScaleOptimizer


def scaled(grads, scale):
    return [gradient * np.float32(scale) for gradient in grads]


@pytest.mark.costly
@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("name", helpers.optimizer_names())
def test_good_steps_equal_the_unwrapped_optimizer_and_bad_ones_nothing(
    name, mode
):
    if name == "Muon" and keras.version().startswith("3.12."):
        pytest.skip("Keras 3.12's own Muon fails under TensorFlow")
    bare, plain = helpers.make_optimizer(name), steps.variables()
    wrapped = Wrapped(helpers.make_optimizer(name), initial_scale=1024.0)
    ours = steps.variables()
    bare_step = steps.stepper(bare, plain, mode)
    our_step = steps.stepper(wrapped, ours, mode)
    for seed in range(3):
        grads = steps.gradients(seed)
        bare_step(grads)
        our_step(scaled(grads, wrapped.loss_scale))
        before = helpers.snapshot(ours + wrapped.inner_optimizer.variables)
        grads[seed % 2].flat[seed % 2] = [math.nan, math.inf, -math.inf][seed]
        our_step(grads)
        helpers.assert_unchanged(
            ours + wrapped.inner_optimizer.variables, before
        )
    for expected, actual in zip(plain, ours, strict=True):
        helpers.assert_close(actual, expected, "float32")
    assert wrapped.skipped_steps == 3
    assert wrapped.consecutive_skips == 1
    assert wrapped.loss_scale == 128.0
    assert int(wrapped.iterations) == 3


@pytest.mark.every_case("each row is an argument of its own, and fast")
@pytest.mark.parametrize(
    ("settings", "dtype", "gradient", "moved"),
    [
        ({"global_clipnorm": 1.0}, "float32", [3.0, 4.0], [-0.6, -0.8]),
        ({"clipnorm": 2.5}, "float32", [3.0, 4.0], [-1.5, -2.0]),
        ({"clipvalue": 3.5}, "float32", [3.0, 4.0], [-3.0, -3.5]),
        # These are below the smallest normal float16.
        ({}, "float16", [1.5 / 2**15, 0.0], [-1.5 / 2**15, 0.0]),
        ({}, "bfloat16", [1.5 / 2**15, 0.0], [-1.5 / 2**15, 0.0]),
    ],
)
def test_clipping_acts_on_gradients_unscaled_in_float32(
    settings, dtype, gradient, moved
):
    wrapped = Wrapped(keras.optimizers.SGD(1.0, **settings), 2.0**15)
    weight = keras.Variable(np.zeros(2, "float32"))
    wrapped.build([weight])
    scaled = keras.ops.cast(np.asarray(gradient) * 2.0**15, dtype)
    wrapped.apply([scaled], [weight])
    np.testing.assert_allclose(weight, moved, rtol=1e-6)


def test_overflows_are_counted_per_variable_and_blamed_nearest_the_output():
    wrapped, ours = Wrapped("sgd"), steps.variables()
    step = steps.stepper(wrapped, ours, steps.MODES[1])
    both, kernel_only = steps.gradients(0), steps.gradients(1)
    for gradient in both:
        gradient[0] = np.nan
    kernel_only[0][0] = np.inf
    step(both)
    step(steps.gradients(2))
    assert list(wrapped.overflow_counts.values()) == [1, 1]
    wrapped.check_health()
    for _ in range(3):
        step(both)
    with pytest.raises(errors.LossScaleError, match="last 3 step") as error:
        wrapped.check_health(max_consecutive_skips=3)
    message = str(error.value)
    assert message.index("bias") < message.index("kernel")
    step(kernel_only)
    with pytest.raises(errors.LossScaleError) as error:
        wrapped.check_health(max_consecutive_skips=3)
    message = str(error.value)
    assert message.index("kernel: not finite in 5") < message.index("bias")
    assert "global_clipnorm" in message
    assert ("StatelessScope" in message) == helpers.ON_JAX


@pytest.mark.parametrize("mode", steps.MODES)
def test_a_users_rule_moves_the_scale_in_every_mode(mode):
    class Thirds(rules.LossScale):
        def init(self):
            return rules.LossScaleState(np.float32(81.0))

        def update(self, state, finite):
            scale = self.current(state)
            lower = keras.ops.where(finite, scale, scale / 3)
            return state._replace(scale=lower, good_steps=state.good_steps + 1)

    wrapped, ours = Wrapped("sgd", loss_scale=Thirds()), steps.variables()
    step = steps.stepper(wrapped, ours, mode)
    scales = []
    for factor in (1.0, np.inf, 1.0, np.nan):
        step(scaled(steps.gradients(0), factor))
        scales.append(round(wrapped.loss_scale))
    assert scales == [81, 27, 27, 9]
    assert int(wrapped.step_counter.numpy()) == 4


def test_the_wrapper_has_the_attributes_of_the_inner_optimizer():
    inner = keras.optimizers.AdamW(
        0.01, beta_1=0.7, clipnorm=3.0, weight_decay=0.02, use_ema=True
    )
    wrapped = Wrapped(inner)
    assert wrapped.beta_1 == 0.7
    assert (wrapped.clipnorm, wrapped.weight_decay) == (3.0, 0.02)
    assert wrapped.use_ema is True
    wrapped.learning_rate = 0.5
    wrapped.beta_1 = 0.6
    wrapped.clipnorm = 2.0
    assert float(inner.learning_rate) == 0.5
    assert (inner.beta_1, inner.clipnorm) == (0.6, 2.0)
    ours = steps.variables()
    wrapped.exclude_from_weight_decay(var_names=["bias"])
    wrapped.build(ours)
    assert inner._use_weight_decay(ours[0])
    assert not inner._use_weight_decay(ours[1])
    assert len(wrapped.variables) == 9 + len(inner.variables)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = wrapped.no_such_thing


@pytest.mark.parametrize(
    "arguments",
    [
        {"initial_scale": 64.0, "dynamic_growth_steps": 5},
        {"loss_scale": rules.DynamicLossScale(64.0, hysteresis=2)},
        {"loss_scale": 64.0},
        {"loss_scale": rules.NoLossScale()},
    ],
)
def test_a_config_brings_back_the_same_optimizer(arguments):
    wrapped = Wrapped(keras.optimizers.SGD(0.25), name="mine", **arguments)
    config = wrapped.get_config()
    copied = dict(config)
    again = Wrapped.from_config(config)
    assert config == copied
    assert again.rule == wrapped.rule
    assert again.get_config() == config
    assert again.name == "mine"
    serialized = keras.optimizers.serialize(wrapped)
    loaded = keras.optimizers.deserialize(serialized)
    assert type(loaded) is Wrapped
    assert loaded.rule == wrapped.rule


def test_the_scale_can_be_set_by_hand_within_its_bounds():
    wrapped = Wrapped("sgd")
    wrapped.loss_scale = 256.0
    assert wrapped.loss_scale == 256.0
    for value in (0.0, math.nan, 2.0**30, 0.5):
        with pytest.raises(ValueError, match="loss_scale="):
            wrapped.loss_scale = value
    assert wrapped.loss_scale == 256.0
    with pytest.raises(ValueError, match="does not allow"):
        Wrapped("sgd", loss_scale=8.0).loss_scale = 16.0


def keras_own():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())


# The arguments, and what the error says.
WRONG_VALUES = [
    ((Wrapped("adam"),), {}, "divided out twice"),
    ((keras_own(),), {}, "inner_optimizer"),
    (("adamm",), {}, "adamm"),
    ((), {"init_scale": 2.0}, "`init_scale`"),
    (("sgd", -8.0), {}, "`initial_scale`.*initial_scale=-8.0"),
    (("sgd", None, 0), {}, "dynamic_growth_steps=0"),
    ((), {"loss_scale": math.inf}, "loss_scale=inf"),
    ((), {"loss_scale": "fix"}, "'fix'"),
    ((), {"loss_scale": None}, "=None"),
    (("sgd", 8.0), {"loss_scale": 8.0}, "would be ignored"),
    ((), {"clipnorm": 1.0}, "on the `inner_optimizer`"),
    ((), {"colour": 1}, "colour"),
]
WRONG_TYPES = [
    ((keras.optimizers.Adam,), {}, r"such as keras.optimizers.Adam\(\)"),
    ((3,), {}, "inner_optimizer=3"),
    (("sgd", "x"), {}, "initial_scale='x'"),
    (("sgd", None, 2.5), {}, "dynamic_growth_steps=2.5"),
    ((), {"loss_scale": [1]}, "must be a number"),
]


@pytest.mark.parametrize(
    ("error", "arguments", "settings", "message"),
    [(ValueError, *row) for row in WRONG_VALUES]
    + [(TypeError, *row) for row in WRONG_TYPES],
)
def test_wrong_arguments_say_what_to_write(error, arguments, settings, message):
    with pytest.raises(error, match=message):
        Wrapped(*(arguments or ["adam"]), **settings)


def test_a_fixed_factor_on_the_inner_optimizer_is_not_lost_in_silence(said):
    inner = keras.optimizers.SGD(loss_scale_factor=512.0)
    wrapped = Wrapped(inner)
    assert "loss_scale=512.0" in said[0]
    with pytest.raises(ValueError, match="takes no second loss scale"):
        wrapped.loss_scale_factor = 2.0


def test_kerass_loss_scale_is_not_made_around_ours():
    message = "no second loss scale.*without another LossScaleOptimizer"
    with pytest.raises(ValueError, match=message):
        keras.optimizers.LossScaleOptimizer(Wrapped("sgd"))


def test_apply_refuses_what_it_cannot_place():
    wrapped, ours = Wrapped("sgd"), steps.variables()
    grads = list(map(keras.ops.convert_to_tensor, steps.gradients(0)))
    with pytest.raises(ValueError, match="not built yet"):
        wrapped.apply(grads)
    wrapped.build(ours)
    with pytest.raises(ValueError, match="2 gradients for 1"):
        wrapped.apply(grads, ours[:1])
    with pytest.raises(ValueError, match="(?i)no gradients provided"):
        wrapped.apply([None, None], ours)
    with pytest.raises(ValueError, match="Unknown variable"):
        wrapped.apply(grads, steps.variables())
    wrapped.apply([])
    assert wrapped.skipped_steps == 0
    # Only `apply_gradients` returns a number, as in Keras.
    assert wrapped.apply(grads, ours) is None
    assert int(wrapped.apply_gradients(zip(grads, ours, strict=True))) == 2


@helpers.requires_backend("jax")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_layer_made_trainable_after_compile_gets_keras_error(policy, eager):
    global_policy.set_global_policy(policy)
    frozen = keras.layers.Dense(2, trainable=False)
    layers = [keras.Input((3,)), frozen, keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse", run_eagerly=eager)
    data = {"x": np.ones((4, 3)), "y": np.ones((4, 1)), "verbose": 0}
    model.fit(**data)
    frozen.trainable = True
    with pytest.raises(ValueError, match="was built with 2 variables"):
        model.fit(**data)
