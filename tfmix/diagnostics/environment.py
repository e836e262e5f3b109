"""What tfmix runs on and has changed: the facts that a bug report needs."""

import dataclasses
import importlib.metadata
import inspect
import platform
import re

import keras

from tfmix import _tables
from tfmix._keras import replacements
from tfmix.autocast import global_policy
from tfmix.policy.devices import Device, devices

_PACKAGES = ("tensorflow", "tensorflow-cpu", "jax", "numpy")


@dataclasses.dataclass(frozen=True)
class Environment(_tables.Printed):
    """What `environment` found; prints as a table.

    Attributes:
        versions: Of Python, tfmix and what it is built on, by name, and the
            platform.
        backend: The Keras backend in use.
        devices: What it computes on.
        auto: What `"auto"` is on them, in words.
        policy: The active policy, as text.
        replaced: What is replaced in Keras just now, as `owner.attribute`.
        extras: Each extra to install, and the packages it lacks here.
    """

    versions: dict[str, str]
    backend: str
    devices: tuple[Device, ...]
    auto: str
    policy: str
    replaced: tuple[str, ...]
    extras: dict[str, tuple[str, ...]]

    def tables(self) -> list[_tables.Table]:
        """Returns what to print."""
        lacking = {
            name: f"without {', '.join(missing)}" if missing else "complete"
            for name, missing in self.extras.items()
        }
        rows = [
            *self.versions.items(),
            ("backend", self.backend),
            *((device.kind, device.name) for device in self.devices),
            ("auto", self.auto),
            ("policy", self.policy),
            ("replaced in Keras", str(len(self.replaced))),
            *((f"extra {name}", text) for name, text in lacking.items()),
        ]
        notes = [f"replaced: {', '.join(self.replaced)}"] * bool(self.replaced)
        return [_tables.Table(("what", "is"), rows, notes=notes)]


def environment() -> Environment:
    """Lists versions, backend, devices, policy, and what tfmix has changed.

    Paste it into a bug report. `tfmix doctor` prints the same from a shell.

    Returns:
        An `Environment`, which prints as a table.

    Examples:
        >>> environment().backend in ("tensorflow", "jax")
        True
    """
    available = devices()
    return Environment(
        versions=_versions(),
        backend=keras.backend.backend(),
        devices=available,
        auto=available.auto(),
        policy=repr(global_policy.global_policy()),
        replaced=tuple(
            sorted(_label(*place) for place in replacements.replaced())
        ),
        extras=_extras(),
    )


def _versions() -> dict[str, str]:
    known = {
        "tfmix": _version("tfmix"),
        # By itself: its package may be `keras-nightly`.
        "keras": keras.__version__,
        **{name: _version(name) for name in _PACKAGES},
    }
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: version for name, version in known.items() if version},
    }


def _version(package: str) -> str:
    """Returns the version of an installed package, "" if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _extras() -> dict[str, tuple[str, ...]]:
    """Returns what each extra of the installed tfmix lacks."""
    try:
        wanted = importlib.metadata.requires("tfmix") or []
    except importlib.metadata.PackageNotFoundError:
        # Run from a checkout on the path.
        return {}
    extras: dict[str, list[str]] = {}
    for requirement in wanted:
        extra = re.search(r"extra == .(\w+)", requirement)
        if extra is not None:
            lacking = extras.setdefault(extra[1], [])
            package = re.match(r"[\w.-]+", requirement)
            if package is not None and not _version(package[0]):
                lacking.append(package[0])
    return {name: tuple(lacking) for name, lacking in extras.items()}


def _label(owner: object, name: str) -> str:
    parent = f"{owner.__module__}." if inspect.isclass(owner) else ""
    return f"{parent}{getattr(owner, '__name__', owner)}.{name}"
