"""Uses a model for the first time, in a process of its own.

python -m benchmarks.first_use_worker SYSTEM POLICY MODEL
"""

import sys
import time
from collections.abc import Callable

import keras
import numpy as np
from keras import layers

from benchmarks import answers


def few() -> list[keras.layers.Layer]:
    """Returns a small network with statistics."""
    wide, narrow = layers.Dense(32, "relu"), layers.Dense(16, "relu")
    return [wide, layers.BatchNormalization(), narrow]


def many() -> list[keras.layers.Layer]:
    """Returns a network that is traced for long."""
    return [layers.Dense(32, "relu") for _ in range(100)]


MODELS: dict[str, Callable[[], list]] = {
    "two Dense, BatchNormalization": few,
    "100 Dense": many,
}


def seconds(system: str, policy: str, name: str) -> dict[str, float]:
    """Returns the CPU time of each part of the first use, in seconds.

    Args:
        system: "Keras" or "tfmix".
        policy: The name of the policy.
        name: The model's.
    """
    found = {}

    def timed(part: str, run: Callable[[], object]) -> None:
        begun = time.process_time()
        run()
        found[part] = time.process_time() - begun

    if system == "tfmix":
        import tfmix

        tfmix.set_global_policy(policy)
    else:
        keras.mixed_precision.set_dtype_policy(policy)
    made = MODELS[name]()
    model = keras.Sequential([keras.Input((8,)), *made, layers.Dense(1)])
    x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
    y = x[:, :1]
    timed("compile", lambda: model.compile("adam", "mse"))
    timed("fit", lambda: model.fit(x, y, batch_size=64, verbose=0))
    timed("evaluate", lambda: model.evaluate(x, y, batch_size=64, verbose=0))
    timed("predict", lambda: model.predict(x, batch_size=64, verbose=0))
    return {**found, "together": sum(found.values())}


if __name__ == "__main__":
    answers.answer(seconds(*sys.argv[1:]))
