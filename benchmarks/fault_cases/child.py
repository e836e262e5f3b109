"""Runs faults one after the other and prints a line before and after each.

python -m benchmarks.fault_cases.child NAME:SYSTEM [NAME:SYSTEM ...]
"""

import dataclasses
import json
import os
import sys

# A child's messages start with this. Other lines are ignored.
MARK = "@fault "

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
_JAX_DEVICES = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_JAX_DEVICES}"


def split_the_cpu() -> None:
    """Splits the CPU into two devices for TensorFlow; JAX has eight already."""
    import keras

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )


def main(pairs: list[str]) -> None:
    """Runs `NAME:SYSTEM` pairs in order."""
    split_the_cpu()
    from benchmarks.fault_cases import catalogue, systems

    for pair in pairs:
        name, system = pair.rsplit(":", 1)
        _say({"starts": pair})
        outcome = catalogue.by_name(name).run(systems.by_name(system))
        _say({"ends": pair, **dataclasses.asdict(outcome)})


def _say(message: dict) -> None:
    print(MARK + json.dumps(message), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
