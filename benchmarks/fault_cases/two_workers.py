"""One of two workers that train together; worker 1 meets a NaN.

python -m benchmarks.fault_cases.two_workers SYSTEM
needs TF_CONFIG in the environment, as for `tf.distribute`.
"""

import json
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

STEPS = 3
_BAD_STEP = 1


def main(system_name: str) -> None:
    """Runs three steps, the second with NaN on worker 1 only."""
    import keras
    import numpy as np
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    # The strategy must be created before other TensorFlow code runs.
    from benchmarks.fault_cases import systems, words

    system = systems.by_name(system_name)
    with strategy.scope():
        weight = system.variable([1.0, 2.0], "weight")
        optimizer = system.wrap(keras.optimizers.SGD(0.1), initial_scale=1024.0)
        optimizer.build([weight])
    bad_worker = strategy.cluster_resolver.task_id == 1

    @tf.function
    def step(gradient: Any) -> None:
        strategy.run(
            lambda g: optimizer.apply([optimizer.scale_loss(g)], [weight]),
            args=(gradient,),
        )

    for number in range(STEPS):
        bad = bad_worker and number == _BAD_STEP
        step(tf.constant([np.nan if bad else 1.0, 1.0]))
    result = {
        "weight": words.to_numpy(weight).tolist(),
        "scale": words.scale(optimizer),
        "skipped": words.skipped(optimizer, STEPS),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
