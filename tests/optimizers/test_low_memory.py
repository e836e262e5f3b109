"""Training with 8-bit optimizer state matches float32 state."""

import itertools

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers, steps
from tests.optimizers.sixteen_bit import X, coded, fit, model_of
from tfmix.optimizers import low_memory

MASTERS = tfmix.optimizers.MasterWeightOptimizer
# Ways to keep the bits that bfloat16 variables lack.
PURE = {
    "masters": MASTERS,
    "stochastic": tfmix.optimizers.BFloat16Optimizer,
}


def adam(**settings):
    return lambda: keras.optimizers.Adam(1e-3, **settings)


MAKERS = {
    "adam": adam(amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.01),
    "lion": lambda: keras.optimizers.Lion(1e-4),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-3, momentum=0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "averages": adam(use_ema=True, ema_momentum=0.9),
    "accumulation": adam(gradient_accumulation_steps=2),
    "clipping": adam(global_clipnorm=1.0),
}


def low(name="adam"):
    return low_memory.LowMemoryOptimizer(MAKERS[name](), seed=3)


# Several ways take half a minute.
QUICK = {
    (name, steps.MODES[-1])
    for name in ("adam", "averages", "masters", "stochastic")
}


@pytest.mark.parametrize(
    ("name", "mode"),
    helpers.quick_are(QUICK, itertools.product([*MAKERS, *PURE], steps.MODES)),
)
def test_training_matches_float32_state(name, mode):
    if mode == "eager" and name not in ("adam", "momentum"):
        pytest.skip("the mode matters for compilation, not for the state")
    if name in PURE:
        policy, plain = "bfloat16", PURE[name](MAKERS["adam"]())
        optimizer = PURE[name](low())
    else:
        policy, plain, optimizer = "float32", MAKERS[name](), low(name)
    losses = fit(model_of(optimizer, policy, mode))
    expected = fit(model_of(plain, policy, mode))
    assert losses[-1] < losses[0]
    within = 0.1 if name in PURE else 0.05
    np.testing.assert_allclose(losses, expected, rtol=within)
    paths = [variable.path for variable in coded(optimizer)]
    assert paths
    if name in ("averages", "accumulation"):
        assert not any("average" in p or "accumulator" in p for p in paths)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("make", "dtype", "total"),
    [
        (lambda low: low, "float32", 4),
        (PURE["stochastic"], "bfloat16", 2),
    ],
)
def test_both_moments_of_adam_take_two_bytes_per_weight(make, dtype, total):
    keras.backend.clear_session()
    kernel = keras.Variable(np.ones((512, 512)), dtype=dtype)
    optimizer = make(low_memory.LowMemoryOptimizer("adam"))
    optimizer.build([kernel])
    arrays = helpers.snapshot([kernel, *optimizer.variables])
    size = sum(array.nbytes for array in arrays if array.ndim)
    # A row of the kernel shares a scale.
    assert size / 512**2 == total + 2 + 2 * 4 / 512


def test_each_step_rounds_with_new_numbers():
    variable = keras.Variable(np.zeros((64, 64), "float32"))
    optimizer = low("momentum")
    optimizer.build([variable])
    (slot,) = coded(optimizer)
    seen = []
    for _ in range(2):
        # The same step is repeated, only with another number.
        slot.assign(np.zeros((64, 64), slot.dtype))
        optimizer.apply([keras.ops.convert_to_tensor(X)], [variable])
        seen.append(keras.ops.convert_to_numpy(slot).astype(int))
    one, later = seen
    assert np.any(one != later)
    # The gradients were equal, so codes differ by one at most.
    assert np.abs(one - later).max() <= 1


@pytest.mark.slow
def test_small_variables_and_embeddings_keep_float32_state():
    embedding = keras.layers.Embedding(1000, 8)
    embedding.build()
    dense = keras.layers.Dense(100)
    dense.build((None, 100))
    optimizer = low()
    optimizer.build([embedding.embeddings, *dense.trainable_variables])
    assert {v.shape for v in coded(optimizer)} == {(100, 100)}


@pytest.mark.costly
def test_state_of_another_shape_stays_in_float32():
    # Adafactor keeps rows and columns.
    optimizer = low_memory.LowMemoryOptimizer("adafactor")
    variable = keras.Variable(np.zeros((64, 64)), dtype="float32")
    optimizer.build([variable])
    optimizer.apply([keras.ops.ones((64, 64))], [variable])
    assert np.all(helpers.to_numpy(variable) < 0.0)
    factors = [v for v in optimizer.variables if v.name == variable.name]
    assert [(v.dtype, v.shape) for v in factors] == [("float32", (64,))] * 2


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "slot"), [("ScheduleFreeAdamW", "momentum"), ("Ftrl", "linear")]
)
def test_state_that_weights_are_computed_from_is_not_rounded(name, slot):
    if (kind := getattr(keras.optimizers, name, None)) is None:
        pytest.skip(f"this Keras has no {name}")
    rng = np.random.default_rng(0)
    start = rng.normal(size=(64, 64)).astype("float32")
    moved = []
    for wrap in (lambda inner: inner, low_memory.LowMemoryOptimizer):
        optimizer = wrap(kind(1e-6))
        variable = keras.Variable(start)
        optimizer.build([variable])
        for _ in range(2):
            optimizer.apply([keras.ops.full((64, 64), 1e-6)], [variable])
        moved.append(helpers.to_numpy(variable))
    np.testing.assert_allclose(*moved, atol=1e-5)
    assert len(coded(optimizer)) == 1, f"{slot} is in 8 bits, or no state is"


def test_moments_that_depend_on_each_other_are_refused():
    # The variance is one moment minus the square of the other.
    inner = keras.optimizers.RMSprop(centered=True)
    optimizer = low_memory.LowMemoryOptimizer(inner)
    with pytest.raises(ValueError, match="centered=False"):
        optimizer.build([keras.Variable(np.zeros((64, 64)), dtype="float32")])


class Falling(keras.optimizers.Optimizer):
    """Momentum in a slot with the name of Adam's second moment."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.slots = self.add_optimizer_variables(variables, "velocity")

    def update_step(self, gradient, variable, learning_rate):
        slot = self.slots[self._get_variable_index(variable)]
        step = keras.ops.multiply(gradient, learning_rate)
        self.assign(slot, keras.ops.subtract(0.9 * slot, step))
        self.assign_add(variable, slot)


def test_a_class_with_an_update_of_its_own_is_refused():
    variables = [keras.Variable(np.zeros((64, 64)), dtype="float32")]
    with pytest.raises(ValueError, match="Only Keras's.*of type Falling"):
        low_memory.LowMemoryOptimizer(Falling(0.1)).build(variables)


@pytest.mark.costly
def test_pure_sixteen_bit_is_refused_and_changes_nothing():
    model = model_of(low())
    fit(model, 1)
    kept = [*model.variables, *model.optimizer.variables]
    before = helpers.snapshot(kept)
    with pytest.raises(ValueError, match="casts no variables"):
        tfmix.apply_policy(model, "bfloat16")
    helpers.assert_unchanged(kept, before)
    fit(model, 1)
    variable = keras.Variable(np.zeros((64, 64)), dtype="bfloat16")
    with pytest.raises(ValueError, match="write MasterWeightOptimizer"):
        low().build([variable])


def test_a_file_with_float32_state_does_not_fit(tmp_path):
    model = model_of(MAKERS["adam"]())
    fit(model, 1)
    model.save_weights(path := tmp_path / "w.weights.h5")
    other = model_of(low())
    other.optimizer.build(other.trainable_variables)
    before = helpers.snapshot(other.optimizer.variables)
    with pytest.warns(UserWarning, match="optimizer"):
        other.load_weights(path)
    helpers.assert_unchanged(other.optimizer.variables, before)
