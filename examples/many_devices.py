"""One bad replica among many: all of them skip the step, and all survive.

The same network learns scikit-learn's scanned digits in mixed float16 on four
logical CPUs (`MirroredStrategy`), in two processes that this script starts
(`MultiWorkerMirroredStrategy`), and on eight simulated devices under JAX
(`DataParallel`). One row of the data is NaN, so in each epoch one replica gets
gradients that are not finite, and the others do not. The twins learn the same
rows on the same devices in float32, with the same check of each step.

    python examples/many_devices.py --seeds=3

takes about a minute on two cores. Each part runs in processes of its own,
since the number of devices and the backend are fixed when TensorFlow or JAX is
imported; each process trains from every seed.
"""

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from rich import progress

import tfmix
from tfmix.examples import common, processes

PARTS = ("mirrored", "two workers", "jax")
REPLICAS = {"mirrored": 4, "two workers": 2, "jax": 8}
POLICIES = ("float32", "mixed_float16")
BATCH_SIZE, EPOCHS, SEEDS = 64, 4, 3
# In the second batch; the shares of all other replicas are sound.
BAD_ROW = BATCH_SIZE + 1
# Four epochs are short: of 18 runs the worst came to 0.907.
LEAST_ACCURACY = 0.85
_DEVICES = "--xla_force_host_platform_device_count"

# Builds a model under a policy; returns it and what trains it.
Make = Callable[[str], tuple[Any, Callable[[], Any]]]


def load() -> tuple[np.ndarray, ...]:
    """Returns training images with the bad row, test images, both's labels."""
    # Whole batches, so that every replica has a share of each.
    train_x, test_x, train_y, test_y = common.digits(BATCH_SIZE)
    train_x[BAD_ROW] = np.nan
    return train_x, test_x, train_y, test_y


def build_model(policy: str) -> keras.Model:
    """Builds the network under a policy."""
    with tfmix.policy_scope(policy):
        return keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(10),
                tfmix.float32_output("softmax"),
            ]
        )


def compiled_model(policy: str) -> keras.Model:
    """Builds the network and compiles it with a check of each step."""
    model = build_model(policy)
    rule = tfmix.NoLossScale() if policy == "float32" else "dynamic"
    model.compile(
        tfmix.LossScaleOptimizer(keras.optimizers.Adam(0.005), loss_scale=rule),
        loss="sparse_categorical_crossentropy",
    )
    model.optimizer.build(model.trainable_variables)
    return tfmix.guard(model)


def mirrored() -> Make:
    """Trains with `fit` on four logical CPUs."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * REPLICAS["mirrored"]
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{n}" for n in range(len(logical))]
    )

    def make(policy: str) -> Any:
        with strategy.scope():
            model = compiled_model(policy)
        return model, lambda: fit(model)

    return make


def jax() -> Make:
    """Trains with `fit` on eight simulated devices."""
    keras.distribution.set_distribution(keras.distribution.DataParallel())

    def make(policy: str) -> Any:
        model = compiled_model(policy)
        return model, lambda: fit(model)

    return make


def worker() -> Make:
    """Trains as one of two workers, on its share of every batch."""
    import tensorflow as tf

    # The strategy has to exist before anything else of TensorFlow runs.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    x, _, y, _ = load()
    share = BATCH_SIZE // REPLICAS["two workers"]
    first = share * strategy.cluster_resolver.task_id

    def make(policy: str) -> Any:
        with strategy.scope():
            model = compiled_model(policy)

        # Keras's `fit` does not run under this strategy.
        @tf.function
        def step(batch: Any) -> None:
            strategy.run(model.train_step, args=(batch,))

        def train() -> None:
            for _ in range(EPOCHS):
                for start in range(first, len(x), BATCH_SIZE):
                    rows = slice(start, start + share)
                    step((x[rows], y[rows]))

        return model, train

    return make


def fit(model: keras.Model) -> None:
    """Trains with Keras's own loop."""
    x, _, y, _ = load()
    model.fit(
        x, y, batch_size=BATCH_SIZE, epochs=EPOCHS, shuffle=False, verbose=0
    )


def train_part(part: str, seeds: int) -> list[dict[str, Any]]:
    """Trains under each policy from each seed, in this process."""
    make = {"mirrored": mirrored, "jax": jax, "two workers": worker}[part]()
    results = []
    for policy in POLICIES:
        model, train = make(policy)
        optimizer = model.optimizer
        start = [variable.numpy() for variable in optimizer.variables]
        for seed in range(seeds):
            # What was compiled for the first seed serves all.
            keras.utils.set_random_seed(seed)
            model.set_weights(build_model(policy).get_weights())
            optimizer.set_weights(start)
            train()
            found = {"policy": policy, "seed": seed, **_result(model)}
            results.append(found)
    return results


def run(
    parts: tuple[str, ...] = PARTS, seeds: int = SEEDS, quiet: bool = False
) -> common.Outcome:
    """Runs the parts, each in fresh processes.

    Args:
        parts: Some of `PARTS`.
        seeds: Runs of each variant.
        quiet: Whether to leave out the progress bar.

    Returns:
        All runs, and what came true.

    Raises:
        RuntimeError: If a process ends without a result, or two that train
            together do not end alike.
    """
    results = {}
    with progress.Progress(disable=quiet) as bar:
        task = bar.add_task("training", total=len(parts))
        for part in parts:
            name = f"{part}, {REPLICAS[part]} replicas"
            bar.update(task, description=name)
            count = REPLICAS[part]
            environment = {
                "KERAS_BACKEND": "jax" if part == "jax" else "tensorflow",
                "XLA_FLAGS": f"{_DEVICES}={count}",
            }
            words = [__file__, f"--part={part}", f"--seeds={seeds}"]
            workers = count if part == "two workers" else 0
            ended = processes.run(part, words, environment, workers)
            results[part] = same(part, ended)
            bar.advance(task)
    runs = [_run(part, one) for part in parts for one in results[part]]
    halves = [f"{part}, mixed_float16" for part in parts]
    claims = {
        "in every epoch all replicas skipped the one bad step, no weight was "
        "hurt, and the network learnt": all(
            survived(one) for part in parts for one in results[part]
        ),
        "16 bit is as good as its float32 twin, within the noise of the "
        "seeds or a point": all(common.close(runs, name) for name in halves),
    }
    return common.Outcome(tuple(runs), claims)


def same(part: str, ended: list[Any]) -> list[dict[str, Any]]:
    """Returns what all processes of a part ended with.

    Each worker averages its own statistics of BatchNormalization; what is
    trained, skipped and scaled must be the same.

    Raises:
        RuntimeError: If it is not.
    """
    keys = ("trained", "skipped_steps", "loss_scale")
    ends = [[[one[key] for key in keys] for one in each] for each in ended]
    if any(end != ends[0] for end in ends):
        raise RuntimeError(f"The processes of {part!r} differ: {ended}")
    return list(ended[0])


def survived(result: dict[str, Any]) -> bool:
    """Says whether a run skipped once per epoch and learnt all the same."""
    return bool(
        result["finite"]
        and result["skipped_steps"] == EPOCHS
        and result["accuracy"] >= LEAST_ACCURACY
    )


def main(argv: list[str] | None = None) -> int:
    """Prints what became of each part; returns 1 if a claim is false."""
    text = f"Train only this part, in this process: one of {PARTS}."
    values = common.parse(argv, __doc__, part=("", text))
    if not values.part:
        return common.finish(run(PARTS, values.seeds, values.quiet))
    processes.report(train_part(values.part, values.seeds))
    return 0


def _run(part: str, result: dict[str, Any]) -> common.Run:
    return common.Run(
        variant=f"{part}, {result['policy']}",
        seed=result["seed"],
        score=result["accuracy"],
        twin=f"{part}, float32",
        columns={
            "steps": result["steps"],
            "skipped\nby all": result["skipped_steps"],
            "scale": f"2^{np.log2(result['loss_scale']):g}",
        },
    )


def _result(model: Any) -> dict[str, Any]:
    _, x, _, y = load()
    weights = [np.asarray(weight) for weight in model.get_weights()]
    outputs = _outputs(weights, x)
    optimizer = model.optimizer
    skipped = optimizer.skipped_steps
    trained = [np.asarray(v) for v in model.trainable_variables]
    return {
        "accuracy": float(np.mean(outputs.argmax(axis=-1) == y)),
        "skipped_steps": skipped,
        "steps": skipped + int(optimizer.iterations.numpy()),
        "loss_scale": optimizer.loss_scale,
        "trained": hashlib.sha256(
            b"".join(values.tobytes() for values in trained)
        ).hexdigest(),
        "finite": all(bool(np.isfinite(weight).all()) for weight in weights),
    }


def _outputs(weights: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    """Computes the network's logits in NumPy, in float32."""
    kernel, bias, gamma, beta, mean, variance, head, head_bias = weights
    hidden = np.maximum(x @ kernel + bias, 0.0)
    # Keras's epsilon of BatchNormalization.
    hidden = (hidden - mean) / np.sqrt(variance + 1e-3) * gamma + beta
    return hidden @ head + head_bias


if __name__ == "__main__":
    sys.exit(main())
