"""`compile_for` compiles a training step for another accelerator."""

import collections

import keras
import numpy as np
import pytest
from keras import layers

import tfmix
from tests import helpers, processes
from tests.tools.hardware.programs import needs
from tfmix.tools.hardware import compilers
from tfmix.tools.hardware import target as targets

compile_for = tfmix.hardware.compile_for
GPUS = [target.name for target in targets.targets() if target.kind == "GPU"]


def sequential(*parts, shape=(64,), loss="mse", optimizer="adam"):
    model = keras.Sequential([keras.Input(shape), *parts])
    model.compile(optimizer, loss=loss)
    return model


def small(dtype=None, optimizer="adam"):
    return sequential(
        layers.Dense(128, activation="relu", name="first"),
        layers.Dense(32, name="kept", dtype=dtype),
        tfmix.float32_output(),
        optimizer=optimizer,
    )


@pytest.fixture(scope="module")
def step():
    """A small mixed float16 model, compiled for an H200, and the model."""
    model = small("float32")
    return compile_for(model, 256, policy="mixed_float16"), model


@helpers.requires_backend("jax")
def test_a_cpus_program_is_read_in_the_same_way(monkeypatch):
    import jax

    monkeypatch.setattr(compilers, "device", lambda _: jax.devices("cpu")[0])
    found = compile_for(small("float32"), 256)
    names = [row.layer.split("/")[-1] for row in found.rows]
    assert collections.Counter(names) == {"first": 2, "kept": 3}
    phases = {row.phase for row in found.rows if row.layer.endswith("first")}
    assert phases == {"forward", "backward"}
    assert found.flops == 2 * 256 * (2 * 64 * 128 + 3 * 128 * 32)
    assert found.memory.arguments > 3 * 4 * (64 * 128 + 128 * 32)


@needs("h200")
def test_float32_layers_are_named():
    policy = tfmix.Policy("mixed_float16", float32_layers=["kept"])
    found = compile_for(small(), 256, policy=policy)
    (name,) = found.float32_layers
    assert name.endswith("kept")
    assert found.share_16bit == pytest.approx(4 / 7)
    assert f"products in float32: {name}" in str(found)


@needs("h200")
def test_memory_is_the_size_of_weights_state_and_batch(step):
    found, model = step
    memory, weights = found.memory, 4 * model.count_params()
    expected = 3 * weights + 4 * 256 * (64 + 32)
    # The loss scale, counters and metrics come on top.
    assert expected <= memory.arguments < expected + 1000
    assert memory.peak >= memory.arguments + memory.temporaries
    assert memory.fits


@needs("h200")
@pytest.mark.parametrize("target", GPUS)
def test_every_gpu_multiplies_in_the_dtype_of_auto(target):
    found = compile_for(small(), 64, target, policy="auto")
    has_units = target not in ("v100", "t4")
    fast = "bfloat16" if has_units else "float16"
    assert found.policy == f"mixed_{fast}"
    assert {row.dtype for row in found.rows} == {fast}
    assert found.conditionals == 0
    if not has_units:
        slow = compile_for(small(), 64, target, policy="mixed_bfloat16")
        assert {row.dtype for row in slow.rows} == {"float32"}


@needs("h200")
def test_the_model_does_not_change(step):
    _, model = step
    assert model.layers[0].compute_dtype == "float32"
    assert type(model.optimizer).__name__ == "Adam"
    assert not model.optimizer.built


@needs("h200")
def test_a_step_without_products_has_a_note():
    model = sequential(layers.Dense(1))
    found = compile_for(model, 1, policy="mixed_bfloat16")
    assert not found.rows
    assert "batch of 1: no products, at least" in found.title
    assert "0%" not in str(found)
    assert "is a sum" in str(found)


@needs("h200")
def test_a_shape_without_a_triton_kernel_gets_another():
    # XLA raises for products of 192 rows. With a GPU it would time others.
    given = keras.Input((12,), dtype="int32")
    x = layers.Embedding(500, 32)(given)
    x = layers.MultiHeadAttention(4, 8)(x, x, use_causal_mask=True)
    model = keras.Model(given, layers.Dense(500)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    found = compile_for(model, 16, policy="mixed_bfloat16")
    assert all(row.layer for row in found.rows)
    # The library's workspace, which does not count, would be 33 MB.
    assert found.bytes < 20e6


@needs("h200")
def test_a_process_that_sets_no_platforms_has_the_compiler(monkeypatch):
    # In such a process, JAX checks for all libraries that run programs.
    code = """
import jax, keras, tfmix
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
model.compile("sgd", loss="mse")
print(tfmix.hardware.compile_for(model, 32).flops)
"""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    done = processes.python("-c", code, KERAS_BACKEND=keras.backend.backend())
    assert done.stdout.splitlines()[-1:] == [f"{2 * 2 * 32 * 64 * 32}"], done


@needs("h200")
@needs("v5e")
@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_each_round_of_a_loop_counts(target):
    model = sequential(layers.GRU(128), layers.Dense(8), shape=(200, 64))
    found = compile_for(model, 32, target, policy="mixed_bfloat16")
    # A round has forward products and gradients of inputs and state. The data
    # has no gradient.
    rounds = 200 * 32 * (3 * 128) * (2 * 64 + 3 * 128)
    assert found.flops == 2 * (rounds + 3 * 32 * 128 * 8)
    assert found.open_loops == 0
    assert found.kernels > 200


@needs("v5e")
def test_a_tpu_multiplies_bfloat16_on_its_mxu():
    found = compile_for(small(), 256, "v5e", policy="mixed_bfloat16")
    assert {row.kernel for row in found.rows} == {"MXU"}
    assert found.share_16bit == 1
    assert found.flops == 2 * 256 * (2 * 64 * 128 + 3 * 128 * 32)


@helpers.requires_backend("tensorflow")
def test_tensorflows_programs_are_refused_with_what_to_set(monkeypatch):
    monkeypatch.setattr(compilers, "device", lambda target: None)
    with pytest.raises(ValueError, match="'tensorflow'. Set KERAS_BACKEND=jax"):
        compile_for(small(), 32)


@pytest.mark.parametrize(
    ("target", "extra"), [("v5e", "tpu"), ("h200", "nvidia")]
)
def test_a_missing_compiler_is_named_with_its_extra(monkeypatch, target, extra):
    monkeypatch.setattr(compilers, "_is_installed", lambda name: name == "jax")
    with pytest.raises(ImportError, match=rf"pip install '\.\[{extra}\]'"):
        compile_for(small(), 32, target)


V5E = {"target": "v5e"}


def narrow():
    return sequential(layers.Dense(2, dtype="float16"))


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (small, {"policy": ["O1", "O2"]}, "policy"),
        (small, {"target": "h20"}, "target='h20'.*Did you mean 'h200'"),
        (small, V5E | {"policy": "mixed_float16"}, "float16'.*mixed_bfloat16"),
        (narrow, {"target": "v6e"}, "no float16 products"),
        (keras.Sequential, {}, "must be built.*keras.Input"),
        (lambda: np.zeros(3), {}, "model="),
    ],
)
def test_wrong_arguments_say_what_to_write(make, arguments, message):
    arguments = {"batch_size": 32, **arguments}
    with pytest.raises((TypeError, ValueError), match=message):
        compile_for(make(), **arguments)
