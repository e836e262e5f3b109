"""`compile_for` compiles a training step for another accelerator."""

import collections
import json
import math
import os
import random
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfmix
from tfmix.hardware import compilers, compiling
from tfmix.hardware import target as targets

JAX = keras.backend.backend() == "jax"


GPUS = [target.name for target in targets.targets() if target.kind == "GPU"]


def needs(name):
    """Skips a test if the compiler of a target is not installed."""
    lacking = compilers.missing(targets.find(name))
    return pytest.mark.skipif(
        bool(lacking), reason=f"no {', '.join(lacking)}: run `make targets`"
    )


def small(dtype=None):
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu", name="first"),
            keras.layers.Dense(32, name="kept", dtype=dtype),
            tfmix.float32_output(),
        ]
    )
    model.compile("adam", loss="mse")
    return model


@pytest.fixture(scope="module")
def step():
    """A small mixed float16 model, compiled for an H200, and the model."""
    model = small("float32")
    return tfmix.hardware.compile_for(model, 256, policy="mixed_float16"), model


@needs("h200")
def test_each_product_has_its_layer_dtype_and_shape(step):
    found, _ = step
    # Each layer has a forward product and two gradients. The first layer's
    # inputs need no gradient.
    by_layer = {
        name: [row for row in found.rows if row.layer.endswith(name)]
        for name in ("first", "kept")
    }
    assert {name: len(rows) for name, rows in by_layer.items()} == {
        "first": 2,
        "kept": 3,
    }
    assert len(found.rows) == 5
    assert {row.dtype for row in by_layer["first"]} == {"float16"}
    assert {row.phase for row in by_layer["first"]} == {"forward", "backward"}
    assert found.flops == 2 * 256 * (2 * 64 * 128 + 3 * 128 * 32)


@needs("h200")
def test_float32_layers_are_named():
    model = small()
    found = tfmix.hardware.compile_for(
        model,
        256,
        policy=tfmix.Policy("mixed_float16", float32_layers=["kept"]),
    )
    (name,) = found.float32_layers
    assert name.endswith("kept")
    assert found.share_16bit == pytest.approx(4 / 7)
    assert f"products in float32: {name}" in str(found)


@needs("h200")
def test_memory_is_the_size_of_weights_state_and_batch(step):
    found, model = step
    weights = model.count_params()
    batch = 256 * (64 + 32)
    expected = 4 * (3 * weights + batch)
    # The loss scale, counters and metrics come on top.
    assert expected <= found.memory.arguments < expected + 1000
    assert found.memory.peak >= sum(
        (found.memory.arguments, found.memory.temporaries)
    )
    assert found.memory.fits


def held(variables):
    sizes = {"float32": 4, "bfloat16": 2, "uint8": 1}  # no scalars
    return sum(
        math.prod(v.shape) * sizes[v.dtype] for v in variables if len(v.shape)
    )


@needs("h200")
def test_memory_is_listed_by_kind(step):
    found, model = step
    kinds, weights = found.memory.kinds, 4 * model.count_params()
    assert (kinds.weights, kinds.masters) == (weights, 0)
    assert (kinds.slots, kinds.gradients) == (2 * weights, weights)
    assert kinds.activations == max(0, found.memory.temporaries - weights)


@needs("h200")
def test_optimizers_are_compared_by_their_memory():
    adam = keras.optimizers.Adam
    ways = {
        "Adam": adam(),
        "LowMemoryOptimizer(Adam)": tfmix.optimizers.LowMemoryOptimizer(adam()),
    }
    model = small()
    found = tfmix.hardware.compile_for(
        model, 64, policy="mixed_bfloat16", optimizer=[*ways.values()]
    )
    assert list(found.steps) == [f"mixed_bfloat16, {name}" for name in ways]
    for step, optimizer in zip(
        found.steps.values(), ways.values(), strict=True
    ):
        optimizer.build(model.trainable_variables)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        assert step.memory.kinds.slots == held(inner.variables)
    assert "The least memory: mixed_bfloat16, LowMemoryOptimizer" in str(found)


@needs("h200")
def test_masters_are_counted_apart_from_optimizer_state():
    masters = tfmix.optimizers.MasterWeightOptimizer(keras.optimizers.Adam())
    model = small()
    found = tfmix.hardware.compile_for(
        model, 64, policy="bfloat16", optimizer=masters
    )
    kinds, count = found.memory.kinds, model.count_params()
    assert kinds.masters == 4 * count
    assert kinds.slots == 8 * count
    assert kinds.weights == kinds.gradients == 2 * count


@needs("h200")
def test_two_choices_with_the_same_name_are_refused():
    with pytest.raises(ValueError, match="'float32, Adam' twice"):
        tfmix.hardware.compile_for(small(), 32, optimizer=["adam", "adam"])


@needs("h200")
def test_a_model_without_an_optimizer_is_compared_with_its_default():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
    found = tfmix.hardware.compile_for(model, 8, optimizer=[None, "sgd"])
    assert list(found) == ["float32, Adam", "float32, SGD"]


@needs("h200")
def test_another_optimizer_changes_nothing_else():
    def kernels(*given):
        model = keras.Sequential([keras.Input((64,)), *layers])
        model.compile("sgd", *given, metrics=["mae"] if given else None)
        return [
            tfmix.hardware.compile_for(model, 8, optimizer=each).kernels
            for each in (None, "sgd")
        ]

    layers = [keras.layers.Dense(32, activity_regularizer="l2")]
    for given in ([], ["mse", [0.5]]):
        own, other = kernels(*given)
        assert own == other


@keras.saving.register_keras_serializable("tests")
class OwnCompile(keras.Sequential):
    def compile(self, optimizer, beta=1.0, loss="mse"):
        super().compile(optimizer, loss)


@needs("h200")
@pytest.mark.filterwarnings("ignore:`compile")
def test_arguments_of_a_custom_compile_are_not_guessed():
    model = OwnCompile([keras.Input((64,)), keras.layers.Dense(32)])
    model.compile("sgd")
    with pytest.raises(ValueError, match="OwnCompile.*compile_from_config"):
        tfmix.hardware.compile_for(model, 8)
    found = tfmix.hardware.compile_for(model, 8, optimizer="sgd", loss="mse")
    assert found.memory.kinds.slots == 0


@needs("h200")
@pytest.mark.parametrize("target", GPUS)
def test_every_gpu_multiplies_in_the_dtype_of_auto(target):
    found = tfmix.hardware.compile_for(small(), 64, target, policy="auto")
    fast = "float16" if target in ("v100", "t4") else "bfloat16"
    assert found.policy == f"mixed_{fast}"
    assert {row.dtype for row in found.rows} == {fast}
    assert found.conditionals == 0


@needs("h200")
@pytest.mark.parametrize("target", ["v100", "t4"])
def test_bfloat16_is_computed_in_float32_without_units(target):
    found = tfmix.hardware.compile_for(
        small(), 64, target, policy="mixed_bfloat16"
    )
    assert {row.dtype for row in found.rows} == {"float32"}


@needs("h200")
def test_compiling_does_not_use_pythons_generator():
    model = small()
    before = random.getstate()
    tfmix.hardware.compile_for(model, 8, policy="mixed_bfloat16")
    assert random.getstate() == before


@needs("h200")
def test_the_bound_is_the_larger_of_two(step):
    found, _ = step
    target = targets.find("h200")
    assert found.bound == "memory"
    assert found.seconds == found.bytes / target.bandwidth
    assert found.seconds > found.flops / target.rates["float16"]


@needs("h200")
def test_int8_products_count_at_their_own_rate():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
    model.layers[0].quantize("int8")
    model.compile("sgd", loss="mse")
    found = tfmix.hardware.compile_for(model, 64)
    assert {row.dtype for row in found.rows} == {"int8"}
    target = targets.find("h200")
    assert compiling._rate("int8", target) > target.rates["float16"]


@needs("h200")
def test_a_model_that_stays_in_float32_compiles_under_a_policy():
    # Its unwrapped optimizer would call the host, which is not there.
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
    model.compile("adam", loss="mse")
    found = tfmix.hardware.compile_for(model, 8, policy="mixed_bfloat16")
    assert {row.dtype for row in found.rows} == {"float32"}


@needs("h200")
def test_a_step_without_products_has_a_note():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
    found = tfmix.hardware.compile_for(model, 1, policy="mixed_bfloat16")
    assert not found.rows
    assert "batch of 1: no products, at least" in found.title
    assert "0%" not in str(found)
    assert "is a sum" in str(found)


@needs("h200")
def test_the_model_does_not_change(step):
    _, model = step
    assert model.layers[0].compute_dtype == "float32"
    assert type(model.optimizer).__name__ == "Adam"
    assert not model.optimizer.built


@needs("h200")
def test_a_report_reads_the_same_in_every_form(step, tmp_path):
    found, _ = step
    assert "mixed_float16 on h200, batch of 256" in str(found)
    data = json.loads(found.to_json())
    assert data["memory"]["fits"] is True
    assert len(data["rows"]) == len(found.rows)
    found.to_html(tmp_path / "step.html")
    page = (tmp_path / "step.html").read_text(encoding="utf-8")
    assert page.count("first ") == 2


@needs("h200")
def test_policies_are_compared_side_by_side():
    found = tfmix.hardware.compile_for(
        small(), 64, policy=["float32", "mixed_bfloat16"], loss="mae"
    )
    assert found["float32"].share_16bit == 0
    assert found["mixed_bfloat16"].share_16bit == 1
    assert list(json.loads(found.to_json())) == ["float32", "mixed_bfloat16"]
    assert "mixed_bfloat16" in str(found)
    assert list(found) == ["float32", "mixed_bfloat16"]
    with pytest.raises(KeyError, match="only"):
        found["mixed_float16"]


@needs("h200")
def test_named_inputs_and_outputs_are_compiled():
    inputs = {
        "numbers": keras.Input((16,), name="numbers"),
        "picture": keras.Input((8, 8, 3), name="picture"),
    }
    flat = keras.layers.Flatten()(inputs["picture"])
    joined = keras.layers.Concatenate()([inputs["numbers"], flat])
    outputs = {
        "size": keras.layers.Dense(8, name="size")(joined),
        "kind": keras.layers.Dense(16, "softmax", name="kind")(joined),
    }
    model = keras.Model(inputs, outputs)
    loss = {"size": "mse", "kind": "sparse_categorical_crossentropy"}
    found = tfmix.hardware.compile_for(
        model, 32, loss=loss, policy="mixed_bfloat16"
    )
    assert found.flops == 2 * 2 * 32 * (16 + 192) * 24


@needs("h200")
def test_gradients_of_grouped_convolutions_have_a_layer():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 8)),
            keras.layers.Conv2D(16, 3, name="whole"),
            keras.layers.Conv2D(16, 3, groups=4, name="grouped"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2, name="head"),
        ]
    )
    policies = ["float32", "mixed_bfloat16"]
    steps = tfmix.hardware.compile_for(model, 4, loss="mse", policy=policies)
    for found in steps.values():
        layers = collections.Counter(
            row.layer.split("/")[-1] for row in found.rows
        )
        # The first layer has no gradient of its inputs.
        assert layers == {"whole": 2, "grouped": 3, "head": 3}


@needs("h200")
def test_a_shape_without_a_triton_kernel_gets_another():
    # XLA raises for products of 192 rows. With a GPU it would time others.
    given = keras.Input((12,), dtype="int32")
    x = keras.layers.Embedding(500, 32)(given)
    x = keras.layers.MultiHeadAttention(4, 8)(x, x, use_causal_mask=True)
    model = keras.Model(given, keras.layers.Dense(500)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = tfmix.hardware.compile_for(
        model, 16, loss=loss, policy="mixed_bfloat16"
    )
    assert all(row.layer for row in found.rows)
    # The library's workspace, which does not count, would be 33 MB.
    assert found.bytes < 20e6


@needs("h200")
def test_a_model_with_adapters_is_compiled():
    model = small()
    model.layers[0].enable_lora(4)
    found = tfmix.hardware.compile_for(model, 64, policy="mixed_bfloat16")
    trained = sum(math.prod(v.shape) for v in model.trainable_variables)
    assert found.memory.kinds.gradients == 4 * trained
    assert found.memory.kinds.slots == 2 * 4 * trained


@needs("h200")
def test_a_process_that_sets_no_platforms_has_the_compiler():
    # In such a process, JAX checks for all libraries that run programs.
    code = """if True:
        import jax, keras, tfmix
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
        model.compile("sgd", loss="mse")
        print(tfmix.hardware.compile_for(model, 32).flops)
        """
    environment = {**os.environ, "KERAS_BACKEND": keras.backend.backend()}
    environment.pop("JAX_PLATFORMS", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == [f"{2 * 2 * 32 * 64 * 32}"], done


@needs("h200")
@needs("v5e")
@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_each_round_of_a_loop_counts(target):
    layers = [keras.layers.GRU(128), keras.layers.Dense(8)]
    model = keras.Sequential([keras.Input((200, 64)), *layers])
    model.compile("adam", loss="mse")
    found = tfmix.hardware.compile_for(
        model, 32, target, policy="mixed_bfloat16"
    )
    # A round has forward products and gradients of inputs and state. The data
    # has no gradient.
    rounds = 200 * 32 * (3 * 128) * (2 * 64 + 3 * 128)
    assert found.flops == 2 * (rounds + 3 * 32 * 128 * 8)
    assert found.open_loops == 0
    assert found.kernels > 200


@needs("h200")
@pytest.mark.skipif(JAX, reason="JAX compiles it")
def test_ops_that_xla_cannot_compile_are_named():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.RandomRotation(0.1),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    model.compile("adam", loss="mse")
    with pytest.raises(ValueError, match="ImageProjectiveTransformV3.*fit"):
        tfmix.hardware.compile_for(model, 4, policy="mixed_bfloat16")


@needs("h200")
@pytest.mark.skipif(not JAX, reason="Keras rematerializes nothing there")
def test_rematerialized_products_are_counted():
    with keras.RematScope(mode="full"):
        layers = [keras.layers.Dense(512, "gelu") for _ in range(2)]
        model = keras.Sequential([keras.Input((512,)), *layers])
    found = tfmix.hardware.compile_for(model, 8192)
    # There are two forward products. The inputs need no gradient.
    assert found.flops > 5 * 2 * 8192 * 512 * 512


@keras.saving.register_keras_serializable("tests")
class OwnStep(keras.Model):
    """Has a custom step, for batches with or without targets."""

    def __init__(self, targets, **kwargs):
        super().__init__(**kwargs)
        self.targets, self.dense = targets, keras.layers.Dense(32)

    def get_config(self):
        return {"targets": self.targets}

    def build(self, input_shape):
        self.dense.build(input_shape)

    def call(self, x):
        return self.dense(x)

    def train_step(self, *given):
        x, y = given[-1] if self.targets else (given[-1], 0.0)
        assert tuple(x.shape) == (8, 64)
        logs = {"loss": keras.ops.mean(self.dense(x) - y)}
        return (logs, given[0]) if JAX else logs


@needs("h200")
@pytest.mark.parametrize("targets", [False, True])
def test_a_step_without_a_compiled_loss_gets_the_data_of_fit(targets):
    model = OwnStep(targets)
    model.build((None, 64))
    model.compile("sgd")
    found = tfmix.hardware.compile_for(model, 8)
    assert found.memory.arguments >= 4 * (8 * 64 + targets * 8 * 32)


@needs("v5e")
def test_a_tpu_multiplies_bfloat16_on_its_mxu():
    found = tfmix.hardware.compile_for(
        small(), 256, "v5e", policy="mixed_bfloat16"
    )
    assert {row.kernel for row in found.rows} == {"MXU"}
    assert found.share_16bit == 1
    assert found.flops == 2 * 256 * (2 * 64 * 128 + 3 * 128 * 32)


@needs("h200")
@pytest.mark.skipif(not JAX, reason="several devices need JAX")
def test_several_devices_share_the_batch_and_sum_gradients():
    model = small()
    one = tfmix.hardware.compile_for(model, 256, "h200")
    four = tfmix.hardware.compile_for(model, 256, "h200", devices=4)
    assert 4 * four.flops == one.flops
    assert (one.exchanges, one.exchanged) == (0, 0)
    # Only the loss is summed besides the gradients.
    gradients = 4 * model.count_params()
    assert gradients <= four.exchanged <= gradients + 64


@pytest.mark.skipif(JAX, reason="JAX compiles for several devices")
@needs("h200")
def test_several_devices_under_tensorflow_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="devices=2.*KERAS_BACKEND=jax"):
        tfmix.hardware.compile_for(small(), 256, "h200", devices=2)


@pytest.mark.parametrize(
    ("target", "extra"), [("v5e", "tpu"), ("h200", "nvidia")]
)
def test_a_missing_compiler_is_named_with_its_extra(monkeypatch, target, extra):
    monkeypatch.setattr(compilers, "_is_installed", lambda name: name == "jax")
    with pytest.raises(ImportError, match=rf"pip install '\.\[{extra}\]'"):
        tfmix.hardware.compile_for(small(), 32, target)


def layers_of(*made):
    return keras.Sequential(list(made))


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (small, {"policy": []}, r"policy=\[\]"),
        (small, {"optimizer": []}, r"optimizer=\[\]"),
        (small, {"optimizer": {}}, r"optimizer=\{\}"),
        (small, {"loss": []}, r"loss=\[\]"),
        (small, {"target": "h20"}, "target='h20'.*Did you mean 'h200'"),
        (
            small,
            {"target": "v5e", "policy": "mixed_float16"},
            "'mixed_float16'.*mixed_bfloat16",
        ),
        (
            small,
            {"target": "v5e", "batch_size": 30, "devices": 4},
            "batch_size=30, devices=4",
        ),
        (
            lambda: layers_of(
                keras.Input((4,)), keras.layers.Dense(2, dtype="float16")
            ),
            {"target": "v6e"},
            "no float16 products",
        ),
        (
            lambda: layers_of(keras.layers.Dense(2)),
            {},
            "must be built.*keras.Input",
        ),
        (lambda: np.zeros(3), {}, "model="),
    ],
)
def test_wrong_arguments_say_what_to_write(make, arguments, message):
    arguments = {"batch_size": 32, **arguments}
    with pytest.raises((TypeError, ValueError), match=message):
        tfmix.hardware.compile_for(make(), **arguments)
