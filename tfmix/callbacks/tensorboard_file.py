"""Scalars for TensorBoard, without the TensorBoard package."""

import os
from typing import Any

import keras


def refuse_other_backends(log_dir: Any) -> None:
    """Says before the training what cannot work."""
    if not isinstance(log_dir, str | os.PathLike):
        raise TypeError(
            "`log_dir` must be the path of a directory, or None. "
            f"Received: log_dir={log_dir!r}."
        )
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "`log_dir` needs Keras's TensorFlow backend, which writes the "
            f"TensorBoard files. Received: log_dir={log_dir!r} on the "
            f"{keras.backend.backend()!r} backend. Leave `log_dir` out and "
            "use keras.callbacks.CSVLogger, or the monitor's `timeline`."
        )


class EventFile:
    """Writes named numbers to a new TensorBoard event file in `log_dir`."""

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        import tensorflow as tf

        self._writer = tf.summary.create_file_writer(os.fspath(log_dir))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Adds one point to the curve of each name."""
        import tensorflow as tf

        # `tf.summary.scalar` is part of the TensorBoard package; this call is
        # TensorFlow's own and marks the numbers for the same plugin.
        metadata = tf.compat.v1.SummaryMetadata()
        metadata.plugin_data.plugin_name = "scalars"
        with self._writer.as_default():
            for name, number in numbers.items():
                value = tf.constant(number, tf.float32)
                tf.summary.write(name, value, step=step, metadata=metadata)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()
