"""A training loop of one's own: fixed scale, dynamic scale, all in one.

The same network learns scikit-learn's scanned digits from each seed in
float32, then with 16-bit compute under a fixed scale, under a dynamic one, and
with everything an update can need in one object: gradients accumulated over
two batches and summed over two replicas, checked, unscaled, decayed and
clipped. The last one's twin is the same object in float32.

    python examples/training_loop.py --epochs=8 --seeds=3

takes half a minute on two cores, under TensorFlow or KERAS_BACKEND=jax.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import tfmix
from tfmix.examples import common, recipe, updater

BATCH_SIZE, EPOCHS, REPLICAS = 64, 8, 2
# From 2**24, the ceiling of a loss scale, to 1 are 24 halvings; none is needed.
RETRIES = 24
LEAST_ACCURACY = 0.93
# Grows each few steps instead of 2,000, so that a short run sees every scale.
SEARCH = tfmix.DynamicLossScale(initial_scale=8.0, growth_steps=6)
UPDATE = {
    "gradient_accumulation_steps": 2,
    "weight_decay": 1e-4,
    "global_clipnorm": 5.0,
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to train."""

    policy: str
    rule: Any  # what `LossScaleOptimizer(loss_scale=...)` takes
    all_in_one: bool = False
    twin: str = "float32"


VARIANTS = {
    "float32": Variant("float32", tfmix.NoLossScale()),
    "fixed scale": Variant("mixed_float16", 8.0),
    "dynamic scale": Variant("mixed_float16", SEARCH),
    "all in one, float32": Variant(
        "float32", tfmix.NoLossScale(), True, "all in one, float32"
    ),
    "all in one": Variant(
        "mixed_float16",
        # The highest there is, which changes nothing inside a model.
        tfmix.DynamicLossScale(initial_scale=2.0**24),
        True,
        "all in one, float32",
    ),
}


def build_model() -> keras.Model:
    """Builds the network under the policy that is in force."""
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
            tfmix.float32_output("softmax"),
        ]
    )


def make_updater(variant: Variant) -> updater.Updater:
    """Builds a network and what trains it."""
    with tfmix.policy_scope(variant.policy):
        model = build_model()
    update = UPDATE if variant.all_in_one else {}
    # The mean over k batches takes the k-fold step, k times less often.
    rate = 0.1 * update.get("gradient_accumulation_steps", 1)
    inner = keras.optimizers.SGD(rate, momentum=0.9, **update)
    return updater.Updater(
        model,
        tfmix.LossScaleOptimizer(inner, loss_scale=variant.rule),
        keras.losses.SparseCategoricalCrossentropy(),
        retries=RETRIES if variant.all_in_one else 0,
    )


def batches(
    data: tuple[np.ndarray, ...], seed: int, epochs: int
) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Yields the shuffled batches of each epoch."""
    inputs, _, labels, _ = data
    random = np.random.default_rng(seed)
    for _ in range(epochs):
        order = random.permutation(len(inputs))
        whole = len(order) // BATCH_SIZE
        parts = order[: whole * BATCH_SIZE].reshape(whole, BATCH_SIZE)
        yield [(inputs[rows], labels[rows]) for rows in parts]


def train(name: str, seed: int, epochs: int, tick: recipe.Ticker) -> common.Run:
    """Trains and tests one network."""
    variant, data = VARIANTS[name], common.digits()
    scope = replicas if variant.all_in_one else contextlib.nullcontext
    losses, scales, applied = [], [], []
    with scope():
        training = make_updater(variant)
        optimizer = training.optimizer
        for epoch in batches(data, seed, epochs):
            total = 0.0
            for x, y in epoch:
                loss, stepped = training.update(x, y)
                total += loss
                applied.append(stepped)
                scales.append(optimizer.loss_scale)
            optimizer.check_health()
            losses.append(total / len(epoch))
            tick(losses[-1])
        outputs = keras.ops.convert_to_numpy(training.model(data[1]))
    return common.Run(
        variant=name,
        seed=seed,
        score=float(np.mean(outputs.argmax(axis=-1) == data[3])),
        twin=variant.twin,
        losses=tuple(losses),
        columns={
            "lost\nbatches": len(applied) - sum(applied),
            "skipped\nsteps": optimizer.skipped_steps,
            "final\nscale": f"2^{np.log2(scales[-1]):g}",
        },
        curve=tuple(scales),
    )


@contextlib.contextmanager
def replicas() -> Iterator[None]:
    """Trains what is built inside on several devices at once."""
    if keras.backend.backend() == "jax":
        import jax

        before = keras.distribution.distribution()
        devices = [str(one) for one in jax.devices()[:REPLICAS]]
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(devices=devices)
        )
        try:
            yield
        finally:
            keras.distribution.set_distribution(before)
    else:
        with strategy().scope():
            yield


def strategy() -> Any:
    """Returns the strategy of TensorFlow; made once, as it should be."""
    import tensorflow as tf

    if not _STRATEGY:
        names = [f"CPU:{number}" for number in range(REPLICAS)]
        _STRATEGY.append(tf.distribute.MirroredStrategy(names))
    return _STRATEGY[0]


_STRATEGY: list[Any] = []


def split_cpu() -> None:
    """Makes several devices of the CPU; before anything is computed."""
    if keras.backend.backend() == "jax":
        flag = f"--xla_force_host_platform_device_count={REPLICAS}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
        return
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    )


def claims(runs: tuple[common.Run, ...]) -> dict[str, bool]:
    """Returns what the example says, and whether it came true."""
    return {
        **common.sound(runs, LEAST_ACCURACY),
        "no batch is lost, at whatever scale": not any(
            run.columns["lost\nbatches"] for run in runs
        ),
    }


RECIPE = recipe.Recipe(
    __doc__,
    list(VARIANTS),
    train,
    claims,
    length=("epochs", EPOCHS, "Passes over the data."),
    picture=("training_loop", "Digits, a loop of one's own"),
    curve="loss scale",
)


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; returns 1 if a claim is false."""
    split_cpu()
    return RECIPE.main(argv)


if __name__ == "__main__":
    sys.exit(main())
