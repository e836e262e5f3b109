"""A dry run of the GPU benchmark: tiny models on any device."""

import json

import keras
import pytest
from absl import flags

from benchmarks import gpu


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dry_run", "--save=docs"], "measures nothing that could be saved"),
        (["--at_once=0"], "not a positive integer"),
        (["--models=nothing"], "takes some of these"),
        (["--part=nothing"], "takes some of these"),
    ],
)
def test_wrong_arguments_are_refused(words, message):
    with pytest.raises(flags.Error, match=message):
        gpu.main(words)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "vit"])
def test_a_dry_run_trains_a_tiny_model(capsys, monkeypatch, tmp_path, model):
    backend = keras.backend.backend()
    monkeypatch.setenv("KERAS_BACKEND", backend)
    path = tmp_path / "rows.json"
    words = ["--dry_run", f"--into={path}", "--at_once=2", "--json"]
    assert gpu.main([*words, f"--models={model}"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["machine"]["gpu"] == gpu.DRY
    asked = [job for job in gpu.JOBS if job[0] == model]
    assert len(record["tables"][0]["rows"]) == len(asked)
    assert len(record["tables"]) == (2 if backend == "jax" else 1)
