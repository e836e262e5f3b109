"""All faults, in the order of the table."""

import keras

from benchmarks.fault_cases import (
    custom_loop,
    fitting,
    float8_layers,
    policies,
    replicas,
    saved_state,
    scale_range,
    sparse,
    workers,
)
from benchmarks.fault_cases.record import Fault

_MODULES = (
    *(replicas, workers, scale_range, fitting, sparse, saved_state),
    *(policies, custom_loop, float8_layers),
)
FAULTS = [
    value
    for module in _MODULES
    for value in vars(module).values()
    if isinstance(value, Fault)
]


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
