"""`check` names the planted layer first, and does not change the model."""

import dataclasses
import datetime
import importlib
import io
import json
import re
import threading

import keras
import numpy as np
import pytest
from keras import ops
from rich import console

import tfmix
from tests import helpers
from tests.diagnostics import faults
from tfmix.diagnostics import check
from tfmix.policy import policy as policies

BACKEND = importlib.import_module(keras.backend.backend())


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
def test_the_model_does_not_change(policy):
    model = Nested()
    x, y = np.ones((6, 3), "float32"), np.zeros((6, 2), "float32")
    model.compile("sgd", "mse")
    model.fit(x, y, verbose=0)
    before, function = everything_about(model), model.train_function
    check.check(model, x, y, policy=policy)
    after = everything_about(model)
    for left, right in zip(before[0], after[0], strict=True):
        np.testing.assert_array_equal(left, right)
    for left, right in zip(before[1], after[1], strict=True):
        assert left[1] is right[1]
    assert before[2:] == after[2:]
    assert model.train_function is function


def test_the_model_does_not_change_after_an_error():
    model = Nested()
    x = np.ones((6, 3), "float32")
    model(x)
    before = everything_about(model)
    with pytest.raises(ZeroDivisionError):
        check.check(model, x, x, loss=lambda y, outputs: 1 / 0)
    after = everything_about(model)
    assert [p for _, p in before[1]] == [p for _, p in after[1]]
    assert before[2:] == after[2:]


class Summing(keras.layers.Layer):
    """Computes something itself, besides calling inner layers."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.inner = keras.layers.Dense(4)

    def call(self, inputs):
        total = ops.sum(ops.square(self.inner(inputs) * 300.0), -1)
        return ops.sqrt(total)[:, None]


def test_an_outer_layer_is_named_for_its_own_faults():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), Summing(name="summing")])
    report = check.check(model, np.ones((8, 4), "float32"))
    assert {row.layer for row in report.faults} == {"summing"}


def test_an_outer_layer_is_not_blamed_for_inner_ones():
    keras.config.set_dtype_policy("mixed_float16")

    class Outer(keras.layers.Layer):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.inner = Summing(name="guilty")

        def call(self, inputs):
            return ops.tanh(self.inner(inputs))

    model = keras.Sequential([keras.Input((4,)), Outer(name="outer")])
    report = check.check(model, np.ones((8, 4), "float32"))
    assert [row.layer for row in report.faults] == ["guilty"]


def test_an_op_of_a_functional_graph_is_named():
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((4,))
    hidden = ops.multiply(keras.layers.Dense(4)(inputs), 60000.0)
    model = keras.Model(inputs, keras.layers.Dense(2)(ops.tanh(hidden)))
    report = check.check(model, np.full((8, 4), 9.0, "float32"))
    assert report.rows[0].layer.startswith("multiply")
    assert report.rows[0].verdict == "overflow"


def test_a_fault_in_float32_is_reported_as_broken():
    model = keras.Sequential([keras.Input((2,)), keras.layers.ReLU()])
    report = check.check(model, np.array([[np.nan, 1.0]]))
    assert report.rows[0].verdict == "not_finite"
    with pytest.raises(ValueError, match="float32 either"):
        report.suggested_policy(progress=False)


def test_a_check_without_targets_only_runs_the_forward_pass():
    x, y = rows(8)
    report = check.check(small(), x)
    assert "backward" not in {row.phase for row in report.rows}
    assert report.forward_only
    assert "healthy, forward pass only" in str(report)
    assert json.loads(report.to_json())["forward_only"] is True
    text = str(check.check(small(), x, y, loss="mse"))
    assert "forward pass only" not in text


def test_the_compiled_loss_is_used():
    model = small()
    model.compile("sgd", "mse")
    report = check.check(model, *rows(8))
    assert "loss" in {row.layer for row in report.rows}


def test_several_losses_are_judged_and_keep_their_means():
    inputs = keras.Input((3,))
    outputs = [
        keras.layers.Activation("linear", dtype="float32")(
            keras.layers.Dense(1)(inputs)
        )
        for _ in range(2)
    ]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", ["mse", "mae"])
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    assert check.check(model, x, [y, y], policy="mixed_float16").healthy
    means = [v for v in model.metrics_variables if v.name == "total"]
    assert not any(float(ops.sum(mean)) for mean in means)


def test_a_float32_model_is_checked_in_float16_under_the_default_rules():
    report = check.check(small("float32"), *rows(8), loss="mse")
    assert report.policy == policies.Policy("mixed_float16")


def test_json_holds_the_rows_and_no_infinity():
    found = json.loads(loud().to_json())
    assert found["healthy"] is False
    assert found["rows"][0]["relative_error"] is None
    assert found["rows"][0]["layer"] == "loud"


def test_the_table_names_layer_and_line():
    text = str(loud())
    assert "loud" in text
    assert 'name="loud", dtype="float32"' in text


def printed(report, width):
    shown = io.StringIO()
    console.Console(width=width, file=shown).print(report)
    return shown.getvalue().splitlines()


def test_advice_is_printed_below_the_table_in_80_columns():
    report = loud()
    lines = printed(report, 80)
    assert max(map(len, lines)) <= 80
    code = [row.advice.partition("  # ")[0] for row in report.faults]
    below = lines[lines.index("What to write:") :]
    comments = [line for line in below[1:] if line.startswith("# ")]
    assert set(below[1:]) == {*comments, *code}
    assert below[1].startswith("# loud, forward, overflow: ")


def test_a_healthy_report_prints_the_least_headroom():
    hidden = [keras.layers.Dense(4, dtype="mixed_float16") for _ in range(30)]
    output = keras.layers.Activation("linear", dtype="float32")
    model = keras.Sequential([keras.Input((4,)), *hidden, output])
    report = check.check(model, rows(8)[0])
    assert len(report.rows) > 60
    text = str(report)
    assert len(text.splitlines()) < 20
    least = min(report.rows, key=lambda row: row.headroom_bits)
    assert f"{least.layer} " in text
    assert f"{len(report.rows) - 5} more rows ok" in text
    assert "What to write" not in text


def test_the_report_has_each_layers_output_dtype():
    report = check.check(small(), *rows(8), loss="mse")
    dtypes = {row.layer: row.dtype for row in report.rows}
    assert (dtypes["first"], dtypes["loss"]) == ("float16", "float32")
    assert "float16" in str(report)


def test_the_page_names_model_date_and_versions(tmp_path):
    model = small()
    report = check.check(model, *rows(8), loss="mse")
    report.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for known in (
        model.name,
        f"{datetime.date.today():%Y-%m-%d}",
        f"Keras {keras.__version__}",
        f"tfmix {tfmix.__version__}",
        f"{BACKEND.__name__} {BACKEND.__version__}",
    ):
        assert known in page
    # A narrow screen needs these to scroll only the table.
    assert 'name="viewport"' in page
    assert "overflow-x: auto" in page
    assert all(row.layer in page for row in report.rows)


def test_wrong_arguments_are_refused():
    x, y = rows(8)
    with pytest.raises(TypeError, match="model='resnet'"):
        check.check("resnet", x)
    for given, message in (
        ({"y": y}, "loss=None"),
        ({"loss": "mse"}, "y=None"),
        ({"policy": "float32"}, "policy='float32'"),
    ):
        with pytest.raises(ValueError, match=message):
            check.check(small(), x, **given)


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


def test_only_64_rows_are_checked_with_a_note():
    x, y = rows(2000)
    x[64:] = 1e30
    report = check.check(small(), x, y, loss="mse")
    assert report.healthy
    assert "2,000 rows" in report.notes[0]
    assert "first 64" in str(report)


def test_a_model_with_a_fixed_batch_size_gets_all_rows():
    layers = [keras.Input(batch_shape=(80, 4)), keras.layers.Dense(1)]
    x, y = rows(80)
    report = check.check(keras.Sequential(layers), x, y, loss="mse")
    assert not any("rows" in note for note in report.notes)


def test_the_first_batch_of_a_dataset_is_checked():
    tf = pytest.importorskip("tensorflow")
    batches = tf.data.Dataset.from_tensor_slices(rows(200)).batch(100)
    report = check.check(small(), batches, loss="mse")
    assert "backward" in {row.phase for row in report.rows}
    assert "100 rows" in report.notes[0]
    with pytest.raises(ValueError, match=r"at least one row.*without a batch"):
        check.check(small(), batches.take(0), loss="mse")
    with pytest.raises(ValueError, match=r"`y` must be an array"):
        check.check(small(), rows(8)[0], batches, loss="mse")


@pytest.mark.parametrize("name", ["x", "y"])
def test_data_that_is_not_finite_is_named_once_with_its_rows(name):
    x, y = rows(8)
    (x if name == "x" else y)[[2, 5]] = np.nan
    report = check.check(small(), x, y, loss="mse")
    (fault,) = report.faults
    assert (fault.layer, fault.verdict) == (name, "not_finite")
    assert f"`{name}` holds NaN or infinity in 2 of 8 rows" in fault.advice
    assert fault.broken
    with pytest.raises(ValueError, match=f"first at '{name}'"):
        report.suggested_policy(progress=False)


@pytest.mark.parametrize("lost", [[3], slice(None)], ids=["one", "all"])
def test_a_layer_that_could_not_be_judged_is_not_fine(lost):
    x, y = rows(8)
    x[lost] = np.nan
    report = check.check(small(), x, y, loss="mse")
    assert [row.layer for row in report.faults] == ["x"]
    assert "x not finite" in report.title
    judged = [row for row in report.rows if row.verdict == "ok"]
    assert all(np.isfinite(row.relative_error) for row in judged)


def test_the_advice_for_bad_data_finds_it():
    x, y = rows(8)
    x[5] = np.nan
    (fault,) = check.check(small(), x, y, loss="mse").faults
    found = eval(fault.advice, {"numpy": np, "x": x})
    assert set(found[:, 0]) == {5}


def test_a_single_row_is_refused():
    tf = pytest.importorskip("tensorflow")
    x, y = rows(8)
    unbatched = tf.data.Dataset.from_tensor_slices((x, y))
    for one in (unbatched, x[0]):
        with pytest.raises(ValueError, match=r"dataset\.batch\(32\)"):
            check.check(small(), one, loss="mse" if one is unbatched else None)


@pytest.mark.parametrize("form", ["generator", "PyDataset", "list"])
def test_an_argument_that_is_not_a_batch_is_named(form):
    class Data(keras.utils.PyDataset):
        def __getitem__(self, index):
            return rows(8)

        def __len__(self):
            return 1

    given = {
        "generator": (each for each in [rows(8)]),
        "PyDataset": Data(),
        "list": rows(8)[0].tolist(),
    }[form]
    kind = {"PyDataset": "Data", "list": "float"}.get(form, form)
    with pytest.raises(ValueError, match=f"Received: {kind}.*next"):
        check.check(small(), given, loss=None)


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
    every = check.check(small(), *rows(8), loss="mse", verbose=True)
    assert every.verbose


@pytest.mark.parametrize("columns", [70, 120])
def test_a_report_is_as_wide_as_the_terminal(columns, monkeypatch):
    report = check.check(small(), *rows(8), loss="mse")
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= columns
    assert "first" in str(report)


def test_a_notebook_shows_a_table():
    page = helpers.notebook_html(check.check(small(), rows(8)[0]))
    assert page.startswith("<pre")
    # This is the colour of a layer without faults.
    assert re.search(r'color: #00\w+[^>]*">first', page)


@helpers.requires_backend("tensorflow")
def test_other_threads_keep_their_compiled_functions_during_a_check():
    import tensorflow as tf

    seen = {}

    @tf.function
    def traced():
        seen.setdefault(threading.current_thread().name, []).append(
            tf.executing_eagerly()
        )
        return tf.constant(1)

    class Asking(keras.layers.Layer):
        def call(self, inputs):
            other = threading.Thread(target=traced, name="training")
            other.start()
            other.join()
            traced()
            return inputs

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.add(Asking())
    seen.clear()
    check.check(model, rows(4)[0], policy="mixed_float16")
    assert all(seen[threading.current_thread().name])
    assert not any(seen.get("training", []))
    assert not tf.config.functions_run_eagerly()
    seen.clear()
    traced()
    assert not any(seen.get(threading.current_thread().name, []))


def headed(*layers):
    ending = keras.layers.Dense(1, dtype="float32", name="head")
    return keras.Sequential([keras.Input((4,)), *layers, ending])


def test_a_healthy_model_shows_its_largest_error_with_the_bound():
    model = headed(keras.layers.Dense(4, name="first"))
    text = str(check.check(model, *rows(16), loss="mse"))
    shown = [line.split() for line in text.splitlines()[3:6]]
    assert all(row[:2] == ["first", "float16"] for row in shown)
    assert all(row[5] == "of" for row in shown)


def test_advice_states_the_size_of_the_output():
    x, y = rows(16)
    keras.config.set_dtype_policy("mixed_float16")
    model = headed(keras.layers.Dense(4, name="first"))
    report = check.check(model, x, y * 4e5, loss="mse")
    texts = [row.advice for row in report.faults if "reaches" in row.advice]
    sizes = [float(re.search(r"reaches (\S+) and", one)[1]) for one in texts]
    # The sizes are not the end of the format.
    assert min(sizes) > 7e4


@pytest.mark.parametrize("size", [1e-8, 5e4, 1e6])
def test_a_policy_under_test_allows_targets_of_any_size(size):
    """Under a policy, `fit` scales gradients inside the model."""
    x, y = rows(16)
    model = headed(keras.layers.Dense(4, name="first"))
    asked = {"loss": "mse", "policy": "mixed_float16"}
    assert check.check(model, x, size * y, **asked).healthy
    tfmix.apply_policy(model, "mixed_float16")
    assert check.check(model, x, size * y, loss="mse").healthy


def test_a_fault_in_float32_as_well_has_no_line_of_code():
    log = keras.layers.Lambda(lambda x: keras.ops.log(x - x), name="log")
    x = np.ones((4, 4), "float32")
    text = str(check.check(headed(log), x, x[:, :1], loss="mse"))
    assert "What is at fault:" in text
    assert "not finite in float32 either" in text
    assert "set_dtype_policy" not in text
    assert not [
        one
        for one in text.split("fault:")[1].splitlines()
        if one[:1] not in "# "
    ]


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
