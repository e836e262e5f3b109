"""The comparison with other libraries: turns, rows, and the same arithmetic."""

import textwrap

import keras
import numpy as np
import pytest

from benchmarks import peers, peers_keras, results, turns
from tests import helpers

WORKER = """
from benchmarks import turns

def answer(number, half=False):
    print("a library greets")
    if number < 0:
        raise ValueError(f"number={number}")
    if number == 13:
        raise SystemExit(3)
    return number / 2 if half else number * 2

turns.serve(answer)
"""


@pytest.fixture
def worker(tmp_path):
    """A worker in a process that answers a number with twice or half of it."""
    (tmp_path / "doubling.py").write_text(textwrap.dedent(WORKER))
    with turns.Worker(
        "doubling", environment={"PYTHONPATH": str(tmp_path)}
    ) as started:
        yield started


def test_a_worker_answers_in_turn_and_goes_on_after_an_error(worker):
    assert worker.ask(number=4) == 8
    assert worker.ask(number=4, half=True) == 2
    with pytest.raises(RuntimeError, match="ValueError: number=-1"):
        worker.ask(number=-1)
    assert worker.ask(number=5) == 10


def test_a_worker_that_ends_is_named(worker):
    with pytest.raises(RuntimeError, match="doubling ended with exit code 3"):
        worker.ask(number=13)


def test_each_system_is_compared_with_the_bare_one_of_its_own_kind():
    times = {
        "bare": [2.0, 4.0],
        "GradScaler": [3.0, 5.0],
        "bare, fused": [1.0, 1.0],
        "GradScaler, fused": [1.5, 2.0],
    }
    rows = {row["system"]: row for row in peers.rows_of("PyTorch", times)}
    assert rows["bare"]["ratio to its bare"] is None
    assert rows["bare, fused"]["added, ms"] is None
    assert rows["GradScaler"]["added, ms"] == results.spread([1.0, 1.0])
    ratio = results.spread([1.5, 2.0])
    assert rows["GradScaler, fused"]["ratio to its bare"] == ratio


def test_a_stack_that_is_not_there_has_a_row_that_says_so():
    times = {"bare": [1.0]}
    (measured,) = peers.rows_of("Keras, JAX", times)
    missing = peers.missing_row("PyTorch", "not installed here")
    assert list(missing) == list(measured)
    assert missing["system"] == "not installed here"
    assert missing["ms"] is None


def test_a_python_that_cannot_be_run_is_refused(capsys, tmp_path):
    assert not peers.has_torch("/bin/false")
    with pytest.raises(SystemExit) as stopped:
        peers.main(["--torch-python", str(tmp_path / "python")])
    assert stopped.value.code == 2
    assert "`--torch-python` must be a Python" in capsys.readouterr().err


def test_all_systems_of_keras_take_a_step():
    for system in peers_keras.milliseconds("?", 0, 0, 0):
        assert peers_keras.milliseconds(system, 1, 2, 1) > 0
    peers_keras.prepared.cache_clear()


@helpers.requires_backend("jax")
def test_adam_in_plain_jax_is_keras_adam_and_scaling_changes_nothing():
    import jax.numpy as jnp

    from benchmarks import peers_jax

    start = np.float32([1.0, -2.0, 3.0])
    variable = keras.Variable(start)
    optimizer = keras.optimizers.Adam(1e-3, epsilon=1e-8)
    optimizer.build([variable])
    bare = peers_jax.initial([(3,)]) | {"parameters": [jnp.asarray(start)]}
    scaled = bare | {"scale": jnp.float32(2**15), "counter": jnp.int32(0)}
    for step in range(3):
        grads = [jnp.float32([0.5, -1.0, 0.25]) * (step + 1)]
        optimizer.apply(grads, [variable])
        bare = peers_jax.adam(bare, grads)
        scaled = peers_jax.scaled_adam(scaled, [grads[0] * 2**15])
    expected = np.asarray(variable.value)
    tolerance = helpers.tolerance("float32")
    for state in (bare, scaled):
        np.testing.assert_allclose(
            state["parameters"][0], expected, **tolerance
        )
    before = scaled
    scaled = peers_jax.scaled_adam(scaled, [jnp.float32([np.inf, 1, 1])])
    assert float(scaled["scale"]) == 2**14
    assert np.array_equal(scaled["parameters"][0], before["parameters"][0])
    assert int(scaled["count"]) == 3


@pytest.mark.slow
def test_the_whole_comparison_runs_and_says_what_is_missing(
    monkeypatch, capsys
):
    monkeypatch.setattr(peers, "MODELS", {"tiny": (2, 3, 2)})
    monkeypatch.delenv("TORCH_PYTHON", raising=False)
    monkeypatch.setattr(peers, "has_torch", lambda python: False)
    peers.main(["--runs", "2"])
    out = capsys.readouterr().out
    for name in ("Keras, TensorFlow graph", "Keras, JAX", "jmp's way"):
        assert name in out
    assert "not installed here" in out
