"""A run goes on under another policy, from any kind of file.

The grid: policies of Keras and of tfmix, ways to save, optimizers that are
built when the file is read, or not yet. Keras restores all between its float32
and mixed_bfloat16, so that is expected of every pair. Where Keras's own scaler
reads, which has no such file of another policy, the test says what is lost.
"""

import contextlib
import functools
import pathlib
import tempfile

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tfmix._keras import replacing, version

WRITERS = (
    "keras float32",
    "keras mixed_bfloat16",
    "keras mixed_float16",
    "tfmix mixed_bfloat16",
    "tfmix mixed_float16",
)
SCALER = "keras mixed_float16"
CHECKPOINTS = "model", "model, optimizer"
tensorflow_only = helpers.requires_backend("tensorflow")


@pytest.fixture(autouse=True)
def plain_keras():
    """Keras's policies are Keras's own; see `make_model`."""
    replacing.want(replacing.COMPILE, False)


def make_model(policy, seed, build=True, optimizer="Adam"):
    """Returns a compiled model in the middle of a run, made under a policy."""
    name = policy.split()[1]
    keras.utils.clear_session()
    if policy.startswith("tfmix"):
        replacing.want(replacing.COMPILE, True)
        tfmix.set_global_policy(name)
    else:
        tfmix.set_global_policy("float32")
        replacing.want(replacing.COMPILE, False)
        keras.config.set_dtype_policy(name)
    layers = [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    optimizer = helpers.make_optimizer(optimizer, learning_rate=0.1 * seed)
    model.compile(optimizer, loss=keras.losses.MeanSquaredError())
    if build:
        started(model, seed)
    return model


def started(model, seed):
    """Sets all state of a model to that of the middle of a run."""
    model.optimizer.build(model.trainable_variables)
    numbers = np.random.default_rng(seed)
    for variable in model.weights + bare(model).variables[2:]:
        variable.assign(numbers.random(variable.shape))
    bare(model).iterations.assign(5 * seed)
    if has_scale(model):
        model.optimizer.dynamic_scale.assign(2.0**seed)
        model.optimizer.step_counter.assign(seed)


def bare(model):
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def has_scale(model):
    return isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def state(model):
    return model.weights + bare(model).variables


def scale(model):
    return [model.optimizer.dynamic_scale, model.optimizer.step_counter]


@functools.cache
def folder():
    return tempfile.TemporaryDirectory()


@functools.cache
def saved(policy, seed=3):
    """Returns a folder with a run in every kind of file, and its state."""
    path = pathlib.Path(folder().name, policy.replace(" ", "_"))
    path.mkdir()
    model = make_model(policy, seed)
    values = helpers.snapshot(state(model))
    scales = helpers.snapshot(scale(model)) if has_scale(model) else None
    if not helpers.ON_JAX:
        for objects in CHECKPOINTS:
            checkpoint(model, objects).write(str(path / objects))
    model.save(path / "run.keras")
    model.save_weights(path / "run.weights.h5")
    backup(path, model).on_epoch_end(2)
    model.save(path / "run.h5")
    model.save(path / "later.keras")
    return path, values, scales


def checkpoint(model, objects):
    import tensorflow as tf

    optimizer = {"optimizer": model.optimizer} if "," in objects else {}
    return tf.train.Checkpoint(model=model, **optimizer)


def backup(path, model):
    callback = keras.callbacks.BackupAndRestore(path / "backup")
    callback.set_model(model)
    return callback


def assert_restored(model, values, scales):
    helpers.assert_unchanged(state(model), values)
    if scales and has_scale(model):
        helpers.assert_unchanged(scale(model), scales)


def warned(reader):
    """Returns a context that expects a warning of Keras's own scaler only."""
    if reader == SCALER:
        return pytest.warns(UserWarning, match="Skipping variable loading")
    return contextlib.nullcontext()


PAIRS = [
    pytest.param(writer, reader, id=f"{writer}-{reader}".replace(" ", "_"))
    for writer in WRITERS
    for reader in WRITERS
    if "tfmix" in writer + reader
]


@tensorflow_only
@pytest.mark.parametrize("build", [True, False])
@pytest.mark.parametrize("objects", CHECKPOINTS)
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_a_checkpoint_of_one_policy_is_restored_under_another(
    writer, reader, objects, build
):
    path, values, scales = saved(writer)
    model = make_model(reader, 2, build)
    status = checkpoint(model, objects).read(str(path / objects))
    if not build:
        model.optimizer.build(model.trainable_variables)
    assert_restored(model, values, scales)
    if reader.startswith("tfmix"):
        status.assert_consumed()
    elif reader != SCALER:
        status.assert_existing_objects_matched()
    # What only tfmix has is left over for Keras, whose scaler has a count and a
    # rate of its own, without a use.
    status.expect_partial()


@pytest.mark.parametrize("way", ["run.weights.h5", "backup"])
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_weights_and_a_backup_hold_the_optimizer_of_any_policy(
    writer, reader, way, said
):
    path, values, scales = saved(writer)
    model = make_model(reader, 2)
    if way == "backup":
        load = backup(path, model).on_train_begin
    else:
        load = functools.partial(model.load_weights, path / way)
    with warned(reader):
        load()
    # Keras warns that the file has no scale for it.
    assert_restored(model, values, None if reader == SCALER else scales)
    assert not said


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_weights_load_where_the_optimizer_is_not_built(writer, reader, said):
    path, values, _ = saved(writer)
    model = make_model(reader, 2, build=False)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        model.load_weights(path / "run.weights.h5")
    helpers.assert_unchanged(model.weights, values[: len(model.weights)])
    assert int(bare(model).iterations) == 0
    # Keras has said it.
    assert not said


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_a_model_file_holds_the_optimizer_of_any_policy(writer, reader, said):
    path, values, scales = saved(writer)
    make_model(reader, 2, build=False)
    with warned(reader):
        model = keras.saving.load_model(path / "run.keras")
    assert_restored(model, values, None if reader == SCALER else scales)
    assert type(bare(model)) is keras.optimizers.Adam
    if "tfmix" not in reader and reader != SCALER:
        assert model.optimizer is bare(model)
    if writer == "keras float32" and reader.startswith("tfmix"):
        assert "they come from a float32 file" in said.pop()
    assert not said


# Keras builds the optimizer on no variables there, and says so in a warning.
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_a_model_file_of_the_old_format_loads_as_in_keras(writer, reader):
    path, values, _ = saved(writer)
    make_model(reader, 2, build=False)
    model = keras.saving.load_model(path / "run.h5")
    helpers.assert_unchanged(model.weights, values[: len(model.weights)])
    assert type(bare(model)) is keras.optimizers.Adam
    # A file of tfmix's names its optimizer.
    if "tfmix" not in writer + reader and reader != SCALER:
        assert model.optimizer is bare(model)


@pytest.mark.skipif(
    version.numbers(keras.__version__) >= (3, 16),
    reason="Keras 3.16 leaves the optimizer in what later files say",
)
@pytest.mark.parametrize("reader", WRITERS[3:])
@pytest.mark.parametrize("writer", WRITERS[:3])
def test_a_file_of_another_optimizer_loads_with_a_warning(writer, reader, said):
    # Without tfmix, Keras takes the optimizer out of what later files say.
    path, values, _ = saved(writer)
    make_model(reader, 2, build=False)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        model = keras.saving.load_model(path / "later.keras")
    helpers.assert_unchanged(model.weights, values[: len(model.weights)])
    if has_scale(model):
        assert "was not restored" in said[-1]
