"""Measures pretrained networks in 16 bit: outputs, fine-tuning, memory.

python -m benchmarks.pretrained [--json] [--save=docs]

It needs the packages of `make pretrained`, and XLA's compiler for NVIDIA (the
extra `[nvidia]`, or `make targets`), which counts the memory on an H200.
"""

import importlib.metadata
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import keras
from absl import logging

import tfmix
from benchmarks import (
    compiled,
    compiled_tensorflow,
    pretrained_networks,
    results,
)
from tfmix.tools.hardware import compilers
from tfmix.tools.hardware import target as targets

TARGET = "h200"
POLICIES = ("mixed_float16", "mixed_bfloat16")
LOOPS = {"fit": "fit", "loop": "graph"}


class _Training(keras.layers.Layer):
    """Calls a network in training mode, in which HED has other outputs."""

    def __init__(self, network: keras.Model) -> None:
        super().__init__(dtype="float32")
        self.network = network

    def call(self, inputs: Any) -> Any:
        found = self.network(inputs, training=True)
        # A model's outputs would be float32, but this one is inside another.
        return keras.tree.map_structure(
            lambda one: keras.ops.cast(one, "float32"), found
        )


def peak(name: str, policy: str) -> float:
    """Returns the peak memory of a step of `fit` in MB, by its compiler."""
    one = pretrained_networks.task(name)
    with tfmix.policy_scope(policy):
        inputs = keras.tree.map_structure(
            lambda array: keras.Input(array.shape[1:], dtype="float32"), one.x
        )
        model = keras.Model(inputs, _Training(one.make())(inputs))
        model.compile(keras.optimizers.Adam(one.rate), loss=one.losses)
    device = compilers.device(targets.find(TARGET))
    step = compiled_tensorflow.training_step(model, len(one.y[0]), device)
    return (step.arguments + step.extra) / 1e6


def short(policy: str) -> str:
    """Returns the dtype of a policy, for a column."""
    return policy.removeprefix("mixed_")


def row(name: str) -> dict[str, Any]:
    """Measures one network; errors are in percent of float32's results."""
    one = pretrained_networks.task(name)
    found: dict[str, Any] = {
        "network": name,
        "M weights": one.make().count_params() / 1e6,
    }
    for policy in POLICIES:
        error = pretrained_networks.output_error(name, policy)
        found[f"output, {short(policy)}"] = 100 * error
    for title, mode in LOOPS.items():
        expected = pretrained_networks.tuned(name, "float32", mode)
        for policy in POLICIES:
            losses = pretrained_networks.tuned(name, policy, mode)
            share = pretrained_networks.apart(losses, expected)
            found[f"{title}, {short(policy)}"] = 100 * share
    for policy in ("float32", *POLICIES):
        found[f"MB, {short(policy)}"] = peak(name, policy)
    return found


def table() -> results.Table:
    """Measures all networks."""
    found = results.track(pretrained_networks.NAMES, "networks")
    return results.Table("Mixed policies against float32", [*map(row, found)])


FLAGS = results.flag_values()


def main() -> None:
    """Parses, measures, prints."""
    results.parse(FLAGS)
    names = pretrained_networks.NAMES
    lacking = {o for name in names for o in pretrained_networks.missing(name)}
    if lacking:
        logging.error(
            "nothing measured: there is no %s. `make pretrained "
            "VENV=.venv-targets` installs all.",
            ", ".join(sorted(lacking)),
        )
    elif compiled.compilers_there(TARGET):
        shipped = map(pretrained_networks.package, names)
        versions = {one: importlib.metadata.version(one) for one in shipped}
        how = f"{pretrained_networks.STEPS} steps of Adam on one batch"
        results.measure("pretrained", FLAGS, lambda: [table()], how, versions)


if __name__ == "__main__":
    results.start(main, FLAGS)
