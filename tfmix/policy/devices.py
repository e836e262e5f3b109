"""Lists the devices, and chooses the policy that suits them."""

import dataclasses
import importlib.util
import re

import keras

from tfmix import _messages

# Tensor Cores take bfloat16 from compute capability 8.0 (Ampere) on and
# float16 from 7.0 (Volta) on; below that 16 bit saves memory, not time.
BFLOAT16_CAPABILITY = (8, 0)
FLOAT16_CAPABILITY = (7, 0)
# Tensor Cores take float8 from Ada and Hopper on.
FLOAT8_CAPABILITY = (8, 9)


@dataclasses.dataclass(frozen=True)
class Device:
    """One device the backend computes on.

    Attributes:
        kind: `"GPU"`, `"TPU"` or `"CPU"`.
        name: The name the backend gives it, `"NVIDIA H100"` for example.
        compute_capability: NVIDIA's `(major, minor)`; `None` if the device
            has none or the backend does not report it.
        float16: Whether float16 is faster than float32 there.
        bfloat16: Whether bfloat16 is faster than float32 there.
        float8: Whether float8 is faster than 16 bit there.
        backend: The Keras backend that listed it.
    """

    kind: str
    name: str
    compute_capability: tuple[int, int] | None
    float16: bool
    bfloat16: bool
    float8: bool
    backend: str


def describe(
    kind: str,
    name: str,
    backend: str,
    compute_capability: tuple[int, int] | None = None,
) -> Device:
    """Builds the record of a device from the facts a backend gives.

    Args:
        kind: `"GPU"`, `"TPU"` or `"CPU"`.
        name: The name the backend gives it.
        backend: The Keras backend that lists it.
        compute_capability: A GPU's `(major, minor)`, if known.

    Examples:
        >>> describe("GPU", "Tesla V100", "tensorflow", (7, 0)).bfloat16
        False
    """
    capability = compute_capability if kind == "GPU" else None
    version = capability or (0, 0)
    # A TPU has no float16 units, and XLA compiles no float16 products for it.
    float16 = version >= FLOAT16_CAPABILITY
    bfloat16 = kind == "TPU" or version >= BFLOAT16_CAPABILITY
    float8 = version >= FLOAT8_CAPABILITY
    return Device(kind, name, capability, float16, bfloat16, float8, backend)


def devices() -> tuple[Device, ...]:
    """Lists the devices Keras's backend computes on, accelerators first."""
    on_jax = keras.backend.backend() == "jax"
    listed = _read_jax() if on_jax else _read_tensorflow()
    usable = [
        device for device in listed if device.kind in ("GPU", "TPU", "CPU")
    ]
    return tuple(sorted(usable, key=lambda device: device.kind == "CPU"))


def is_on_tpu() -> bool:
    """Returns whether Keras's backend computes on a TPU."""
    # Asking JAX for its devices starts them, which must not happen before
    # several processes have connected. Without libtpu there is no TPU.
    on_jax = keras.backend.backend() == "jax"
    if on_jax and importlib.util.find_spec("libtpu") is None:
        return False
    return any(device.kind == "TPU" for device in devices())


def is_on_tensorflows_cpu() -> bool:
    """Returns whether TensorFlow computes without an accelerator."""
    on_tensorflow = keras.backend.backend() == "tensorflow"
    return on_tensorflow and {device.kind for device in devices()} == {"CPU"}


def suited_policy(usable: tuple[Device, ...]) -> tuple[str, str]:
    """Returns the policy for a set of devices, and the reason in words.

    The weakest accelerator decides.

    Examples:
        >>> suited_policy((describe("TPU", "TPU v4", "jax"),))[0]
        'mixed_bfloat16'
    """
    accelerators = [device for device in usable if device.kind != "CPU"]
    if not accelerators:
        return "float32", "only CPUs were found"
    weakest = min(accelerators, key=_rank)
    who, capability = weakest.name, weakest.compute_capability
    if capability is not None:
        who += ", compute capability {}.{}".format(*capability)
    elif weakest.kind == "GPU":
        who += ", compute capability unknown"
    if len(set(map(_rank, accelerators))) > 1:
        who = f"the weakest of {len(accelerators)} devices is {who}"
    if weakest.bfloat16:
        return "mixed_bfloat16", f"{who}: fast in bfloat16, full range"
    if weakest.float16:
        return "mixed_float16", f"{who}: fast in float16, not in bfloat16"
    return "float32", f"{who}: no fast 16-bit arithmetic (7.0 is the least)"


def auto_policy() -> str:
    """Chooses the policy for this machine, and logs the reason once."""
    name, reason = suited_policy(devices())
    text = f"policy 'auto' is {name!r} here: {reason}"
    if name == "float32":
        # float32 is not what a user of 16 bit expects, so this is a warning.
        _messages.warn_once(text)
    else:
        _messages.info(text)
    return name


def _rank(device: Device) -> int:
    return 2 if device.bfloat16 else int(device.float16)


def _read_tensorflow() -> list[Device]:
    import tensorflow as tf

    listed = []
    for device in tf.config.list_physical_devices():
        kind, details = device.device_type, {}
        if kind == "GPU":
            details = tf.config.experimental.get_device_details(device)
        name = details.get("device_name", device.name)
        capability = _capability(details.get("compute_capability"))
        listed.append(describe(kind, name, "tensorflow", capability))
    return listed


def _read_jax() -> list[Device]:
    import jax

    kinds = {"gpu": "GPU", "cuda": "GPU", "rocm": "GPU", "tpu": "TPU"}
    return [
        describe(
            kinds.get(device.platform.lower(), device.platform.upper()),
            device.device_kind,
            "jax",
            _capability(getattr(device, "compute_capability", None)),
        )
        for device in jax.local_devices()
    ]


def _capability(value: object) -> tuple[int, int] | None:
    """Reads a capability: TensorFlow returns `(8, 0)`, JAX `"8.0"`."""
    numbers = [*map(int, re.findall(r"\d+", str(value)))]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None
