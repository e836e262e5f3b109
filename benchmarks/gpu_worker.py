"""Measures a row of `benchmarks.gpu` in a separate process.

    python -m benchmarks.gpu_worker MODEL LIBRARY PRECISION OPTIMIZER LOCK \
        UNTIL full|tiny

It imports and builds everything in parallel to other rows. The process with the
file lock has the GPU, for the first step and for the timing. After UNTIL, in
seconds since 1970, nothing is measured and the answer is `None`. With `device`
as the only argument, the answer is the GPU's name.
"""

import contextlib
import fcntl
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

# Several rows have weights on the device, so each only allocates what it needs.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

from benchmarks import answers

RUNS, STEPS, TINY_STEPS = 5, 20, 2
UNCHECKED = "adam, unchecked"
LOW_MEMORY = "LowMemoryOptimizer"


class Session(Protocol):
    """A model that is ready to train.

    Attributes:
        weights: Integer, the number of weights.
    """

    weights: int

    def train(self, steps: int) -> float:
        """Runs steps, waits for them, and returns a loss."""

    def peak(self) -> int | None:
        """Returns the most bytes that were in use, `None` without a GPU."""


class KerasSession:
    """A model that trains with `fit`, under a policy of Keras or tfmix."""

    def __init__(
        self,
        model: str,
        library: str,
        precision: str,
        optimizer: str,
        tiny: bool,
    ) -> None:
        import keras

        from benchmarks import gpu_models

        task = gpu_models.task(model, tiny)
        adam: Any = keras.optimizers.Adam(1e-4)
        if library == "tfmix":
            import tfmix

            tfmix.set_global_policy(precision)
            if optimizer == LOW_MEMORY:
                adam = tfmix.optimizers.LowMemoryOptimizer(adam)
        else:
            policy = precision.replace("float8", "bfloat16")
            keras.config.set_dtype_policy(policy)
        if precision == "float32" and keras.backend.backend() == "jax":
            import jax

            jax.config.update("jax_default_matmul_precision", "tensorfloat32")
        keras.utils.set_random_seed(0)
        self.model = task.build(**task.sizes)
        if library == "keras" and precision == "mixed_float8":
            with warnings.catch_warnings():
                # Keras warns about each layer that has nothing to quantize.
                warnings.simplefilter("ignore")
                self.model.quantize("float8")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(adam, loss)
        if optimizer == UNCHECKED:
            # `compile` has wrapped it.
            self.model.optimizer = adam
        self.batch = task.batch_of_all()
        self.weights = self.model.count_params()

    def train(self, steps: int) -> float:
        """Runs steps of `fit`; returns their mean loss."""
        history = self.model.fit(
            self._batches(steps),
            steps_per_epoch=steps,
            verbose=0,
            shuffle=False,
        ).history
        return history["loss"][0]

    def _batches(self, steps: int) -> Any:
        import keras

        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            one = tf.data.Dataset.from_tensors(self.batch)
            return one.repeat(steps).prefetch(2)
        return self._repeated(steps)

    def _repeated(self, steps: int) -> Iterator[Any]:
        for _ in range(steps):
            yield self.batch

    def peak(self) -> int | None:
        """Returns the most bytes that were in use, `None` without a GPU."""
        import keras

        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            if not tf.config.list_logical_devices("GPU"):
                return None
            return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
        import jax

        stats = jax.local_devices()[0].memory_stats() or {}
        return stats.get("peak_bytes_in_use")


def session(
    model: str, library: str, precision: str, optimizer: str, tiny: bool
) -> Session:
    """Builds the session of a row."""
    if library == "torch":
        from benchmarks import gpu_torch

        return gpu_torch.Session(precision, tiny)
    if library == "by hand":
        from benchmarks import gpu_reference

        return gpu_reference.Session(tiny)
    return KerasSession(model, library, precision, optimizer, tiny)


def measure(made: Session, steps: int) -> dict[str, Any]:
    """Measures a session that has not trained yet; returns its row."""
    begun = time.perf_counter()
    losses = [made.train(1)]
    first = time.perf_counter() - begun
    # The second call may create things once more.
    losses.append(made.train(1))
    second = time.perf_counter() - begun - first
    took = []
    for _ in range(RUNS):
        start = time.perf_counter()
        losses.append(made.train(steps))
        took.append(1e3 * (time.perf_counter() - start) / steps)
    peak = made.peak()
    return {
        "first step, s": round(first, 2),
        "second step, s": round(second, 2),
        "ms": round(statistics.median(took), 3),
        "least ms": round(min(took), 3),
        "most ms": round(max(took), 3),
        "peak, GB": None if peak is None else round(peak / 1e9, 2),
        "weights": made.weights,
        "losses": [round(float(loss), 4) for loss in losses],
    }


@contextlib.contextmanager
def alone(lock: str) -> Iterator[None]:
    """Locks the GPU: only one process at a time holds the same file."""
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def gpu_name() -> str | None:
    """Returns the GPU's name and compute capability, `None` without one."""
    from tfmix.policy.devices import devices

    for device in devices():
        if device.kind == "GPU":
            capability = device.compute_capability or ()
            return f"{device.name} {'.'.join(map(str, capability))}".strip()
    return None


def main() -> None:
    """Answers the question of the command line."""
    if sys.argv[1] == "device":
        answers.answer(gpu_name())
        return
    *row, lock, until, size = sys.argv[1:]
    begun = time.perf_counter()
    made = session(*row, tiny=size == "tiny")
    built = round(time.perf_counter() - begun, 1)
    with alone(lock):
        if time.time() > float(until):
            answers.answer(None)
            return
        held = time.perf_counter()
        found = measure(made, TINY_STEPS if size == "tiny" else STEPS)
        held = round(time.perf_counter() - held, 1)
    from benchmarks import gpu_models

    answers.answer(
        {
            "title": gpu_models.task(row[0]).title,
            **found,
            "build, s": built,
            "on the GPU, s": held,
        }
    )


if __name__ == "__main__":
    main()
