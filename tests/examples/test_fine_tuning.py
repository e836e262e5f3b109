"""Cast, fine-tune, scale, convert: the scale is what makes it learn."""

import keras
import numpy as np
import pytest

pytest.importorskip("statsmodels", reason="the example's data come with it")
pytest.importorskip("sklearn", reason="the examples' frame asks for it")

import tfmix
from tests import helpers
from tfmix.examples import common, fine_tuning, series


def test_a_forecast_begins_where_the_last_frame_ends():
    months = np.arange(60.0)
    record = series.windows(months)
    seen = np.rint(record.x * months.std() + months.mean())
    for at in range(len(record.x)):
        assert seen[at, 0].tolist() == months[at : at + 8].tolist()
        assert np.all(np.diff(seen[at, :, 0]) == 1.0)
        first = int(seen[at, -1, -1]) + 1
        assert record.y[at].tolist() == list(range(first, first + 8))
    # None is left out: the last forecast ends with the series.
    assert record.y[-1, -1] == months[-1]


def test_nothing_that_is_forecast_in_the_test_was_trained_on():
    record = series.mauna_loa()
    # Windows are a month apart, and each forecasts eight months.
    assert len(record.y) - fine_tuning.TESTED - fine_tuning.TRAINED >= 8
    assert np.isfinite(record.y).all()
    assert 0.002 < record.unit < 0.005


def test_the_pipeline_delivers_float16_in_whole_batches():
    x, y = np.ones((384, 16, 8), "float32"), np.ones((384, 8), "float32")
    data = fine_tuning.delivered(x, y, "float16")
    if keras.backend.backend() == "jax":
        assert {data["x"].dtype, data["y"].dtype} == {np.dtype("float16")}
        return
    batches = list(data["x"].as_numpy_iterator())
    assert [len(batch[0]) for batch in batches] == [192, 192]
    assert {part.dtype for batch in batches for part in batch} == {
        np.dtype("float16")
    }


def test_the_network_fits_tensor_cores_and_its_twin_of_30_units_does_not(
    monkeypatch,
):
    assert fine_tuning.aligned()
    monkeypatch.setattr(fine_tuning, "UNITS", 30)
    assert not fine_tuning.aligned()


def test_cast_the_network_forecasts_as_before_in_half_the_bytes():
    source = fine_tuning.build_model(0.5)
    model = tfmix.convert_model(source, "float16")
    assert {v.dtype for v in model.weights} == {"float16"}
    assert 2 * fine_tuning.weight_bytes(model) == fine_tuning.weight_bytes(
        source
    )
    x = np.random.default_rng(0).normal(size=(4, 16, 8)).astype("float32")
    found, expected = model(x), source(x)
    assert found.dtype == expected.dtype
    helpers.assert_close(found, expected, "float16")


def runs(scaled, unscaled, served="same"):
    """Returns a run of each variant with these scores."""
    scores = (0.9, scaled, unscaled)
    return tuple(
        common.Run(
            variant,
            0,
            score,
            columns={
                "before": "40.00%",
                "served": f"{score:.2%}" if served == "same" else served,
            },
        )
        for variant, score in zip(fine_tuning.VARIANTS, scores, strict=True)
    )


@pytest.mark.parametrize(
    ("made", "healthy"),
    [
        (runs(0.895, 0.45), True),
        (runs(0.88, 0.45), False),
        (runs(0.895, 0.66), False),
        (runs(0.895, 0.45, served="80.00%"), False),
    ],
)
def test_a_claim_that_is_false_shows(made, healthy):
    assert all(fine_tuning.claims(made).values()) is healthy


@pytest.mark.slow
def test_without_the_scale_the_network_does_not_learn(tmp_path):
    outcome = fine_tuning.RECIPE.run(seeds=2, quiet=True, out=str(tmp_path))
    assert outcome.healthy, (outcome.claims, outcome.runs)
    for run in outcome.of(fine_tuning.SCALED):
        assert run.score > 0.8
        assert run.columns["bytes\n(served)"] == "11024\n(11024)"
    for run in outcome.of(fine_tuning.UNSCALED):
        assert fine_tuning.percent(run, "LSTM\nmoved") < 50
        assert run.score < 0.7
    assert (tmp_path / "fine_tuning.png").is_file()
