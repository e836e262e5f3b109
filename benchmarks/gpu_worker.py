"""A worker of `benchmarks.gpu`: one model in one precision, under `fit`."""

import functools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Several workers share the device; each takes what it needs.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import keras

import tfmix
from benchmarks import gpu_models, turns
from tfmix.policy.devices import devices

# Name: the policy, and what goes around Adam.
PRECISIONS = {
    "float32": ("float32", None),
    "float32, TF32": ("float32", None),
    "mixed_float16": ("mixed_float16", tfmix.LossScaleOptimizer),
    "mixed_bfloat16": ("mixed_bfloat16", None),
    "bfloat16, masters": ("bfloat16", tfmix.optimizers.MasterWeightOptimizer),
}
# What is measured against mixed_float16 as it is.
VARIANTS = ("no loss scaling", "LossScaleMonitor", "NumericsMonitor")
_EVERY = 100
_MATMUL_SIZE = 8192
_TINY_MATMUL_SIZE = 64


class Session:
    """Answers requests on one model; `ask` is the name of what to do."""

    def __init__(self, model: str, precision: str, tiny: bool) -> None:
        self._task = gpu_models.task(model, tiny)
        self._precision = precision
        self._tiny = tiny

    def ask(self, what: str, steps: int = 1, variant: str = "") -> Any:
        """Returns seconds per step, the peak, operations or a rate.

        Args:
            what: `"seconds"`, `"peak"`, `"flops"` or `"matmul"`.
            steps: How many to take.
            variant: One of `VARIANTS`, or empty.
        """
        if what == "seconds":
            return self._seconds(steps, variant)
        if what == "peak":
            return peak_bytes()
        if what == "flops":
            return self._flops()
        return matmul_rate(_TINY_MATMUL_SIZE if self._tiny else _MATMUL_SIZE)

    @functools.cached_property
    def _batch(self) -> tuple[Any, Any]:
        return self._task.batch(self._task.batch_size, **self._task.sizes)

    @functools.cached_property
    def _model(self) -> keras.Model:
        return self._made(scaled=True)

    @functools.cached_property
    def _unscaled(self) -> keras.Model:
        return self._made(scaled=False)

    @functools.cached_property
    def _monitors(self) -> dict[str, Any]:
        made = tfmix.callbacks
        return {
            "LossScaleMonitor": made.LossScaleMonitor(),
            "NumericsMonitor": made.NumericsMonitor(_EVERY),
        }

    def _made(self, scaled: bool) -> keras.Model:
        policy, around = PRECISIONS[self._precision]
        keras.utils.set_random_seed(0)
        optimizer: Any = keras.optimizers.Adam(1e-4)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with tfmix.policy_scope(policy):
            model = self._task.build(**self._task.sizes)
            if scaled:
                wrapped = around(optimizer) if around else optimizer
                model.compile(wrapped, loss)
        if not scaled:
            model.compile(optimizer, loss, auto_scale_loss=False)
        return model

    def _seconds(self, steps: int, variant: str) -> float:
        model = self._unscaled if variant == VARIANTS[0] else self._model
        monitors = [self._monitors[variant]] if variant in VARIANTS[1:] else []
        start = time.perf_counter()
        model.fit(
            self._batches(steps),
            steps_per_epoch=steps,
            verbose=0,
            callbacks=monitors,
            shuffle=False,
        )
        return (time.perf_counter() - start) / steps

    def _batches(self, steps: int) -> Any:
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            one = tf.data.Dataset.from_tensors(self._batch)
            return one.repeat(steps).prefetch(2)
        return self._repeated(steps)

    def _repeated(self, steps: int) -> Iterator[Any]:
        for _ in range(steps):
            yield self._batch

    def _flops(self) -> int:
        # The backward pass multiplies twice where the forward pass does once.
        rows = tfmix.hardware.advise(self._model, self._task.batch_size).rows
        return 3 * sum(row.flops for row in rows)


def matmul_rate(size: int, repeats: int = 30) -> float:
    """Returns the device's bfloat16 matrix product rate, in FLOP/s."""
    square = keras.ops.full((size, size), 1e-3, dtype="bfloat16")
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        multiply = tf.function(tf.matmul, jit_compile=True)
    else:
        import jax

        multiply = jax.jit(jax.numpy.matmul)
    _waited_for(multiply(square, square))
    start = time.perf_counter()
    product = square
    for _ in range(repeats):
        product = multiply(product, square)
    # The last needs all the others.
    _waited_for(product)
    return 2 * size**3 * repeats / (time.perf_counter() - start)


def _waited_for(product: Any) -> float:
    return float(keras.ops.cast(product[0, 0], "float32"))


def peak_bytes() -> int | None:
    """Returns the most that was in use on the GPU, `None` without one."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        if not tf.config.list_logical_devices("GPU"):
            return None
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def gpu_name() -> str | None:
    """Returns the GPU's name and compute capability, `None` without one."""
    for device in devices():
        if device.kind == "GPU":
            capability = device.compute_capability or ()
            return f"{device.name} {'.'.join(map(str, capability))}".strip()
    return None


def set_tf32(precision: str) -> None:
    """Turns TF32 off for plain float32 and on for the rest, in this process."""
    on = precision != "float32"
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.experimental.enable_tensor_float_32_execution(on)
        return
    import jax

    # `highest` is full float32; 16-bit products are not touched by either.
    value = "tensorfloat32" if on else "highest"
    jax.config.update("jax_default_matmul_precision", value)


def main() -> None:
    """Serves one model in one precision, as the command line names them."""
    model, precision = sys.argv[1:3]
    if precision == "device":
        turns.serve(gpu_name)
        return
    if precision == "hand-written":
        from benchmarks import gpu_reference

        turns.serve(gpu_reference.Session(tiny=False).ask)
        return
    set_tf32(precision)
    turns.serve(Session(model, precision, tiny=False).ask)


if __name__ == "__main__":
    main()
