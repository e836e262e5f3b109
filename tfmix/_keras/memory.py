"""Measures the device memory of a process, where the device reports it."""

import keras


def peak() -> int | None:
    """Returns the most bytes used on the first accelerator so far, if known."""
    if keras.backend.backend() == "jax":
        import jax

        stats = jax.local_devices()[0].memory_stats() or {}
        return stats.get("peak_bytes_in_use")
    import tensorflow as tf

    if not tf.config.list_logical_devices("GPU"):
        return None
    peak: int = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return peak
