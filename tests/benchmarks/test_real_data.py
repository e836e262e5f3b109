"""The benchmark on real data: its scores, its verdict, its table."""

import math

import keras
import numpy as np
import pytest

from benchmarks import real_data, real_tasks


@pytest.mark.parametrize(
    ("scores", "than", "worse"),
    [
        ([1.0, 2.0], [3.0, 4.0], True),
        ([1.0, 3.0], [3.0, 4.0], False),
        ([5.0, 6.0], [3.0, 4.0], False),
        ([math.nan, math.nan], [3.0, 4.0], True),
        ([math.nan, 3.5], [3.0, 4.0], False),
    ],
)
def test_worse_means_that_the_best_seed_is_worse_than_the_worst(
    scores, than, worse
):
    assert real_data.is_worse(scores, than) is worse


def test_coxs_likelihood_counts_those_who_lived_as_long():
    y = np.float32([[5, 1], [9, 0], [2, 1]])
    risk = np.float32([[0.5], [-1.0], [2.0]])
    weights = np.exp(risk[:, 0])
    expected = np.log([weights[:2].sum(), weights.sum()]) - risk[[0, 2], 0]
    found = real_tasks.partial_likelihood(
        keras.ops.convert_to_tensor(y), keras.ops.convert_to_tensor(risk)
    )
    assert float(found) == pytest.approx(expected.mean(), rel=1e-5)


def test_data_that_are_missing_are_named_with_what_to_install():
    with pytest.raises(ImportError, match=r"'nowhere'.*\[real-data\]"):
        real_tasks.folder("nowhere")


def test_the_tasks_are_of_many_kinds_and_know_nothing_of_tfmix():
    kinds = {task.kind for task in real_tasks.TASKS.values()}
    assert len(kinds) >= 8
    source = real_tasks.__file__
    with open(source, encoding="utf-8") as file:
        assert "import tfmix" not in file.read()
