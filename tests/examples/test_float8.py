"""A transformer in float8 learns what it learns in bfloat16."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("django", reason="the example's texts come with it")
pytest.importorskip("sklearn", reason="the examples' frame asks for it")

import tfmix
from tfmix.examples import common, float8, languages
from tfmix.float8 import chosen_layers


def test_every_product_but_the_head_is_in_float8():
    with tfmix.policy_scope(float8.FLOAT8):
        model = languages.build_model(8)
        model(languages.texts(languages.LANGUAGES)[0][:2])
    left_out = [why for why in chosen_layers.reasons(model).values() if why]
    assert len(chosen_layers.reasons(model)) == 6 * languages.BLOCKS + 1
    assert left_out == ["32 x 8 are no multiples of 16"]


def test_the_worst_pair_of_gradients_is_told():
    right = [np.array([1.0, 0.0]), np.array([[3.0, 4.0]])]
    turned = [np.array([2.0, 0.0]), np.array([[4.0, 3.0]])]
    assert float8.least_cosine(right, right) == pytest.approx(1.0)
    assert float8.least_cosine(turned, right) == pytest.approx(0.96)


def test_gradients_that_point_elsewhere_are_no_success():
    runs = tuple(
        common.Run(name, 0, 0.8, columns={float8.PRODUCT: "0.99"})
        for name in float8.POLICIES
    )
    assert all(float8.claims(runs).values())
    away = dataclasses.replace(runs[2], columns={float8.PRODUCT: "0.97"})
    assert not all(float8.claims((*runs[:2], away)).values())
    worse = dataclasses.replace(runs[2], score=0.7)
    assert not all(float8.claims((*runs[:2], worse)).values())


@pytest.mark.slow
def test_float8_learns_what_float32_learns(tmp_path):
    outcome = float8.RECIPE.run(seeds=2, quiet=True, out=str(tmp_path))
    assert outcome.healthy, (outcome.claims, outcome.runs)
    assert (tmp_path / "float8.png").is_file()
