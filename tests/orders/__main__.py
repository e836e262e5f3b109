"""Random orders of actions on a model, and laws that no order may break.

python -m tests.orders [--count 2000] [--seed 0] [--replicas 2]
                       [--modes eager graph xla] [--order JSON]

Prints each failing order, shrunk, as a line for `--order`, and a summary.
KERAS_BACKEND=jax runs the same orders under JAX.
"""

import argparse
import functools
import sys
import time

import keras

from tests.orders.order import TENSORFLOW, Order
from tests.orders.running import run, run_many


def _split_the_cpu():
    if TENSORFLOW:
        import tensorflow as tf

        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )


def main(arguments=None):
    """Runs orders from the command line; returns 1 if any breaks a law."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=("eager", "graph", "xla"))
    parser.add_argument("--order", help="one order, as printed")
    parser.add_argument("--no-shrink", action="store_true")
    asked = parser.parse_args(arguments)
    _split_the_cpu()
    if asked.order:
        run(Order.parse(asked.order))
        print("no law is broken")
        return 0
    start = time.monotonic()
    found = run_many(
        asked.count,
        asked.seed,
        asked.replicas,
        asked.modes,
        functools.partial(print, flush=True),
        not asked.no_shrink,
    )
    for kind, cases in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(cases):5} x {kind}")
    failures = sum(map(len, found.values()))
    print(
        f"{keras.backend.backend()}, {asked.replicas} replica(s), seed "
        f"{asked.seed}: {asked.count} orders, {failures} failed in "
        f"{len(found)} ways, {time.monotonic() - start:.0f} s"
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
