"""Measures the rise of this process's resident set (Linux)."""

import pathlib
from typing import Any

_STATUS = pathlib.Path("/proc/self/status")
_RESET = pathlib.Path("/proc/self/clear_refs")


class Peak:
    """Measures the rise of the kernel's peak inside a `with` block.

    Attributes:
        megabytes: The rise over the size at the entry; set at the exit.
    """

    megabytes = 0.0

    def __enter__(self) -> "Peak":
        self._before = _megabytes("VmRSS")
        # Writing 5 resets the peak to the current size.
        _RESET.write_text("5")
        return self

    def __exit__(self, *_: Any) -> None:
        self.megabytes = _megabytes("VmHWM") - self._before


def _megabytes(field: str) -> float:
    (line,) = (
        line
        for line in _STATUS.read_text().splitlines()
        if line.startswith(f"{field}:")
    )
    return int(line.split()[1]) / 1024
