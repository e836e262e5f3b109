"""`fit` reports skipped steps after each epoch."""

import functools
import re

import keras
import numpy as np
import pytest

from tests import helpers
from tests.step import test_ways_to_train as ways_to_train
from tfmix.autocast import global_policy
from tfmix.gradient_scaling import model_call
from tfmix.loss_scaling import optimizer as scaling
from tfmix.tools.callbacks import loss_scale_monitor

ALL_BAD = (
    "16 of 16 steps of epoch 1 were skipped: `x` reaches 1e+05 and float16 "
    "ends at 65504; scale it, or use 'mixed_bfloat16'"
)


def layers():
    ending = keras.layers.Activation("linear", dtype="float32")
    return [keras.Input((2,)), keras.layers.Dense(1), ending]


def compiled(policy="mixed_float16", how="graph", **settings):
    with global_policy.policy_scope(policy):
        model = keras.Sequential(layers())
    settings = {"initial_scale": 4.0} | settings
    model.compile(
        scaling.LossScaleOptimizer("sgd", **settings),
        "mse",
        run_eagerly=how == "eager",
        jit_compile=how == "xla",
    )
    return model


def batches(count=16, bad=()):
    """Returns arguments of `fit` for steps of one row each."""
    x = np.ones((count, 2), "float32")
    x[list(bad)] = 1e5
    y = np.zeros((count, 1), "float32")
    return {"x": x, "y": y, "batch_size": 1, "verbose": 0, "shuffle": False}


# Each function spoils the arguments of `fit`, and returns the model. The line
# about the cause holds what stands between the dots, in this order.
CAUSES = {}


def cause(line):
    return lambda make: CAUSES.setdefault(make.__name__, (make, line))


def stack(*layers, policy="mixed_float16"):
    with global_policy.policy_scope(policy):
        model = keras.Sequential([keras.Input((2,)), *(x() for x in layers)])
    model.compile(scaling.LossScaleOptimizer("sgd", 4.0), "mse")
    return model


def dense():
    return keras.layers.Dense(1, name="last")


@cause(ALL_BAD)
def too_large_inputs(data):
    data["x"][:] = 1e5
    return compiled()


@cause(
    "the output of layer 'last' is not finite (targets reach 1e+0..."
    'float16 ends at 65504); give it `dtype="float32"`'
)
def too_large_targets_of_a_float16_head(data):
    data["y"][:] = 1e5
    model = stack(dense)
    model.set_weights([np.full((2, 1), 4e4), np.zeros(1)])
    return model


class Times(keras.layers.Layer):
    def build(self, shape):
        first = keras.initializers.Constant(1000.0)
        self.factor = self.add_weight((), first, trainable=False)

    def call(self, x):
        return keras.ops.multiply(x, self.factor)


def times():
    return Times(name="times")


@cause("skipped: the output of layer 'times' is not finite; give it `dtype=")
def a_layer_that_overflows(data):
    data["x"][:] = 300.0
    return stack(times, dense)


def mean_of_the_positive():
    def mean(x):
        kept = keras.ops.cast(x > 0, x.dtype)
        kept = kept / keras.ops.sum(kept, axis=-1, keepdims=True)
        return keras.ops.sum(x * kept, axis=-1, keepdims=True)

    return keras.layers.Lambda(mean, name="mean")


@cause("the output of layer 'mean' is not finite; `tfmix.check(model, x, y)`")
def a_quotient_of_zeros_which_float32_does_not_mend(data):
    data["x"][:] = -1.0
    return stack(mean_of_the_positive, dense, policy="mixed_bfloat16")


@cause(
    "16 of 16 steps of epoch 1 were skipped: `x` holds NaN or infinity in 1 of "
    "16 rows (3); drop or ...Also, the output of layer 'times' is not finite"
)
def bad_rows_and_a_layer_that_overflows(data):
    data["x"][:] = 300.0
    data["x"][3] = np.inf
    # The first layer's output is not finite in the bad row.
    return stack(lambda: keras.layers.Rescaling(1.0), times, dense)


@cause("the loss is infinite, and targets reach 3e+38; standardise them: y = (")
def too_large_targets(data):
    data["y"][:] = 3e38
    return compiled()


@cause("the gradient of ...last/kernel' overflows most often; keep its layer")
def gradients_that_grow_between_layers(data):
    # The loss is beyond float16, but it is computed in float32.
    data["y"][:] = 1e3

    data["x"][:] = 1e-4
    model = stack(dense, Times, Times)
    model.layers[0].set_weights([np.full((2, 1), 0.1), np.zeros(1)])
    return model


@pytest.mark.every_case("each cause has a sentence of its own")
@pytest.mark.parametrize("name", CAUSES)
def test_one_line_names_the_likeliest_cause(said, name):
    data, (make, line) = batches(), CAUSES[name]
    make(data).fit(**data)
    (text,) = [each for each in said if "skipped" in each]
    assert re.search(".*".join(map(re.escape, line.split("..."))), text), text


@pytest.mark.costly
@pytest.mark.parametrize("where", ["x", "y", "sample_weight"])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_rows_that_are_not_finite_are_named_once(said, where, policy):
    data = batches(60) | {"sample_weight": np.ones(60, "float32")}
    data[where][[3, 7]] = np.nan
    model = compiled(policy, initial_scale=2.0**15)
    model.fit(**data, epochs=3)
    assert said == [
        f"2 of 60 steps of epoch 1 were skipped: `{where}` holds NaN or "
        "infinity in 2 of 60 rows (3, 7); drop or fix them",
        "2 of 60 steps of epoch 2 were skipped: as before",
        "2 of 60 steps of epoch 3 were skipped: as before",
    ]
    # Bad data does not lower the scale.
    if policy == "mixed_float16":
        assert model.optimizer.loss_scale == 2.0**15


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", helpers.quick_are({"xla"}, ["eager", "graph", "xla"])
)
def test_every_epoch_without_steps_is_reported(said, how):
    compiled(how=how).fit(**batches(bad=range(16)), epochs=3)
    assert said == [
        ALL_BAD,
        "16 of 16 steps of epoch 2 were skipped: as before",
        "16 of 16 steps of epoch 3 were skipped: as before",
    ]


def test_a_single_skip_among_many_steps_is_reported(said):
    fixed = compiled(loss_scale=8.0, initial_scale=None)
    fixed.fit(**batches(60))
    assert not said
    fixed.fit(**batches(60, bad=[3]))
    (text,) = said
    assert text.startswith("1 of 60 steps of epoch 1 was skipped: `x` reaches")


def ones(count):
    x, y = np.ones((count, 2), "float32"), np.zeros((count, 1), "float32")
    return {"x": x, "y": y}


# Each makes data of one row a batch that cannot be reread.
def pipeline(x, y):
    import tensorflow as tf

    return {
        "x": tf.data.Dataset.from_tensor_slices((x, y)).batch(1),
        "shuffle": False,
    }


class Rows(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, n):
        return self.x[n : n + 1], self.y[n : n + 1]


def data_set(x, y):
    return {"x": Rows(x, y)}


def test_an_epoch_without_skips_is_not_reported(said):
    model, rows = compiled(), Rows(**ones(14))

    def on_epoch_begin(epoch, logs):
        rows.x[:3] = 1.0 if epoch == 1 else np.nan

    spoil = keras.callbacks.LambdaCallback(on_epoch_begin=on_epoch_begin)
    model.fit(rows, epochs=3, callbacks=[spoil], verbose=0)
    assert said[0].startswith("3 of 14 steps of epoch 1 were skipped: the lo")
    assert said[1:] == ["3 of 14 steps of epoch 3 were skipped: as before"]


def test_a_new_cause_is_named(said):
    model, data = compiled(), batches(bad=range(16))

    def on_epoch_begin(epoch, logs):
        if epoch == 2:
            model.set_weights([np.full((2, 1), 1e4), np.zeros(1)])
            data["x"][:] = 60.0

    spoil = keras.callbacks.LambdaCallback(on_epoch_begin=on_epoch_begin)
    model.fit(**data, epochs=4, callbacks=[spoil])
    first, again, other, last = (text.partition(": ")[2] for text in said)
    assert "`x` reaches" in first
    assert "layer" in other
    assert again == last == "as before"


@pytest.mark.parametrize(
    ("policy", "source", "count"),
    [
        ("mixed_float16", pipeline, 2),
        ("mixed_float16", data_set, 22),
        ("mixed_bfloat16", data_set, 22),
    ],
)
def test_bad_rows_of_data_that_cannot_be_reread_are_told(
    said, policy, source, count
):
    data = ones(100)
    data["x"][::3][:count] = np.nan
    compiled(policy, initial_scale=1.0).fit(**source(**data), verbose=0)
    (text,) = said
    assert text.startswith(
        f"{count} of 100 steps of epoch 1 were skipped: the loss was not "
        "finite; look for rows of the data that are not finite"
    )


def test_rows_that_never_reach_the_loss_are_no_cause(said):
    def finite(x):
        return keras.ops.where(keras.ops.isfinite(x), x, 0.0)

    first = functools.partial(keras.layers.Lambda, finite, dtype="float32")
    model = stack(first, dense, Times, Times)
    model.layers[1].set_weights([np.full((2, 1), 0.1), np.zeros(1)])
    data = batches()
    data["x"][:] = 1e-4
    data["x"][3] = np.nan
    data["y"][:] = 1e3
    model.fit(**data)
    (text,) = [each for each in said if "skipped" in each]
    assert "NaN" not in text
    assert "last/kernel' overflows most often" in text


def test_the_search_of_a_scale_is_no_fault_of_a_layer(said):
    # The loss is multiplied by the scale, as float16 weights need it.
    model = compiled("float16", initial_scale=2.0**15)
    data = batches(14)
    data["y"][:] = 100.0
    model.fit(**data, epochs=2)
    (text,) = said
    scale, skipped = model.optimizer.loss_scale, model.optimizer.skipped_steps
    assert scale == 2.0 ** (15 - skipped)
    assert re.fullmatch(
        rf"{skipped} of 14 steps of epoch 1 were skipped: gradients "
        r"overflowed, most often that of '.*', while the loss scale settles: "
        rf"it fell from 32768 to {scale:g} so far",
        text,
    )


def test_trials_of_a_fast_growing_scale_are_not_reported(said, monkeypatch):
    # The loss is multiplied by the scale, as for models that do not scale.
    monkeypatch.setattr(model_call, "scales", lambda variables: False)
    model = compiled(initial_scale=2.0**8, dynamic_growth_steps=2)
    data = batches(64)
    data["y"][:] = 100.0
    with helpers.without_gates():
        model.fit(**data, epochs=4)
    assert model.optimizer.skipped_steps > 10
    assert not said


def test_callbacks_may_come_in_every_form_of_keras(said):
    model = compiled()
    x, y = np.full((16, 2), 1e5, "float32"), np.zeros((16, 1), "float32")
    mine = keras.callbacks.LambdaCallback()
    for given in ([mine], (mine,), mine, [], None):
        model.fit(x, y, 1, 1, 0, given)
        (text,) = said
        assert text.startswith("16 of 16 steps of epoch 1 were skipped")
        assert given in ([mine], (mine,), mine, [], None), "it was changed"
        said.clear()
    assert model.optimizer.skipped_steps == 5 * 16


def test_a_monitor_reports_skips_instead(said):
    monitor = loss_scale_monitor.LossScaleMonitor()
    # The run has so few skips that the monitor does not stop it.
    model = compiled(initial_scale=2.0**15)
    model.fit(**batches(8, bad=range(8)), callbacks=[monitor])
    (text,) = said
    assert text.startswith("8 of 8 steps of epoch 1 were skipped: `x` reaches")


def test_the_counters_are_read_once_an_epoch(monkeypatch):
    model = compiled()
    model.fit(**batches())
    reads = []
    read = scaling.LossScaleOptimizer.read
    monkeypatch.setattr(
        *(scaling.LossScaleOptimizer, "read"),
        lambda self: reads.append(1) or read(self),
    )
    model.fit(**batches(), epochs=3)
    assert len(reads) == 1 + 3


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_all_optimizers_that_a_model_steps_are_counted(said, mode):
    with global_policy.policy_scope("mixed_float16"):
        way = ways_to_train.Fit(ways_to_train.Gan.made, mode, epochs=1)
    way.run(*ways_to_train.batches(bad=[0, 3]))
    (told,) = (text for text in said if "skipped" in text)
    assert told.startswith("4 of 12 steps of epoch 1 were skipped")
