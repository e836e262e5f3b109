"""Describes the machine and the versions of a measurement."""

import importlib.metadata
import os
import pathlib
import platform
import re

_PACKAGES = ("tfmix", "keras", "tensorflow", "tensorflow-cpu", "jax", "numpy")


def describe() -> dict[str, object]:
    """Returns the processor of this machine and its cores."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
    }


def versions(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Returns the versions of Python and of the packages of a result.

    Args:
        extra: Versions from elsewhere, such as another environment.
    """
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | (extra or {})


def load() -> float:
    """Returns the load average of the last minute: what else was running."""
    return round(os.getloadavg()[0], 2)


def _cpu() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown"
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return match[1].strip() if match else "unknown"
