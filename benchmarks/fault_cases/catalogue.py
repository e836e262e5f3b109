"""All faults, in the order of the table."""

import keras

from benchmarks.fault_cases import (
    custom_loop,
    fitting,
    policies,
    replicas,
    saved_state,
    scale_range,
    sparse,
    workers,
)
from benchmarks.fault_cases.record import Fault

FAULTS = (
    *replicas.FAULTS,
    *workers.FAULTS,
    *scale_range.FAULTS,
    *fitting.FAULTS,
    *sparse.FAULTS,
    *saved_state.FAULTS,
    *policies.FAULTS,
    *custom_loop.FAULTS,
)


def on_this_backend() -> list[Fault]:
    """Returns the faults that can be provoked on Keras's current backend."""
    backend = keras.backend.backend()
    return [fault for fault in FAULTS if backend in fault.backends]


def by_name(name: str) -> Fault:
    """Returns the fault of that name.

    Raises:
        ValueError: If there is none.
    """
    for fault in FAULTS:
        if fault.name == name:
            return fault
    known = [fault.name for fault in FAULTS]
    raise ValueError(
        f"There is no fault {name!r}. Received: --only {name}. "
        f"Known are {known}."
    )
