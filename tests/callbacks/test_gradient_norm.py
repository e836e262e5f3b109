"""The norm of unscaled gradients, in the logs of `fit` and in a loop."""

import math

import keras
import numpy as np
import pytest
from keras import ops

from tests import helpers
from tests.callbacks import test_loss_scale_monitor as monitored
from tfmix.loss_scaling import optimizer as scaling
from tfmix.tools.callbacks import loss_scale_monitor, numerics_monitor

WAYS = {
    "eager": {"run_eagerly": True},
    "compiled": {"jit_compile": False},
    "jit": {"jit_compile": True},
}


def monitor(**settings):
    return loss_scale_monitor.LossScaleMonitor(gradient_norm=True, **settings)


def compiled(inner="sgd", **settings):
    """Returns a model whose gradient is `2 * 3 * (1, 1, 1)` at the start."""
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")]
    )
    model.layers[0].bias.assign([1.0])
    model.compile(scaling.LossScaleOptimizer(inner), "mse", **settings)
    return model


def sgd(rate, **settings):
    return keras.optimizers.SGD(rate, **settings)


FIRST = 6.0 * math.sqrt(3.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("clipnorm", [None, 0.5])
def test_logs_and_timeline_hold_the_norm_of_unscaled_gradients(way, clipnorm):
    # It is measured before gradients are clipped.
    inner = sgd(0.0, global_clipnorm=clipnorm)
    model, watch = compiled(inner, **WAYS[way]), monitor(every=1)
    data = monitored.batches(3)
    history = monitored.fit(model, watch, data)
    assert history["gradient_norm"] == pytest.approx([FIRST])
    found = [reading.gradient_norm for reading in watch.timeline]
    assert found[1:] == pytest.approx([FIRST] * 3)


@pytest.mark.costly
@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_step_keeps_the_norm_of_the_last_applied_one(way):
    # The prediction 3 becomes 3 - 3 * 2 * 3 / 12 = 1.5 in the first step.
    model = compiled(sgd(1 / 12), **WAYS[way])
    data = monitored.batches(3, bad=[2])
    history = monitored.fit(model, monitor(), data)
    assert history["skipped_steps"] == [1]
    assert history["gradient_norm"] == pytest.approx([FIRST / 2])


def test_an_unknown_norm_is_nan_and_left_out_of_the_progress_bar(capsys):
    watch, data = monitor(), monitored.batches(2, bad=[0, 1])
    history = monitored.fit(compiled(), watch, data)
    assert math.isnan(*history["gradient_norm"])
    assert math.isnan(watch.timeline[0].gradient_norm)
    monitored.fit(compiled(), monitor(), monitored.batches(4), verbose=1)
    out = capsys.readouterr().out
    assert "nan" not in out
    assert "gradient_norm: " in out


def test_a_model_trained_before_is_traced_again():
    model = compiled(sgd(0.0))
    data = monitored.batches(2)
    monitored.fit(model, monitored.Monitor(), data)
    tap = numerics_monitor.NumericsMonitor(every=1)
    history = monitored.fit(model, monitor(), data, callbacks=[tap])
    assert history["gradient_norm"] == pytest.approx([FIRST])
    assert tap.report


def test_the_norm_is_off_by_default():
    model, watch = compiled(), monitored.Monitor()
    history = monitored.fit(model, watch, monitored.batches(2))
    assert "gradient_norm" not in history
    assert watch.timeline[-1].gradient_norm is None
    names = [variable.name for variable in model.optimizer.variables]
    assert "gradient_norm" not in names


def test_a_saved_optimizer_does_not_contain_the_norm(tmp_path):
    model = compiled()
    monitored.fit(model, monitor(), monitored.batches(2))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    names = [variable.name for variable in loaded.optimizer.variables]
    assert "gradient_norm" not in names
    history = monitored.fit(loaded, monitor(), monitored.batches(2))
    assert history["applied_steps"] == [4]
    model.load_weights(tmp_path / "model.keras")


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_custom_loop_can_record_the_norm(unscaled):
    optimizer = scaling.LossScaleOptimizer(sgd(1.0))
    weights = [keras.Variable(value) for value in ([0.0, 0.0], 0.0, 1.0)]
    # The value that overwrites this one is no gradient.
    weights[2].overwrite_with_gradient = True
    optimizer.build(weights)
    assert math.isnan(optimizer.gradient_norm)
    optimizer.keep_gradient_norm()
    optimizer.keep_gradient_norm()
    grads = [ops.array([1.0, 2.0]), ops.array(2.0)]
    if not unscaled:
        grads = [optimizer.scale_loss(gradient) for gradient in grads]
    grads.append(ops.array(100.0))
    optimizer.apply(grads, weights, unscaled=unscaled)
    assert optimizer.gradient_norm == 3.0


def test_gradient_accumulation_is_refused():
    model = compiled(sgd(1.0, gradient_accumulation_steps=4))
    message = "gradient_norm.*gradient_accumulation_steps=4"
    with pytest.raises(ValueError, match=message):
        monitored.fit(model, monitor(), monitored.batches(2))
    monitored.fit(model, monitored.Monitor(), monitored.batches(2))


@pytest.mark.parametrize("value", [1, "yes", None])
def test_a_value_that_is_not_a_bool_is_refused(value):
    with pytest.raises(TypeError, match="`gradient_norm` must be True or Fal"):
        loss_scale_monitor.LossScaleMonitor(gradient_norm=value)


@helpers.requires_backend("tensorflow")
def test_rows_of_a_sparse_gradient_count_as_their_sum():
    import tensorflow as tf

    optimizer = scaling.LossScaleOptimizer(sgd(1.0), loss_scale=8.0)
    table = keras.Variable(np.zeros((5, 1)))
    optimizer.build([table])
    optimizer.keep_gradient_norm()
    helpers.takes_scaled_gradients(optimizer)
    rows = tf.constant([[8.0], [16.0], [32.0]])
    optimizer.apply([tf.IndexedSlices(rows, [1, 1, 2], (5, 1))], [table])
    assert optimizer.gradient_norm == 5.0


@helpers.requires_backend("tensorflow")
def test_the_norm_is_that_of_the_sum_over_replicas():
    with helpers.mirrored_strategy().scope():
        model = compiled(sgd(0.0), jit_compile=False)
    data = monitored.batches(6, bad=[3]) | {"batch_size": 2}
    history = monitored.fit(model, monitor(), data)
    assert history["gradient_norm"] == pytest.approx([FIRST])
    assert (history["applied_steps"], history["skipped_steps"]) == ([2], [1])
