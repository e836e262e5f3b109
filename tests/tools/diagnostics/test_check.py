"""`check` names the layer at fault with advice, and changes no model."""

import dataclasses
import io
import json

import keras
import numpy as np
import pytest
from keras import ops
from rich import console

import tfmix
from tests.tools.diagnostics import faults
from tfmix.policy import policy as policies
from tfmix.tools.diagnostics import check


def small(dtype="mixed_float16"):
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(8, "tanh", dtype=dtype, name="first"),
        keras.layers.Dense(1, dtype=dtype, name="last"),
        keras.layers.Activation("linear", dtype="float32"),
    ]
    return keras.Sequential(layers)


def rows(count):
    x = np.random.default_rng(0).normal(size=(count, 4)).astype("float32")
    return x, x[:, :1].copy()


def headed(*layers):
    ending = keras.layers.Dense(1, dtype="float32", name="head")
    return keras.Sequential([keras.Input((4,)), *layers, ending])


def loud():
    """Checks a model whose layer "loud" overflows."""
    case = faults.loud_between_others()
    return check.check(case.model, case.x, case.y, loss=case.loss)


class Nested(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(4)
        self.block = keras.Sequential(
            [keras.layers.Dense(4), keras.layers.BatchNormalization()]
        )
        self.head = keras.layers.Dense(2)

    def call(self, inputs, training=False):
        hidden = ops.tanh(self.first(inputs))
        return self.head(self.block(hidden, training=training))


def everything_about(model):
    return (
        [np.array(variable) for variable in model.variables],
        [
            (layer.name, layer._dtype_policy)
            for layer in model._flatten_layers()
        ],
        [vars(layer).get("call") for layer in model._flatten_layers()],
        keras.config.dtype_policy().name,
        keras.config.floatx(),
    )


@pytest.mark.costly
@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_does_not_change(policy, fails):
    model = Nested()
    x, y = np.ones((6, 3), "float32"), np.zeros((6, 2), "float32")
    model.compile("sgd", "mse")
    model.fit(x, y, verbose=0)
    before, function = everything_about(model), model.train_function
    if fails:
        with pytest.raises(ZeroDivisionError):
            check.check(model, x, y, policy=policy, loss=lambda *_: 1 / 0)
    else:
        check.check(model, x, y, policy=policy)
    after = everything_about(model)
    for left, right in zip(before[0], after[0], strict=True):
        np.testing.assert_array_equal(left, right)
    for left, right in zip(before[1], after[1], strict=True):
        assert left[1] is right[1]
    assert before[2:] == after[2:]
    assert model.train_function is function


class Summing(keras.layers.Layer):
    """Computes something itself, besides calling inner layers."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.inner = keras.layers.Dense(4)

    def call(self, inputs):
        total = ops.sum(ops.square(self.inner(inputs) * 300.0), -1)
        return ops.sqrt(total)[:, None]


class Shared(keras.layers.Layer):
    """A layer with an inner layer; the model calls it twice."""

    def __init__(self, name):
        super().__init__(name=name)
        self.inner = keras.layers.Dense(4, use_bias=False, name="inner")

    def call(self, x):
        return self.inner(x) / 1e3


# Each function returns a model with a fault, and its input.


def an_outer_layer_that_computes():
    return keras.Sequential([keras.Input((4,)), Summing(name="guilty")]), 1.0


def an_inner_layer():
    class Outer(keras.layers.Layer):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.inner = Summing(name="guilty")

        def call(self, inputs):
            return ops.tanh(self.inner(inputs))

    return keras.Sequential([keras.Input((4,)), Outer(name="outer")]), 1.0


def an_op_of_a_functional_graph():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(4)(inputs)
    hidden = ops.multiply(hidden, 60000.0)
    return keras.Model(inputs, keras.layers.Dense(2)(ops.tanh(hidden))), 9.0


def a_layer_inside_of_a_shared_one():
    block, inputs = Shared("block"), keras.Input((4,))
    wide = keras.layers.Rescaling(1e5, dtype="float32")
    # Only in the second call, the inner layer's output exceeds 65504.
    model = keras.Model(inputs, block(wide(block(inputs))))
    model.set_weights([np.full((4, 4), 100.0, "float32")])
    return model, 1.0


@pytest.mark.every_case("each is named in its own way")
@pytest.mark.parametrize(
    ("build", "names"),
    [
        (an_outer_layer_that_computes, {"guilty"}),
        (an_inner_layer, {"guilty"}),
        (an_op_of_a_functional_graph, {"multiply"}),
        (a_layer_inside_of_a_shared_one, {"inner"}),
    ],
)
def test_what_is_at_fault_is_named_and_nothing_around_it(build, names):
    keras.config.set_dtype_policy("mixed_float16")
    model, value = build()
    report = check.check(model, np.full((8, 4), value, "float32"))
    found = {row.layer.rstrip("_0123456789") for row in report.faults}
    assert found == names, str(report)
    assert report.rows[0].verdict in ("overflow", "not_finite")


def test_a_float8_layer_is_judged_in_float8():
    with tfmix.policy_scope(
        tfmix.Policy("mixed_float8", float8_layers=["wide"])
    ):
        inputs = keras.Input((16,))
        wide = keras.layers.Dense(32, name="wide")(inputs)
        model = keras.Model(inputs, tfmix.float32_output()(wide))
    x = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
    report = check.check(model, x, np.tile(x, 2), loss="mse")
    found = {
        r.phase: r.relative_error for r in report.rows if r.layer == "wide"
    }
    # bfloat16 rounds by 0.002.
    assert min(found["forward"], found["backward"]) > 0.01
    assert report.healthy, str(report)


def test_without_targets_only_the_forward_pass_is_checked():
    report = check.check(small(), rows(8)[0])
    assert "backward" not in {row.phase for row in report.rows}
    assert report.forward_only
    assert "healthy, forward pass only" in str(report)
    assert json.loads(report.to_json())["forward_only"] is True
    model = small()
    model.compile("sgd", "mse")
    # The compiled loss is used.
    report = check.check(model, *rows(8))
    dtypes = {row.layer: row.dtype for row in report.rows}
    assert (dtypes["first"], dtypes["loss"]) == ("float16", "float32")
    assert "forward pass only" not in str(report)


def test_a_float32_model_is_checked_in_float16_under_the_default_rules():
    report = check.check(small("float32"), *rows(8), loss="mse")
    assert report.policy == policies.Policy("mixed_float16")


def printed(report, width):
    shown = io.StringIO()
    console.Console(width=width, file=shown).print(report)
    return shown.getvalue().splitlines()


def test_a_fault_is_printed_with_advice_below_in_80_columns():
    report = loud()
    lines = printed(report, 80)
    assert max(map(len, lines)) <= 80
    code = [row.advice.partition("  # ")[0] for row in report.faults]
    below = lines[lines.index("What to write:") :]
    comments = [line for line in below[1:] if line.startswith("# ")]
    assert set(below[1:]) == {*comments, *code}
    assert below[1].startswith("# loud, forward, overflow: ")
    assert 'name="loud", dtype="float32"' in str(report)
    found = json.loads(report.to_json())
    assert found["healthy"] is False
    assert found["rows"][0]["layer"] == "loud"
    # There is no infinity in JSON.
    assert found["rows"][0]["relative_error"] is None


def test_a_healthy_report_prints_the_least_headroom_and_bounds():
    hidden = [keras.layers.Dense(4, dtype="mixed_float16") for _ in range(30)]
    output = keras.layers.Activation("linear", dtype="float32")
    model = keras.Sequential([keras.Input((4,)), *hidden, output])
    report = check.check(model, rows(8)[0])
    assert len(report.rows) > 30
    text = str(report)
    assert len(text.splitlines()) < 20
    least = min(report.rows, key=lambda row: row.headroom_bits)
    assert f"{least.layer} " in text
    assert f"{len(report.rows) - 5} more rows in all" in text
    assert "What to write" not in text


def test_a_report_of_many_faults_fits_a_screen_and_counts_them():
    report = check.check(small(), *rows(8), loss="mse")
    row = dataclasses.replace(
        report.rows[0], verdict="overflow", advice="Dense(...)  # too large"
    )
    many = [
        dataclasses.replace(row, layer=f"layer_{n}", advice=f"Dense({n})  # x")
        for n in range(300)
    ]
    report = dataclasses.replace(report, rows=(*many, *report.rows))
    lines = str(report).splitlines()
    assert len(lines) <= 40
    assert "292 more at fault" in str(report)
    assert lines.count("Dense(4)") == 1
    assert "Dense(5)" not in lines
    verbose = str(dataclasses.replace(report, verbose=True))
    assert "more at fault" not in verbose
    assert "Dense(299)" in verbose


def test_a_fault_in_float32_as_well_has_no_line_of_code():
    log = keras.layers.Lambda(lambda x: keras.ops.log(x - x), name="log")
    x = np.ones((4, 4), "float32")
    report = check.check(headed(log), x, x[:, :1], loss="mse")
    text = str(report)
    assert "What is at fault:" in text
    assert "not finite in float32 either" in text
    assert "set_dtype_policy" not in text
    below = text.split("fault:")[1].splitlines()
    assert not [one for one in below if one[:1] not in "# "]
    with pytest.raises(ValueError, match="float32 either"):
        report.suggested_policy()


@pytest.mark.parametrize("name", ["kernel", "moving_mean"])
def test_only_weights_that_are_not_finite_are_named(name):
    x, y = rows(16)
    hidden = [keras.layers.Dense(4), keras.layers.BatchNormalization()]
    model = headed(*hidden, keras.layers.Dense(4))
    layer = model.layers[0 if name == "kernel" else 1]
    broken = np.array(getattr(layer, name))
    broken.flat[2] = np.nan
    getattr(layer, name).assign(broken)
    (row,) = check.check(model, x, y, loss="mse").faults
    assert (row.layer, row.phase) == (layer.name, "weights")
    assert row.verdict == "not_finite"
    assert f"its {name} is NaN or infinite in 1 of {broken.size}" in row.advice
