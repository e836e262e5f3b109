"""The fault that needs several devices under JAX (`keras.distribution`)."""

from typing import Any

import keras
import numpy as np

from benchmarks.fault_cases import fitting, words
from benchmarks.fault_cases.record import Outcome, fault


@fault(("jax",))
def nan_on_one_device(system: Any) -> Outcome:
    """NaN in the rows of 1 of 8 devices (DataParallel)."""
    devices = keras.distribution.list_devices()
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=devices)
    )
    try:
        model = fitting.compiled(system)
        loss = fitting.fit(model, *fitting.data(np.nan)).history["loss"][0]
    finally:
        keras.distribution.set_distribution(before)
    skipped = words.skipped(model.optimizer, fitting.BATCHES)
    alive = words.finite(model.variables) and bool(np.isfinite(loss))
    return Outcome(
        alive and skipped == 1,
        f"{words.weights(model.trainable_variables)} on {len(devices)} "
        f"devices, {words.progress(model.optimizer, fitting.BATCHES)}, loss "
        f"{loss:.3g}",
    )


FAULTS = (nan_on_one_device,)
