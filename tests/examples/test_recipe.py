"""A recipe as a script: every variant from every seed, flags, verdict."""

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the examples' frame asks for it")

from tfmix.examples import common, recipe


def test_every_variant_is_trained_from_every_seed():
    seen, random = [], []

    def train(variant, seed, tick):
        seen.append((variant, seed))
        random.append(np.random.random())
        tick(0.5)
        return common.Run(variant, seed, 1.0)

    runs = recipe.train_all(["a", "b"], 2, 1, train, quiet=True)
    assert seen == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert [(run.variant, run.seed) for run in runs] == seen
    # The seed is set before each run.
    assert random[:2] == random[2:]


def made(calls, came_true=True):
    """Returns a recipe that writes down how it was called."""

    def train(name, seed, length, tick):
        calls.append((name, seed, length))
        tick(1.0)
        return common.Run(name, seed, 0.9, losses=(1.0, 0.5))

    return recipe.Recipe(
        "What it is.",
        ("float32", "half"),
        train,
        lambda runs: {f"{len(runs)} runs": came_true},
        length=("steps", 7, "Turns."),
        picture=("made", "Title"),
    )


def test_a_recipe_trains_as_long_as_its_flag_says():
    calls = []
    words = ["name", "--steps=2", "--seeds=1", "--quiet", "--out="]
    assert made(calls).main(words) == 0
    assert calls == [("float32", 0, 2), ("half", 0, 2)]


def test_a_recipe_trains_as_long_as_its_default_from_three_seeds(tmp_path):
    pytest.importorskip("matplotlib")
    calls = []
    outcome = made(calls).run(quiet=True, out=str(tmp_path))
    assert [length for _, _, length in calls] == [7] * 6
    assert outcome.claims == {"6 runs": True}
    assert outcome.plot == str(tmp_path / "made.png")


def test_a_false_claim_is_the_exit_code(capsys):
    words = ["name", "--seeds=1", "--quiet", "--out="]
    assert made([], came_true=False).main(words) == 1
    assert "FALSE: 2 runs" in capsys.readouterr().out
