"""Hardware facts lead to the documented policy."""

import types

import keras
import pytest

from tests import helpers
from tfmix.policy import devices


def gpu(capability, name="GPU"):
    return devices.describe("GPU", name, "tensorflow", capability)


TPU = devices.describe("TPU", "TPU v4", "jax")
CPU = devices.describe("CPU", "cpu", "tensorflow")


@pytest.mark.parametrize(
    ("found", "policy"),
    [
        ((CPU,), "float32"),
        ((gpu((6, 1)), CPU), "float32"),
        ((), "float32"),
        ((gpu((8, 0)), CPU), "mixed_bfloat16"),
        ((gpu((12, 0)),), "mixed_bfloat16"),
        ((gpu((7, 9)),), "mixed_float16"),
        ((gpu((7, 0)),), "mixed_float16"),
        ((gpu(None),), "float32"),
        ((TPU, CPU), "mixed_bfloat16"),
        ((gpu((9, 0)), gpu((7, 5))), "mixed_float16"),
        ((gpu((9, 0)), gpu((7, 5)), gpu((6, 0))), "float32"),
    ],
)
def test_the_weakest_accelerator_decides_the_policy(found, policy):
    assert devices.suited_policy(found)[0] == policy


def test_the_reason_names_the_device_and_its_capability():
    found = (gpu((9, 0), "H100"), gpu((7, 5), "T4"))
    _, reason = devices.suited_policy(found)
    assert "T4" in reason
    assert "7.5" in reason
    assert "weakest of 2" in reason


def test_an_unknown_capability_is_reported_as_unknown():
    assert "unknown" in devices.suited_policy((gpu(None),))[1]


def test_a_cpu_is_not_fast_by_itself_and_has_no_capability():
    record = devices.describe("CPU", "cpu", "jax", (9, 0))
    assert not record.float16
    assert not record.bfloat16
    assert record.compute_capability is None


def test_devices_lists_this_machine_accelerators_first():
    found = devices.devices()
    assert {device.backend for device in found} == {keras.backend.backend()}
    kinds = [device.kind == "CPU" for device in found]
    assert kinds == sorted(kinds)
    assert all(isinstance(device.name, str) for device in found)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("8.0", (8, 0)),
        ("12.1", (12, 1)),
        ((7, 5), (7, 5)),
        ("gfx90a", None),
        (None, None),
    ],
)
def test_capabilities_of_both_backends_are_read(value, expected):
    assert devices._capability(value) == expected


def test_jax_gpus_are_read_with_their_capability(monkeypatch):
    jax = pytest.importorskip("jax")
    listed = [
        types.SimpleNamespace(
            platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0"
        ),
        types.SimpleNamespace(platform="tpu", device_kind="TPU v5e"),
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: listed)
    first, second = devices._read_jax()
    assert (first.kind, first.compute_capability) == ("GPU", (8, 0))
    assert (second.kind, second.bfloat16) == ("TPU", True)


@helpers.requires_backend("tensorflow")
def test_tensorflow_gpus_are_read_with_their_details(monkeypatch):
    import tensorflow as tf

    listed = [types.SimpleNamespace(device_type="GPU", name="/gpu:0")]
    details = {"device_name": "Tesla T4", "compute_capability": (7, 5)}
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda: listed)
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details", lambda device: details
    )
    (found,) = devices._read_tensorflow()
    assert found == devices.describe("GPU", "Tesla T4", "tensorflow", (7, 5))


@pytest.mark.parametrize(
    ("found", "level", "lines", "text"),
    [
        (CPU, "WARNING", 1, "policy 'auto' is 'float32' here: only CPUs"),
        (TPU, "INFO", 2, "policy 'auto' is 'mixed_bfloat16' here: "),
    ],
)
def test_auto_logs_its_reason_and_warns_once_if_it_is_float32(
    caplog, monkeypatch, found, level, lines, text
):
    monkeypatch.setattr(devices, "devices", lambda: (found,))
    caplog.set_level("INFO", "absl")
    for _ in range(2):
        assert f"'{devices.auto_policy()}'" in text
    assert len(caplog.records) == lines
    for record in caplog.records:
        assert record.levelname == level
        assert record.getMessage().startswith(f"tfmix: {text}")
