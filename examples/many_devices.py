"""One bad replica among many: all of them skip the step, and all survive.

The same network learns scikit-learn's scanned digits in mixed float16 on four
logical CPUs (`MirroredStrategy`), in two processes that this script starts
(`MultiWorkerMirroredStrategy`), and on eight simulated devices under JAX
(`DataParallel`). One row of the data is NaN, so in each epoch one replica gets
gradients that are not finite, and the others do not.

Run it with `python examples/many_devices.py`; it takes about a minute on two
cores. Each part runs in processes of its own, since the number of devices and
the backend are fixed when TensorFlow or JAX is imported.
"""

import hashlib
import json
import os
import socket
import subprocess
import sys
from typing import Any

import numpy as np

PARTS = ("mirrored", "two workers", "jax")
REPLICAS = {"mirrored": 4, "two workers": 2, "jax": 8}
BATCH_SIZE, EPOCHS = 64, 6
# In the second batch; the shares of all other replicas are sound.
BAD_ROW = BATCH_SIZE + 1
LEAST_ACCURACY = 0.9
_TIMEOUT = 240  # seconds
_RESULT = "RESULT "


def load() -> tuple[np.ndarray, ...]:
    """Returns training images with the bad row, test images, both's labels."""
    from sklearn import datasets, model_selection

    digits = datasets.load_digits()
    train_x, test_x, train_y, test_y = model_selection.train_test_split(
        (digits.data / 16.0).astype("float32"),
        digits.target,
        test_size=0.3,
        stratify=digits.target,
        random_state=0,
    )
    # Whole batches, so that every replica has a share of each.
    rows = len(train_x) // BATCH_SIZE * BATCH_SIZE
    train_x[BAD_ROW] = np.nan
    return train_x[:rows], test_x, train_y[:rows], test_y


def compiled_model() -> Any:
    """Builds and compiles the network in mixed float16."""
    import keras

    import tfmix

    keras.utils.set_random_seed(0)
    tfmix.set_global_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(10),
            tfmix.float32_output("softmax"),
        ]
    )
    # `compile` wraps the optimizer and guards the model by itself.
    model.compile(
        keras.optimizers.Adam(0.005), loss="sparse_categorical_crossentropy"
    )
    return model


def train_mirrored() -> dict[str, Any]:
    """Trains with `fit` on four logical CPUs."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * REPLICAS["mirrored"]
    tf.config.set_logical_device_configuration(cpu, logical)
    names = [f"CPU:{n}" for n in range(len(logical))]
    with tf.distribute.MirroredStrategy(names).scope():
        model = compiled_model()
    return _fitted(model)


def train_jax() -> dict[str, Any]:
    """Trains with `fit` on eight simulated devices."""
    import keras

    keras.distribution.set_distribution(keras.distribution.DataParallel())
    return _fitted(compiled_model())


def train_worker() -> dict[str, Any]:
    """Trains as one of two workers; each gets its share of every batch."""
    import tensorflow as tf

    # The strategy has to exist before anything else of TensorFlow runs.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = compiled_model()

    # Keras's `fit` does not run under this strategy.
    @tf.function
    def step(batch: Any) -> None:
        strategy.run(model.train_step, args=(batch,))

    x, _, y, _ = load()
    share = BATCH_SIZE // REPLICAS["two workers"]
    first = share * strategy.cluster_resolver.task_id
    for _ in range(EPOCHS):
        for start in range(first, len(x), BATCH_SIZE):
            rows = slice(start, start + share)
            step((x[rows], y[rows]))
    return _result(model)


def run(parts: tuple[str, ...] = PARTS) -> dict[str, dict[str, Any]]:
    """Runs the parts, each in fresh processes.

    Args:
        parts: Some of `PARTS`.

    Returns:
        For each part what it ended with: `accuracy`, `skipped_steps`, `steps`,
        `loss_scale`, `trained` (a hash) and `finite`.

    Raises:
        RuntimeError: If a process ends without a result.
    """
    return {part: _finished(part, _started(part)) for part in parts}


def survived(result: dict[str, Any]) -> bool:
    """Says whether a part skipped once per epoch and learnt all the same."""
    return bool(
        result["finite"]
        and result["skipped_steps"] == EPOCHS
        and result["accuracy"] >= LEAST_ACCURACY
    )


def main() -> int:
    """Prints what became of each part; returns 1 if one did not survive."""
    if len(sys.argv) > 1:
        trained = {"mirrored": train_mirrored, "jax": train_jax}
        result = trained.get(sys.argv[1], train_worker)()
        print(_RESULT + json.dumps(result), flush=True)
        return 0
    healthy = True
    for part in PARTS:
        print(f"{part}, {REPLICAS[part]} replicas ...", flush=True)
        result = run((part,))[part]
        healthy &= survived(result)
        print(
            f"  {'survived' if survived(result) else 'FAILED'}: accuracy "
            f"{result['accuracy']:.2%}, {result['skipped_steps']} of "
            f"{result['steps']} steps skipped on all replicas, "
            f"loss scale {result['loss_scale']:g}"
        )
    return int(not healthy)


def _fitted(model: Any) -> dict[str, Any]:
    x, _, y, _ = load()
    model.fit(
        x, y, batch_size=BATCH_SIZE, epochs=EPOCHS, shuffle=False, verbose=0
    )
    return _result(model)


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


def _started(part: str) -> list[subprocess.Popen]:
    backend = "jax" if part == "jax" else "tensorflow"
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": "--xla_force_host_platform_device_count="
        f"{REPLICAS['jax']}",
    }
    clusters: list[dict[str, str]] = [{}]
    if part == "two workers":
        workers = [f"127.0.0.1:{port}" for port in _free_ports(2)]
        clusters = [
            {
                "TF_CONFIG": json.dumps(
                    {
                        "cluster": {"worker": workers},
                        "task": {"type": "worker", "index": index},
                    }
                )
            }
            for index in range(len(workers))
        ]
    return [
        subprocess.Popen(
            [sys.executable, __file__, part],
            env={**environment, **cluster},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for cluster in clusters
    ]


def _finished(part: str, processes: list[subprocess.Popen]) -> dict[str, Any]:
    try:
        ended = [process.communicate(timeout=_TIMEOUT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    results = []
    for out, err in ended:
        lines = [line for line in out.splitlines() if line.startswith(_RESULT)]
        if not lines:
            raise RuntimeError(f"{part!r} ended without a result:\n{err}")
        results.append(json.loads(lines[0].removeprefix(_RESULT)))
    # Each worker averages its own statistics of BatchNormalization; what is
    # trained, skipped and scaled must be the same.
    same = ("trained", "skipped_steps", "loss_scale")
    if any(
        result[key] != results[0][key] for result in results for key in same
    ):
        raise RuntimeError(f"The processes of {part!r} differ: {results}")
    return results[0]


def _free_ports(count: int) -> list[int]:
    # All are bound at once, so that no two are the same.
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


if __name__ == "__main__":
    sys.exit(main())
