"""A fault: a function that provokes it and returns the outcome."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_PREFACE = "Exception encountered when calling"

EVERY_BACKEND = ("tensorflow", "jax")
TENSORFLOW_ONLY = ("tensorflow",)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one run of a fault.

    Attributes:
        survived: Bool, whether a user could continue as if nothing had
            happened: weights, statistics and loss scale are right.
        text: String, the observations of this run.
        told: Bool, whether an error or a warning named the cause of what is
            not right.
    """

    survived: bool
    text: str
    told: bool = False

    @property
    def word(self) -> str:
        """The outcome in a word or two."""
        if self.survived:
            return "survives"
        return "says so" if self.told else "**lost**"

    def __str__(self) -> str:
        return f"{self.word}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One row of the table.

    Attributes:
        name: String, the name for `--only`.
        title: String, a description of the fault.
        provoke: Function from a `systems.System` to an `Outcome`.
        backends: Tuple of the Keras backends it can be provoked on.
    """

    name: str
    title: str
    provoke: Callable[[Any], Outcome]
    backends: tuple[str, ...] = EVERY_BACKEND

    def run(self, system: Any) -> Outcome:
        """Provokes the fault; an exception is an outcome as well."""
        try:
            return self.provoke(system)
        except Exception as error:
            text = f"raises {type(error).__name__}: {_gist(error)}"
            return Outcome(False, text[:160])


def fault(
    backends: tuple[str, ...] = EVERY_BACKEND,
) -> Callable[[Callable[[Any], Outcome]], Fault]:
    """Turns a function into a fault, with its docstring as the title."""

    def decorate(provoke: Callable[[Any], Outcome]) -> Fault:
        name = provoke.__name__.replace("_", "-")
        title = (provoke.__doc__ or "").splitlines()[0].rstrip(".")
        return Fault(name, title, provoke, backends)

    return decorate


def _gist(error: Exception) -> str:
    """Returns the line of an error's message that names the cause."""
    plain = _COLOURS.sub("", str(error))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    # TensorFlow puts the user's stack before "RuntimeError: the reason", and
    # Keras the layer that was called.
    mark = f"{type(error).__name__}: "
    for number, line in enumerate(lines):
        if mark in line:
            lines = [line.split(mark, 1)[1], *lines[number + 1 :]]
            break
    said = [line for line in lines if not line.startswith(_PREFACE)]
    return next(iter(said), "no message")
