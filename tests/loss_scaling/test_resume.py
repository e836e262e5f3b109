"""A run that was killed and resumed ends like an uninterrupted one."""

import pathlib
import random
import signal

import pytest

from benchmarks.fault_cases import resumable, saved_state, systems
from tests import helpers

TFMIX = systems.by_name("tfmix")
# Lies after the first state saved at an epoch's end, and before the last.
FIRST, LAST = resumable.STEPS_PER_EPOCH + 1, resumable.STEPS - 1


@pytest.fixture(scope="module")
def whole_run():
    return resumable.state(resumable.train(resumable.build(TFMIX)))


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    return killed_after(37, tmp_path_factory.mktemp("killed"))


def killed_after(step, directory):
    code = saved_state.run_until_killed(TFMIX, str(directory), step)
    assert code == -signal.SIGKILL
    return pathlib.Path(directory)


def assert_resumes(whole_run, directory, way):
    model = resumable.resume(TFMIX, directory, way)
    assert not resumable.differing(whole_run, resumable.state(model))
    # One batch in each epoch is bad, and the growing scale may overflow.
    optimizer = model.optimizer
    assert optimizer.skipped_steps >= resumable.EPOCHS
    applied = int(optimizer.iterations)
    assert applied + optimizer.skipped_steps == resumable.STEPS


@pytest.mark.slow
@pytest.mark.parametrize("way", resumable.ways())
def test_a_killed_run_resumes_bit_for_bit(whole_run, killed_run, way):
    assert_resumes(whole_run, killed_run, way)


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", sorted(random.Random(20).sample(range(FIRST, LAST + 1), 10))
)
def test_a_run_resumes_wherever_it_was_killed(whole_run, tmp_path, step):
    directory = killed_after(step, tmp_path)
    for way in resumable.ways():
        assert_resumes(whole_run, directory, way)


@pytest.mark.costly
def test_the_comparison_sees_one_lost_counter(whole_run):
    model = resumable.train(resumable.build(TFMIX))
    assert not resumable.differing(whole_run, resumable.state(model))
    model.optimizer.step_counter.assign_add(1)
    (name,) = resumable.differing(whole_run, resumable.state(model))
    assert "step_counter" in name


def after_some_steps(wrap=TFMIX, steps=8):
    """Returns a model with numbers that all differ from a new one's."""
    model = resumable.build(wrap)
    batches = resumable.Batches()
    for step in range(steps):
        model.train_on_batch(*batches[step])
    return model


@pytest.mark.costly
@pytest.mark.parametrize(
    ("saving_policy", "loading_policy"),
    [
        ("float32", "mixed_float16"),
        ("mixed_float16", "float32"),
        ("mixed_float16", "mixed_bfloat16"),
    ],
)
def test_weights_saved_under_one_policy_load_under_another(
    tmp_path, saving_policy, loading_policy
):
    TFMIX.set_policy(saving_policy)
    model = after_some_steps()
    model.save_weights(tmp_path / "a.weights.h5")
    TFMIX.set_policy(loading_policy)
    other = resumable.build(TFMIX)
    other.load_weights(tmp_path / "a.weights.h5")
    left, right = resumable.state(model), resumable.state(other)
    assert not resumable.differing(left, right)


def keras_run():
    model = after_some_steps(systems.by_name("Keras"), steps=5)
    optimizer = model.optimizer
    optimizer.dynamic_scale.assign(256.0)
    optimizer.step_counter.assign(3)
    return model


def assert_holds_keras_state(model, saved):
    optimizer = model.optimizer
    assert optimizer.loss_scale == 256.0
    assert int(optimizer.step_counter) == 3
    assert optimizer.skipped_steps == 0
    inner = saved.optimizer.inner_optimizer.variables
    for mine, keras_own in zip(
        optimizer.inner_optimizer.variables, inner, strict=True
    ):
        helpers.assert_same_bits(mine, keras_own)
    for mine, keras_own in zip(model.weights, saved.weights, strict=True):
        helpers.assert_same_bits(mine, keras_own)


@pytest.mark.costly
def test_weights_that_keras_saved_load(tmp_path):
    saved = keras_run()
    saved.save_weights(tmp_path / "a.weights.h5")
    model = resumable.build(TFMIX)
    model.load_weights(tmp_path / "a.weights.h5")
    assert_holds_keras_state(model, saved)


@helpers.requires_backend("tensorflow")
def test_a_checkpoint_that_keras_saved_loads(tmp_path):
    import tensorflow as tf

    saved = keras_run()
    checkpoint = tf.train.Checkpoint(model=saved, optimizer=saved.optimizer)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    model = resumable.build(TFMIX)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    # Keras's scaler has no counters, so ours keep their values.
    checkpoint.read(path).expect_partial()
    assert_holds_keras_state(model, saved)
