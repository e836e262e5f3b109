"""The GPU benchmark, dry: tiny models on whatever device there is."""

import json

import keras
import numpy as np
import pytest
from absl import flags

from benchmarks import gpu, gpu_models, gpu_worker
from tests import helpers


class Clock:
    """Stands for a worker: takes so many seconds a step, in turn."""

    def __init__(self, *seconds, **variants):
        self._seconds = list(seconds)
        self._variants = variants

    def ask(self, what, steps=1, variant=""):
        if what == "seconds":
            if variant:
                return self._variants[variant.split()[0]]
            self._seconds.append(self._seconds.pop(0))
            return self._seconds[-1]
        return {"peak": 3 * 10**9, "flops": 10**12}[what]


def test_the_first_turn_is_not_counted_and_precisions_take_turns():
    workers = {"float32": Clock(9.0, 1.0, 2.0), "mixed": Clock(9.0, 0.5, 0.5)}
    found = gpu.speeds(workers, runs=2, steps=1)
    assert found == {"float32": [1.0, 2.0], "mixed": [0.5, 0.5]}


def test_the_table_has_speeds_ratios_peaks_and_shares():
    workers = {"float32": Clock(1.0), "mixed": Clock(0.5)}
    seconds = {"float32": [1.0, 1.0], "mixed": [0.5, 0.5]}
    table = gpu.precision_table("t", workers, seconds, ("tokens", 8), 1e13)
    first, second = table.rows
    assert first["ratio"]["median"] == 1.0
    assert second["ratio"]["median"] == 2.0
    assert second["tokens per second"]["median"] == 16.0
    assert second["peak, GB"] == 3.0
    # 1e12 operations in half a second, of 1e13 a second.
    assert second["share, %"]["median"] == pytest.approx(20.0)


def test_the_parts_cost_what_the_model_takes_longer_with_them():
    worker = Clock(1.1, no=1.0, LossScaleMonitor=1.1, NumericsMonitor=2.2)
    rows = gpu.parts_table("t", worker, runs=2, steps=1).rows
    costs = [row["cost, % of a step"]["median"] for row in rows]
    assert costs == pytest.approx([10.0, 0.0, 100.0])


@pytest.mark.parametrize("precision", gpu.PRECISIONS)
def test_each_precision_computes_in_what_it_says(precision):
    session = gpu_worker.Session("head", precision, tiny=True)
    model = session._model
    policy, around = gpu_worker.PRECISIONS[precision]
    dtype = policy.removeprefix("mixed_")
    assert model.get_layer(index=2).compute_dtype == dtype
    assert model.output.dtype == "float32"
    if around is not None:
        # `compile` puts loss scaling around masters, too.
        inner = getattr(model.optimizer, "inner_optimizer", None)
        assert isinstance(model.optimizer, around) or isinstance(inner, around)
    weights = "bfloat16" if precision.startswith("bfloat16") else "float32"
    assert str(model.trainable_variables[-1].dtype) == weights


def test_without_loss_scaling_means_without_it():
    session = gpu_worker.Session("head", gpu.SCALED, tiny=True)
    assert isinstance(
        session._model.optimizer, keras.optimizers.LossScaleOptimizer
    )
    assert not isinstance(
        session._unscaled.optimizer, keras.optimizers.LossScaleOptimizer
    )
    assert session._unscaled.get_layer(index=2).compute_dtype == "float16"


def test_the_full_sizes_are_those_of_the_models_they_are_named_for():
    # Counted without building: 25.6 million is ResNet-50, 12 blocks of 768
    # are BERT base's encoder.
    assert gpu_models.TASKS["resnet50"].sizes["stages"] == (3, 4, 6, 3)
    sizes = gpu_models.TASKS["transformer"].sizes
    assert (sizes["blocks"], sizes["width"]) == (12, 768)
    assert gpu_models.TASKS["head"].sizes["vocabulary"] > 50_000
    for name in gpu.MODELS:
        full, tiny = gpu_models.task(name), gpu_models.task(name, tiny=True)
        assert set(full.sizes) == set(tiny.sizes)


@pytest.mark.slow
def test_a_dry_run_goes_through_one_model(capsys, monkeypatch):
    # The other parts compile for long; a slow test below runs them.
    monkeypatch.setattr(gpu, "VARIANTS", gpu.VARIANTS[:1])
    words = ["--dry_run", *SHORT, "--json", "--models", "head"]
    assert gpu.main([*words, "--precisions", gpu.SCALED]) == 0
    record = json.loads(capsys.readouterr().out)
    speeds, parts = record["tables"]
    names = [row["precision"] for row in speeds["rows"]]
    assert names == [gpu.BASE, gpu.SCALED]
    assert parts["rows"][0]["part"] == "loss scaling and guard"
    assert record["machine"]["gpu"] == "dry run, no figures"
    assert record["name"] == "gpu/head"


SHORT = ("--runs", "1", "--steps", "1")


@pytest.mark.slow
@pytest.mark.parametrize("model", gpu.MODELS)
def test_a_dry_run_goes_through_every_model(capsys, monkeypatch, model):
    monkeypatch.setenv("KERAS_BACKEND", keras.backend.backend())
    assert gpu.main(["--dry_run", *SHORT, "--models", model]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in (*gpu.PRECISIONS, *gpu.VARIANTS[1:]))
    by_hand = model == "transformer" and keras.backend.backend() == "jax"
    assert (gpu.HAND_WRITTEN in out) is by_hand


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dry_run", "--save=docs"], "measures nothing that could be saved"),
        (["--runs=0"], "not a positive integer"),
        (["--models=nothing"], "takes some of these"),
    ],
)
def test_wrong_words_are_refused(words, message):
    with pytest.raises(flags.Error, match=message):
        gpu.main(words)


def test_without_a_gpu_nothing_is_measured_or_saved(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(gpu, "found_gpu", lambda: None)
    assert gpu.main([f"--save={tmp_path}"]) == 0
    assert "No GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@helpers.requires_backend("jax")
def test_the_transformer_by_hand_learns_and_has_as_many_weights():
    import jax

    from benchmarks import gpu_reference

    session = gpu_reference.Session(tiny=True)
    for _ in range(3):
        session.ask("seconds", steps=20)
    assert session.losses[-1] < session.losses[0]
    sizes = gpu_models.task("transformer", tiny=True).sizes
    leaves = jax.tree.leaves(gpu_reference.initial(**sizes))
    model = gpu_models.transformer(**sizes)
    assert sum(leaf.size for leaf in leaves) == model.count_params()
    assert np.isfinite(session.losses).all()
