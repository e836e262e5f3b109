"""The guide's code runs as it is written, page by page, line by line."""

import re

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tests.tree import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BACKENDS = ("tensorflow", "jax")
# What a reader has done before a block, by a phrase of it: trained the model of
# the block before, and made a file of weights.
MEANWHILE = {
    "load_float32(model": """
from tfmix.optimizers import export_float32
from tests.tree import ROOT
model.built or model.build((None, 8))
export_float32(model, "float32.weights.h5")
""",
}


def python_blocks(text):
    """Returns each python block with the number of its first line."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S)
    return [(text[: one.start()].count("\n") + 2, one[1]) for one in found]


def other_backend(block):
    """Says whether a block imports the backend that is not in use."""
    imported = re.findall(r"^\s*import (\w+)", block, re.M)
    others = set(BACKENDS) - {keras.backend.backend()}
    return bool(others & set(imported))


def start(line=None):
    """Returns what a page, or one line, may use without introducing it first.

    A line that does not name the network does without, which takes its time.
    """
    random = np.random.default_rng(0)
    needed = line is None or NETWORK & set(re.findall(r"\w+", line))
    return {
        "keras": keras,
        "np": np,
        "tfmix": tfmix,
        "x": random.normal(size=(256, 8)).astype("float32"),
        "y": random.integers(0, 4, size=(256, 1)),
        "sgd": keras.optimizers.SGD(0.1),
        # Stands for a reader's own.
        "MyLayer": type("MyLayer", (keras.layers.Layer,), {}),
        **(network() if needed else {}),
    }


NETWORK = {"model", "optimizer", "variables", "grads", "loss"}


def network():
    """Returns a compiled model, and what a user's own loop has."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(tfmix.LossScaleOptimizer("sgd"), loss="mse")
    variables = model.trainable_variables
    optimizer = tfmix.LossScaleOptimizer("sgd")
    optimizer.build(variables)
    helpers.takes_scaled_gradients(optimizer)
    return {
        "model": model,
        "optimizer": optimizer,
        "variables": variables,
        "grads": [keras.ops.ones(v.shape) for v in variables],
        "loss": keras.ops.ones(()),
    }


def run_page(text, name="page", known=None):
    """Runs a page's blocks one after the other, as a reader would.

    Blocks of the other backend are passed over; lines keep their numbers.
    `known` are names that the reader has.
    """
    names = start() | (known or {})
    for line, block in python_blocks(text):
        if not other_backend(block):
            for phrase, done in MEANWHILE.items():
                if phrase in block:
                    exec(done, names)
            code = compile("\n" * (line - 1) + block, name, "exec")
            exec(code, names)
    return names


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Lets code write files, and shares the one strategy of the test run."""
    monkeypatch.chdir(tmp_path)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        strategy = helpers.mirrored_strategy()
        monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: strategy)


SLOW_PAGES = {
    *("adapters-remat-export.md", "cast-and-fine-tune.md", "deployment.md"),
    *("float8.md", "loss-scaling.md", "many-devices.md", "memory.md"),
    *("train-step.md", "when-it-goes-wrong.md"),
}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            marks=pytest.mark.slow if page.name in SLOW_PAGES else (),
            id=page.name,
        )
        for page in PAGES
        if python_blocks(page.read_text("utf-8"))
    ],
)
def test_every_block_of_a_page_runs(page, place):
    run_page(page.read_text(encoding="utf-8"), str(page))


def test_a_block_that_fails_is_found_and_one_of_another_backend_left_out():
    with pytest.raises(NameError) as caught:
        run_page("Text\n\n```python\nx = 1\nnowhere\n```\n")
    assert caught.traceback[-1].lineno + 1 == 5
    (other,) = set(BACKENDS) - {keras.backend.backend()}
    text = f"```python\nimport {other}\nnowhere\n```\n"
    assert run_page(f"{text}```python\nseen = 1\n```\n")["seen"] == 1


# A row has what you wrote, what to write instead, and perhaps a remark.
OPTION = re.compile(r"^\| [^|]+ \| `([^|]+)` \| (?:[^|]+ )?\|$")
COMING_FROM = "\n".join(
    page.read_text(encoding="utf-8")
    for page in sorted((DOCS / "coming-from").glob("*.md"))
)


def options(text):
    """Returns the rows of the tables of options."""
    tables = re.findall(r'^<div class="options".*?^</div>$', text, re.M | re.S)
    rows = re.findall(r"^\|.*$", "\n".join(tables), re.M)
    return [row for row in rows if not row.startswith(("| you wrote", "|---"))]


def line_to_write(row):
    """Returns the second cell of an option's row, which is code."""
    found = OPTION.match(row)
    assert found, row
    return found[1]


@pytest.mark.parametrize(
    "line",
    sorted({line_to_write(row) for row in options(COMING_FROM)}),
    ids=lambda line: line[:60],
)
def test_a_line_for_those_who_come_from_elsewhere_runs(line, place):
    exec(compile(line, "coming-from", "exec"), start(line))


def test_every_page_has_its_options():
    pages = [*(DOCS / "coming-from").glob("*.md")]
    assert len(pages) == 3
    for page in pages:
        assert len(options(page.read_text(encoding="utf-8"))) > 10, page
    with pytest.raises(AssertionError, match="nothing"):
        line_to_write("| `old` | nothing | |")


def test_what_is_said_to_be_the_same_by_default_is():
    rows = re.findall(
        r"`(tfmix\.DynamicLossScale\(.*?\))` \| the same defaults", COMING_FROM
    )
    assert len(rows) > 3
    for line in rows:
        assert eval(line) == tfmix.DynamicLossScale(), line


def test_links_between_pages_lead_somewhere():
    links = [
        (page, target)
        for page in (*PAGES, ROOT / "README.md")
        for target in re.findall(
            r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8")
        )
    ]
    assert {page.name for page, _ in links} >= {"README.md", "loops.md"}
    broken = [link for link in links if not (link[0].parent / link[1]).exists()]
    assert not broken


def test_links_out_of_the_tree_are_ones_that_a_maintainer_confirms():
    confirmed = (ROOT / ".ci" / "links.txt").read_text().splitlines()
    notebooks = (ROOT / "examples" / "notebooks").glob("*.ipynb")
    found = {
        address
        for page in (*PAGES, ROOT / "README.md", *notebooks)
        for address in re.findall(
            r"https?://[^\s)>\"'`\\]+", page.read_text(encoding="utf-8")
        )
    }
    assert found, "no link found: the test looks in the wrong place"
    assert found <= {*confirmed}
    assert not [one for one in confirmed[2:] if one not in found]


def test_readme_and_guide_are_read_in_an_hour():
    pages = (*PAGES, ROOT / "README.md")
    words = [len(page.read_text("utf-8").split()) for page in pages]
    assert 10_000 < sum(words) <= 16_000


def test_make_docs_counts_warnings():
    makefile = (DOCS.parent / "Makefile").read_text(encoding="utf-8")
    # Under `--quiet` mkdocs has none to count, and `--strict` is idle.
    assert re.search(r"mkdocs build --strict$", makefile, re.M)


def columns(text, start):
    """Maps the first cells of a table's rows to the others; its head first."""
    _, _, after = text.partition(start)
    table = (start + after).partition("\n\n")[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in table]
    return {row[0]: row[1:] for row in cells}


def test_each_promise_and_column_of_the_ways_to_train_names_its_tests():
    page = (DOCS / "ways-to-train.md").read_text("utf-8")
    ways = columns(page, "| way to train |")
    rows = [*ways.values()][2:]
    assert {cell for row in rows for cell in row} == {
        *("yes", "no", "?", "if wrapped")
    }
    promises = columns(
        (ROOT / "tests" / "README.md").read_text("utf-8"), "| promise | proof |"
    )
    assert {*ways["way to train"]} <= {*promises}
    for proofs in promises.values():
        for place in re.findall(r"`([^`]+)`", " ".join(proofs)):
            file, _, name = place.partition("::")
            assert f"def {name}" in (ROOT / "tests" / file).read_text(), place
