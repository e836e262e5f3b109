"""`environment` lists the facts that a bug report needs."""

import dataclasses
import importlib.metadata
import inspect
import platform

import keras

from tfmix import _tables
from tfmix._keras import replacing
from tfmix.autocast import global_policy
from tfmix.tools.hardware.device_table import devices

_PACKAGES = ("tensorflow", "tensorflow-cpu", "jax", "numpy")


@dataclasses.dataclass(frozen=True)
class Environment(_tables.Printed):
    """The result of `environment`; prints as a table.

    Attributes:
        facts: The versions of Python, tfmix and its dependencies, the platform,
            the backend, its devices, the policy `"auto"` there, the active
            policy, and the names that tfmix replaces at the moment, as text.
    """

    facts: dict[str, str]

    def tables(self) -> list[_tables.Table]:
        """Returns what to print."""
        return [_tables.Table(("what", "is"), [*self.facts.items()])]


def environment() -> Environment:
    """Lists versions, backend, devices, policy, and replaced names of Keras.

    Paste it into a bug report. `tfmix doctor` prints the same from a shell.

    Returns:
        An `Environment`, which prints as a table.

    Examples:
        >>> environment().facts["backend"] in ("tensorflow", "jax")
        True
    """
    available = devices()
    return Environment(
        {
            **_versions(),
            "backend": keras.backend.backend(),
            "devices": ", ".join(device.name for device in available),
            "auto": available.auto(),
            "policy": repr(global_policy.global_policy()),
            "replaced": ", ".join(
                sorted(_label(*place) for place in replacing.replaced())
            ),
        }
    )


def _versions() -> dict[str, str]:
    packages = {
        "tfmix": _version("tfmix"),
        # The package of Keras may be `keras-nightly`, so Keras is asked.
        "keras": keras.__version__,
        **{name: _version(name) for name in _PACKAGES},
    }
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: version for name, version in packages.items() if version},
    }


def _version(package: str) -> str:
    """Returns the version of a package, "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _label(owner: object, name: str) -> str:
    parent = f"{owner.__module__}." if inspect.isclass(owner) else ""
    return f"{parent}{getattr(owner, '__name__', owner)}.{name}"
