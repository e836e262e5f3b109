"""Describes the machine and the versions of a measurement."""

import importlib.metadata
import os
import pathlib
import platform
import re

_PACKAGES = ("tfmix", "keras", "tensorflow", "tensorflow-cpu", "jax", "numpy")


def describe() -> dict[str, object]:
    """Returns the processor, its cores and the memory of this machine.

    `load` is the load average of the last minute, which shows what else was
    running when the measurement began.
    """
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(_memory_bytes() / 1e9),
        "system": f"{platform.system()} {platform.machine()}",
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
    """Returns the load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def _cpu() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown"
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return match[1].strip() if match else "unknown"


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
