"""A dry run of the GPU benchmark: tiny models on any device."""

import json

import keras
import pytest
from absl import flags

from benchmarks import answers, gpu

LLAMA = ("llama", "tfmix", "mixed_bfloat16", "adam")
ROW = {
    **{"title": "blocks", "first step, s": 9.0, "losses": [2.0, 1.0]},
    **{"ms": 2.0, "least ms": 1.0, "most ms": 3.0, "peak, GB": 5.0},
}


@pytest.fixture
def ran(monkeypatch):
    """Answers jobs at once, and lists those that were run."""
    found = []

    def answer_of(module, *words, **_):
        assert module == "benchmarks.gpu_worker"
        if words == ("device",):
            return "A card"
        found.append(words[:4])
        if words[0] == "vit":
            raise RuntimeError("gpu_worker ended with exit code 1.")
        return dict(ROW)

    def answers_of(module, *words, **_):
        assert module == "benchmarks.gpu_products"
        found.append(("products", *words[3:]))
        yield {"rows": 8, "k": 4, "n": 2, "ratio": 1.5}

    monkeypatch.setattr(answers, "answer_of", answer_of)
    monkeypatch.setattr(answers, "answers_of", answers_of)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    return found


def test_a_run_continues_where_the_last_one_ended(ran, tmp_path, capsys):
    words = [f"--into={tmp_path / 'rows.json'}", "--at_once=1", "--json"]
    assert gpu.main([*words, "--models=llama", "--part=models"]) == 0
    assert len(ran) == 6
    assert ran[0] == LLAMA
    ran.clear()
    assert gpu.main([*words, "--models=llama,resnet50"]) == 0
    assert len(ran) == 6
    assert ("products",) in ran
    ran.clear()
    capsys.readouterr()
    assert gpu.main([*words, "--models=llama"]) == 0
    # The process itself decides which shapes are left.
    assert ran == [("products", "8,4,2")]
    record = json.loads(capsys.readouterr().out)
    assert record["machine"]["gpu"] == "A card"
    steps, products = record["tables"]
    models = [row["model, batch"] for row in steps["rows"]]
    assert len(models) == 11
    assert steps["rows"][0]["ms a step"]["high"] == 3.0
    assert products["rows"][0]["8 rows"] == 1.5


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
