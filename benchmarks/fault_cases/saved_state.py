"""Faults that lose state: a kill, a reload, a copy of weights."""

import pathlib
import signal
import tempfile
from typing import Any

import keras
import numpy as np

from benchmarks import answers
from benchmarks.fault_cases import loops, resumable, words
from benchmarks.fault_cases.record import Outcome, fault

_KILL_AFTER = 37


@fault()
def kill_and_resume(system: Any) -> Outcome:
    """A kill -9 after step 37 of 60, resumed in every way Keras has."""
    whole = resumable.state(resumable.train(resumable.build(system)))
    right = []
    with tempfile.TemporaryDirectory() as directory:
        code = run_until_killed(system, directory, _KILL_AFTER)
        if code != -signal.SIGKILL:
            return Outcome(False, f"the run ends before the kill, code {code}")
        for way in resumable.ways():
            model = resumable.resume(system, pathlib.Path(directory), way)
            if not resumable.differing(whole, resumable.state(model)):
                right.append(way)
    return Outcome(
        right == resumable.ways(),
        f"{len(right)} of {len(resumable.ways())} ways end bit for bit like "
        f"the run that was not killed: {', '.join(right)}",
    )


def run_until_killed(system: Any, directory: str, kill_after: int) -> int:
    """Starts the run in a separate process; returns its exit code."""
    # The run must add up in the same order as the one that is resumed here.
    arguments = (
        system.name,
        directory,
        str(kill_after),
        str(resumable.devices()),
    )
    run = answers.started(resumable.__name__, *arguments)
    run.communicate()
    return run.returncode


@fault()
def reload_under_float32(system: Any) -> Outcome:
    """Model.compile("adam") under mixed_float16; loaded under float32."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(64, 4)).astype("float32")
    with system.under(system.policy):
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(2), keras.layers.Dense(1)]
        )
        model.compile("adam", loss="mse")
        model.fit(x, x[:, :1], batch_size=4, verbose=0)
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "model.keras"
        model.save(path)
        loaded = keras.saving.load_model(path)
    # A float32 model needs no loss scale, so only the inner state counts.
    saved, found = (
        getattr(each.optimizer, "inner_optimizer", each.optimizer)
        for each in (model, loaded)
    )
    kept = len(saved.variables) == len(found.variables) and words.same(
        words.snapshot(saved.variables), words.snapshot(found.variables)
    )
    return Outcome(
        kept,
        f"{type(saved).__name__} after {int(saved.iterations)} steps is "
        f"loaded as {type(found).__name__} after {int(found.iterations)}, "
        f"state {'equal' if kept else 'lost'}",
    )


@fault()
def set_weights(system: Any) -> Outcome:
    """An optimizer's `variables` are handed to another by `set_weights`."""
    inner = keras.optimizers.Adam(0.1)
    variable, trained = loops.wrapped_vector(system, inner)
    for _ in range(5):
        loops.step(trained, [variable], [np.float32([1.0, -2.0])])
    values = words.snapshot(trained.variables)
    _, fresh = loops.wrapped_vector(system, keras.optimizers.Adam(0.1))
    fresh.set_weights(values)
    restored = [
        words.same([value], [words.to_numpy(variable)])
        for value, variable in zip(values, fresh.variables, strict=True)
    ]
    return Outcome(
        all(restored), f"{sum(restored)} of {len(restored)} variables restored"
    )
