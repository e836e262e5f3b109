"""A `fit` that skips what no scale can save says so, once."""

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix.callbacks import loss_scale_monitor
from tfmix.policy.in_force import current_policy
from tfmix.scaling import optimizer as scaling
from tfmix.scaling import rules

STANDSTILL = (
    "No update was applied in the last 16 steps: the loss scale is 1, 16 "
    "step(s) were skipped in a row. A lower scale cannot mend this: look for "
    "NaN or numbers beyond 65504 in the data (`tfmix.check(model, x, y)` "
    "names the layer), or use 'mixed_bfloat16'."
)


def layers():
    ending = keras.layers.Activation("linear", dtype="float32")
    return [keras.Input((2,)), keras.layers.Dense(1), ending]


def compiled(policy="mixed_float16", how="graph", **settings):
    with current_policy.policy_scope(policy):
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


@pytest.fixture
def model(said):
    made = compiled()
    made.fit(**batches())
    assert not said
    return made


@pytest.mark.parametrize("how", ["eager", "graph", "xla"])
def test_a_fit_that_trains_nothing_says_so_once(said, how):
    compiled(how=how).fit(**batches(bad=range(16)), epochs=3)
    assert said == [STANDSTILL]


@helpers.requires_backend("tensorflow")
def test_it_says_so_of_replicas(said):
    with helpers.mirrored_strategy().scope():
        model = compiled()
    model.fit(**batches(32, bad=range(32)) | {"batch_size": 2}, epochs=2)
    assert said == [STANDSTILL]


def test_a_sample_that_wears_the_scale_down_is_told_of_at_the_floor(said):
    model = compiled()
    model.fit(**batches(bad=[3]))
    assert not said, "at a scale of 2 a lower one may help"
    model.fit(**batches(bad=[3]), epochs=3)
    (text,) = said
    assert text.startswith(
        "Skipped in this epoch: 1 of 16 steps, at a loss scale of 1, the "
        "lowest, where small gradients become 0. A lower scale cannot mend "
        "this: look for NaN"
    )


def test_a_scale_that_still_falls_is_not_blamed_on_the_data(said):
    model = compiled(initial_scale=2.0**15)
    model.fit(**batches(2, bad=range(2)))
    assert not said
    model.fit(**batches(3, bad=range(3)))
    (text,) = said
    assert "the loss scale is 1024" in text
    assert "If it goes on: look for NaN" in text


def test_without_float16_nothing_is_said_of_its_range(said):
    model = compiled(
        "mixed_bfloat16", loss_scale=rules.NoLossScale(), initial_scale=None
    )
    data = batches(bad=range(16))
    data["x"][:] = np.nan
    model.fit(**data)
    (text,) = said
    assert "look for NaN or infinity in the data" in text
    assert "bfloat16" not in text


def test_a_skip_that_is_survived_is_not_told_of(said):
    fixed = compiled(loss_scale=8.0, initial_scale=None)
    for each in (compiled(initial_scale=2.0**15), fixed):
        each.fit(**batches(bad=[3, 4, 9]), epochs=2)
    assert not said


def test_callbacks_may_be_given_in_every_way_keras_takes_them(model, said):
    x, y = np.full((16, 2), 1e5, "float32"), np.zeros((16, 1), "float32")
    mine = keras.callbacks.LambdaCallback()
    for given in ([mine], (mine,), mine, [], None):
        model.fit(x, y, 1, 1, 0, given)
        (text,) = said
        assert text.startswith("No update was applied in the last 16 steps")
        said.clear()
    assert model.optimizer.skipped_steps == 5 * 16
    given = keras.callbacks.CallbackList(
        [mine], add_history=True, model=model, verbose=0
    )
    before = list(given.callbacks)
    assert len(model.fit(x, y, 1, callbacks=given).history["loss"]) == 1
    assert len(said) == 1
    assert given.callbacks == before


def test_a_list_of_callbacks_that_was_given_stays_as_it_is(model):
    given = [keras.callbacks.LambdaCallback()]
    model.fit(**batches(), callbacks=given)
    assert len(given) == 1


def test_a_fit_of_the_models_own_is_watched_as_well(said):
    class Own(keras.Sequential):
        def fit(self, x, y, **settings):
            return super().fit(x, y, **settings)

    class Bare(keras.Sequential):
        def fit(self, x, y):
            return super().fit(x, y, batch_size=1, verbose=0)

    data = batches(bad=range(16))
    with current_policy.policy_scope("mixed_float16"):
        models = [Own(layers()), Bare(layers())]
    for each in models:
        each.compile(scaling.LossScaleOptimizer("sgd", 4.0), "mse")
    models[0].fit(**data)
    assert said == [STANDSTILL]
    models[1].fit(data["x"], data["y"])
    with pytest.raises(TypeError, match="unexpected keyword"):
        models[1].fit(**data)


def test_a_monitor_says_it_instead(said):
    monitor = loss_scale_monitor.LossScaleMonitor(alarm_after=2)
    # Small enough that the monitor does not stop the run.
    model = compiled(initial_scale=2.0**15)
    model.fit(**batches(8, bad=range(8)), callbacks=[monitor])
    (text,) = said
    assert "optimizer.check_health()" in text
    said.clear()
    model = compiled(initial_scale=1.0)
    model.fit(**batches(bad=[3]), epochs=2, callbacks=[monitor])
    (text,) = said
    assert text.startswith("Skipped in this epoch: 1 of 16 steps")


def test_the_counters_are_read_once_an_epoch(model, monkeypatch):
    reads = []
    read = scaling.LossScaleOptimizer.skipped_steps.fget
    counted = property(lambda self: reads.append(1) or read(self))
    monkeypatch.setattr(scaling.LossScaleOptimizer, "skipped_steps", counted)
    model.fit(**batches(), epochs=3)
    assert len(reads) == 1 + 3


def test_another_optimizer_is_not_read(said):
    model = compiled()
    model.compile("sgd", "mse", auto_scale_loss=False)
    model.fit(**batches(bad=range(16)))
    assert not [text for text in said if "skipped" in text]
