"""Files of older versions are read bit for bit, or with a warning."""

import shutil

import h5py
import keras
import numpy as np
import pytest

from tests import helpers
from tests.fixtures import write

VERSIONS = sorted(
    each.name for each in write.FOLDER.glob("*.*.*") if each.is_dir()
)
CASES = [
    pytest.param(write.FOLDER / version / name, id=f"{version}-{name}")
    for version in VERSIONS
    for name in sorted(write.cases())
]


# What no released version has written.
NEW = ("data_skips",)


def assert_state_is_that_of(folder, model):
    expected = list(np.load(folder / "state.npz").values())
    found = write.state(model, without=NEW)
    for one, wanted in zip(found, expected, strict=True):
        # Keras's counters are int64 under TensorFlow, and int32 under JAX.
        helpers.assert_same_bits(one, wanted.astype(one.dtype))
    assert model.optimizer.skipped_steps == 1


def test_there_are_files_to_read():
    assert "0.1.0" in VERSIONS
    assert all(case.values[0].is_dir() for case in CASES)


# Keras warns about a model with a guarded step.
@pytest.mark.costly
@pytest.mark.parametrize("folder", CASES)
@pytest.mark.skipif(
    keras.__version__.startswith("3.12."),
    reason="Keras 3.15 wrote them, with an argument that 3.12 refuses",
)
def test_a_model_is_loaded_and_trains(folder):
    model = keras.saving.load_model(folder / "model.keras")
    assert_state_is_that_of(folder, model)
    model.fit(*write.data(), batch_size=2, verbose=0)
    assert model.optimizer.skipped_steps == 2
    helpers.assert_all_finite(model.get_weights())


@pytest.mark.costly
@pytest.mark.parametrize("folder", CASES)
def test_state_is_loaded_whole_or_not_at_all(folder, tmp_path, said):
    model = write.made(folder.name)
    model.load_weights(folder / "model.weights.h5")
    assert_state_is_that_of(folder, model)
    broken = shutil.copy(folder / "model.weights.h5", tmp_path)
    with h5py.File(broken, "r+") as file:
        del file["optimizer/vars/inner_1"]
    model = write.made(folder.name)
    # Keras, too, only warns of a state that does not fit.
    model.load_weights(broken)
    assert "was not restored" in said[-1]
    assert model.optimizer.skipped_steps == 0


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("folder", CASES)
def test_a_checkpoint_is_restored(folder):
    import tensorflow as tf

    model = write.made(folder.name)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    status = checkpoint.read(str(folder / "checkpoint"))
    status.assert_existing_objects_matched()
    assert_state_is_that_of(folder, model)


def test_half_a_file_is_refused(tmp_path):
    whole = (CASES[0].values[0] / "model.keras").read_bytes()
    half = tmp_path / "half.keras"
    half.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"half\.keras|zip"):
        keras.saving.load_model(half)
