"""What the examples share: flags, runs over seeds, comparison and verdict."""

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the examples' data come with it")

from tfmix.examples import common, pictures


def runs_of(variant, *scores, twin="float32", **columns):
    return tuple(
        common.Run(variant, seed, score, twin, (1.0, score), columns)
        for seed, score in enumerate(scores)
    )


TWINS = runs_of("float32", 0.90, 0.92, 0.94)


def test_flags_have_defaults_and_are_read_from_the_command_line():
    values = common.parse(["name"], "Doc.", epochs=(8, "Passes."))
    assert (values.epochs, values.seeds) == (8, 3)
    assert (values.out, values.quiet) == ("out", False)
    words = ["name", "--epochs=2", "--seeds", "1", "--out=", "--quiet"]
    values = common.parse(words, "Doc.", epochs=(8, "Passes."))
    assert (values.epochs, values.seeds, values.out) == (2, 1, "")
    assert values.quiet is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds=0"], "seeds"),
        (["--seeds=many"], "seeds"),
        (["--unknown"], "unknown"),
        (["stray"], "stray"),
    ],
)
def test_wrong_flags_exit_with_2_and_say_which(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        common.parse(["name", *words], "Doc.")
    assert stopped.value.code == common.BAD_FLAGS
    assert message in capsys.readouterr().err


def test_help_shows_what_the_example_is_and_its_flags(capsys):
    with pytest.raises(SystemExit) as stopped:
        common.parse(["name", "--help"], "What it is.", rate=(0.5, "A rate."))
    assert not stopped.value.code
    out = capsys.readouterr().out
    assert out.startswith("What it is.")
    assert "A rate." in out
    assert "--seeds" in out


def test_the_test_digits_are_not_trained_on():
    train_x, test_x, train_y, test_y = common.digits()
    assert len(train_x) == len(train_y) == 1797 - len(test_x)
    known = {one.tobytes() for one in train_x}
    assert not any(one.tobytes() in known for one in test_x)
    assert (train_x.min(), train_x.max()) == (0.0, 1.0)
    assert np.array_equal(common.digits(images=True)[1].reshape(-1, 64), test_x)


def test_batches_are_whole_and_begin_with_the_same_rows():
    train_x, test_x, train_y, test_y = common.digits()
    cut = common.digits(64)
    assert [len(part) for part in cut] == [1216, len(test_x), 1216, len(test_y)]
    assert np.array_equal(cut[0], train_x[:1216])
    assert np.array_equal(cut[2], train_y[:1216])


def test_the_gap_is_that_of_the_means_and_the_noise_the_larger_range():
    runs = TWINS + runs_of("half", 0.91, 0.97, 0.94)
    distance, noise = common.gap(runs, "half")
    assert distance == pytest.approx(0.02)
    assert noise == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ((0.90, 0.92, 0.94), True),
        ((0.881, 0.881, 0.881), True),
        ((0.879, 0.879, 0.879), False),
        ((0.961, 0.961, 0.961), False),
    ],
)
def test_a_variant_is_close_within_the_noise_and_not_beyond(scores, expected):
    assert common.close(TWINS + runs_of("half", *scores), "half") is expected


def test_equal_seeds_leave_the_least_difference_that_counts():
    runs = runs_of("float32", 0.9, 0.9) + runs_of("half", 0.895, 0.895)
    assert common.close(runs, "half")
    assert not common.close(runs, "half", least=0.004)


@pytest.mark.parametrize(
    ("scores", "least", "expected"),
    [
        ((0.91, 0.93), 0.9, [True, True]),
        ((0.91, 0.89), 0.9, [False, True]),
        ((0.97, 0.97), 0.9, [True, False]),
        ((0.80, 0.80), 0.9, [False, False]),
    ],
)
def test_sound_is_what_comes_to_the_goal_and_is_close_to_its_twin(
    scores, least, expected
):
    runs = TWINS + runs_of("good", 0.92) + runs_of("half", *scores)
    assert list(common.sound(runs, least).values()) == expected


@pytest.mark.parametrize(
    ("scores", "word"), [((0.90, 0.90), "inside"), ((0.97, 0.97), "outside")]
)
def test_it_is_printed_whether_a_difference_is_inside_the_noise(
    scores, word, capsys
):
    runs = TWINS + runs_of("half", *scores)
    common.finish(common.Outcome(runs, {}))
    assert f"{word} the noise of the seeds: half" in capsys.readouterr().out


def test_the_table_has_a_row_per_variant_and_adds_up_its_numbers(capsys):
    runs = TWINS + runs_of("half", 0.9, 0.9, 0.9, skipped=2, scale="2^15")
    outcome = common.Outcome(runs, {"It learns.": True, "It flies.": False})
    assert common.finish(outcome) == 1
    out = capsys.readouterr().out
    half = next(line for line in out.splitlines() if "half" in line)
    assert half.split() == ["half", "90.00", "-2.00", "6", "2^15"]
    assert "true: It learns." in out
    assert "FALSE: It flies." in out


def test_the_exit_code_is_0_where_every_claim_came_true(capsys):
    assert common.finish(common.Outcome(TWINS, {"It learns.": True})) == 0


def test_the_picture_is_a_png_file_and_left_out_without_a_folder(tmp_path):
    pytest.importorskip("matplotlib")
    assert pictures.losses(TWINS, "", "name", "title") is None
    path = pictures.losses(TWINS, str(tmp_path / "new"), "name", "title")
    with open(path, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"
