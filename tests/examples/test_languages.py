"""Texts from catalogues, and the transformer that names their language."""

import dataclasses

import keras
import numpy as np
import pytest

pytest.importorskip("django", reason="the example's texts come with it")
pytest.importorskip("sklearn", reason="the examples' frame asks for it")

import tfmix
from tests import helpers
from tfmix.examples import catalogues, common, languages


def test_texts_are_read_without_what_is_no_language():
    found = dict(catalogues.texts("de"))
    assert (
        found["This field is required."]
        == "Dieses Feld ist zwingend erforderlich."
    )
    assert len(found) > 300
    for text in found.values():
        assert "%(" not in text
        assert "  " not in text
        assert len(text.encode()) >= 12


def test_a_language_that_django_has_not_is_refused():
    with pytest.raises(ValueError, match="language='klingon'"):
        next(catalogues.texts("klingon"))


def test_a_text_becomes_bytes_and_padding():
    assert catalogues.encoded("aé", 5).tolist() == [98, 196, 170, 0, 0]
    assert catalogues.encoded("abc", 2).tolist() == [98, 99]


def test_what_is_tested_was_not_trained_on():
    train_x, test_x, train_y, test_y = catalogues.load(("de", "nl"), 200)
    known = {text.tobytes() for text in train_x}
    assert not any(text.tobytes() in known for text in test_x)
    assert set(train_y) == set(test_y) == {0, 1}
    assert len(test_x) > len(train_x) / 8
    assert train_x.max() <= 256


@helpers.requires_backend("tensorflow")  # JAX compiles each operation alone.
def test_padding_does_not_change_the_answer():
    model = languages.build_model(8)
    text = catalogues.encoded("Dieses Feld", languages.LENGTH)[None]
    # What stands at the padding's places: another table, the same answer.
    table = next(
        one for one in model.layers if type(one).__name__ == "Positions"
    )
    expected = keras.ops.convert_to_numpy(model(text))
    changed = keras.ops.convert_to_numpy(table.table).copy()
    # Not the same for all channels: layer normalisation would take it out.
    noise = np.random.default_rng(0).normal(size=changed.shape)
    changed[11:] += noise[11:]
    table.table.assign(changed)
    helpers.assert_close(model(text), expected, "float32")
    changed[:11] += noise[:11]
    table.table.assign(changed)
    assert (
        np.abs(keras.ops.convert_to_numpy(model(text)) - expected).max() > 1e-3
    )


def test_the_transformer_computes_in_float16_and_answers_in_float32():
    with tfmix.policy_scope("mixed_float16"):
        model = languages.build_model(8)
    advice = tfmix.advise(model, languages.BATCH_SIZE)
    assert advice.share_16bit == 1.0
    assert all(row.aligned for row in advice.rows)
    assert model.output.dtype == "float32"


def run(variant, seed, losses, activations="100"):
    return common.Run(
        variant,
        seed,
        0.8,
        losses=losses,
        columns={"activa-\ntions": activations},
    )


def test_trajectories_are_compared_point_by_point():
    runs = (
        run("float32", 0, (2.0, 1.0)),
        run("float32", 1, (2.5, 1.5)),
        run("mixed_float16", 0, (2.1, 1.0), "50"),
        run("mixed_float16", 1, (2.5, 1.4), "50"),
    )
    assert languages.distances(runs) == pytest.approx((0.05, 0.5))
    assert all(languages.claims(runs).values())
    apart = dataclasses.replace(runs[2], losses=(3.0, 2.0))
    assert not all(languages.claims((*runs[:2], apart, runs[3])).values())
    same = [dataclasses.replace(r, columns=runs[0].columns) for r in runs]
    assert not all(languages.claims(tuple(same)).values())


def test_one_seed_has_no_neighbour():
    runs = (run("float32", 0, (1.0,)), run("mixed_float16", 0, (1.0,)))
    assert languages.distances(runs) == (0.0, float("inf"))


@pytest.mark.slow
def test_mixed_takes_the_same_way_as_float32(tmp_path):
    outcome = languages.RECIPE.run(seeds=2, quiet=True, out=str(tmp_path))
    assert outcome.healthy, (outcome.claims, outcome.runs)
    assert (tmp_path / "languages.png").is_file()
