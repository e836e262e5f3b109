"""Finds the compilers that the tests of compiled programs need."""

import keras
import pytest

from tfmix.tools.hardware import compilers
from tfmix.tools.hardware import target as targets


def missing(name):
    """Returns the reason to skip a test of a target, "" if there is none."""
    lacking = compilers.missing(targets.find(name))
    return f"no {', '.join(lacking)}: run `make targets`" if lacking else ""


def needs(name):
    """Marks a test of `compile_for` that needs the compiler of a target."""
    reason = missing(name)
    if keras.backend.backend() != "jax":
        reason = "`compile_for` compiles what JAX runs"
    return pytest.mark.skipif(bool(reason), reason=reason or "-")


def skip_without(name):
    """Skips the rest of a test that needs the compiler of a target."""
    if reason := missing(name):
        pytest.skip(reason)


def recorded(monkeypatch):
    """Returns a list of all that is compiled: the text, memory and costs."""
    found, original = [], compilers.record

    def record(*parts):
        found.append(parts)
        return original(*parts)

    monkeypatch.setattr(compilers, "record", record)
    return found
