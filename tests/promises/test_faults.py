"""The table of faults: tfmix survives a row or says so; a row can be lost."""

import pytest

from benchmarks.fault_cases import catalogue, replicas, systems
from tests import helpers

# These train several models, or start processes.
SLOW = {
    "accumulation-window",
    "fit-jit-compile",
    "float8-ema",
    "float8-layer-frozen",
    "float8-layer-used-twice",
    "float8-lora",
    "float8-small-gradients",
    "fit-steps-per-execution",
    "kill-and-resume",
    "nan-in-one-worker",
    "own-state",
    "replicas-ema",
    "replicas-float8",
    "start-up-overflow",
    "terminate-on-nan",
}


# Nothing can be right here, and an error or a warning says why.
SAYS_SO = {
    "double-wrapping",
    "forgotten-scale-loss",
    "nothing-applied",
    "senseless-setting",
}


@pytest.fixture(autouse=True)
def one_strategy(monkeypatch):
    """Runs the replica rows with the strategy that all tests share."""
    monkeypatch.setattr(replicas, "mirrored", helpers.mirrored_strategy)


def row(fault):
    marks = [pytest.mark.slow] if fault.name in SLOW else []
    if len(fault.backends) == 1:
        marks.append(helpers.requires_backend(fault.backends[0]))
    return pytest.param(fault, id=fault.name, marks=marks)


def system(name):
    return systems.by_name(name)


@pytest.mark.parametrize("fault", [row(f) for f in catalogue.FAULTS])
def test_tfmix_survives(fault):
    outcome = fault.run(system("tfmix"))
    word = "says so" if fault.name in SAYS_SO else "survives"
    assert outcome.word == word, outcome.text


# In a quick run, pure 16-bit variables only meet these. The others are slow.
QUICK_AT_16_BITS = {
    "inf-in-one-replica",
    "bad-stretch",
    "fixed-scale-overflow",
    "bad-sparse-row",
    "set-weights",
    "two-optimizers",
    "inner-methods",
}


def rows_at_16_bits():
    for each in systems.SIXTEEN_BIT:
        for fault in catalogue.on_this_backend():
            if fault.name not in each.inapplicable:
                quick = fault.name in QUICK_AT_16_BITS
                quick = quick and each.name == "masters"
                yield pytest.param(
                    fault,
                    each,
                    id=f"{each.name}-{fault.name}",
                    marks=[] if quick else [pytest.mark.slow],
                )


@pytest.mark.parametrize(("fault", "column"), list(rows_at_16_bits()))
def test_sixteen_bit_variables_survive(fault, column):
    outcome = fault.run(column)
    assert outcome.survived or outcome.told, outcome.text


def test_an_exception_for_a_system_names_a_fault():
    names = {fault.name for fault in catalogue.FAULTS}
    for each in systems.SIXTEEN_BIT:
        assert each.inapplicable <= names


@pytest.mark.parametrize(
    "name",
    [
        "bad-stretch",
        "stored-scale-nan",
        "fixed-scale-overflow",
        "forgotten-scale-loss",
        "double-wrapping",
        "float8-small-gradients",
        "clip-hides-infinity",
        "unscaled-for-a-log",
        pytest.param("pure-without-masters", marks=pytest.mark.slow),
        "policy-map",
        "inner-methods",
    ],
)
def test_a_system_without_the_remedy_does_not_survive(name):
    outcome = catalogue.by_name(name).run(system("Keras"))
    assert outcome.word == "**lost**", outcome.text
