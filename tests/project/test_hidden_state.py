"""What tfmix keeps on objects and in the process is listed, with reasons."""

import re

from tests.tree import ROOT

SOURCES = {
    path: path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "tfmix").rglob("*.py"))
}
MARK = re.compile(r'"_tfmix_(\w+)"')
# What tfmix attaches to objects, and to which.
MARKS = {
    "marks": "a layer or model: one record of what is kept",
    "chosen_product": "a variable: what multiplies by it",
    "angle": "a tensor: the angle before a cast of the user's",
    "copy": "a tensor: the weight or input that it is a copy of",
    "logits": "a tensor: what its probabilities are made of",
    "wide": "a gradient in eager mode: its float32 copy",
    "parts": "a tensor: the power of two and what it multiplies",
    "gradients": "a graph: the gradients that are replaced in it",
    "final": "an error: no fallback runs the layer again",
}


def test_each_context_variable_has_its_mechanism():
    found = [
        path.name
        for path, text in SOURCES.items()
        for _ in re.findall(r"ContextVar\(", text)
    ]
    assert sorted(found) == [
        # The settings of the code that a call runs, and the platform that
        # `compile_for` compiles for.
        *["context.py"] * 2,
        # The watch of the `fit` around.
        "skip_report.py",
    ]


def test_each_weak_collection_of_the_core_has_its_reason():
    weak = [
        path.name
        for path, text in SOURCES.items()
        for _ in re.findall(r"= weakref\.Weak|^ +weakref\.Weak", text, re.M)
        if "tools" not in path.parts
    ]
    assert sorted(weak) == [
        # The models that scale their gradients.
        "model_call.py",
        # The checkpoints that a wrapper is restored from.
        "optimizers.py",
        # Who moves a model's place, the places, and the counts of optimizers
        # that nothing wraps.
        *["state.py"] * 3,
    ]


def test_each_mark_on_an_object_is_listed():
    found = {name for text in SOURCES.values() for name in MARK.findall(text)}
    assert found == set(MARKS)
