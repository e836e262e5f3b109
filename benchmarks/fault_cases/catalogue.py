"""All faults, in the order of the table."""

import keras

from benchmarks.fault_cases import (
    custom_loop,
    existing_models,
    fitting,
    float8_layers,
    jax_replicas,
    policies,
    replicas,
    saved_state,
    scale_range,
    sparse,
    true_gradients,
    workers,
)
from benchmarks.fault_cases.record import Fault

FAULTS = (
    *replicas.FAULTS,
    *workers.FAULTS,
    *jax_replicas.FAULTS,
    *scale_range.FAULTS,
    *fitting.FAULTS,
    *sparse.FAULTS,
    *saved_state.FAULTS,
    *policies.FAULTS,
    *existing_models.FAULTS,
    *custom_loop.FAULTS,
    *true_gradients.FAULTS,
    *float8_layers.FAULTS,
)


def on_this_backend() -> list[Fault]:
    """Returns the faults that can be provoked on Keras's current backend."""
    backend = keras.backend.backend()
    return [fault for fault in FAULTS if backend in fault.backends]


def by_name(name: str) -> Fault:
    """Returns the fault of that name.

    Raises:
        ValueError: If this backend has none of that name.
    """
    faults = {fault.name: fault for fault in on_this_backend()}
    if name not in faults:
        raise ValueError(
            f"There is no such fault on {keras.backend.backend()}. Received: "
            f"{name!r}. There are {sorted(faults)}."
        )
    return faults[name]
