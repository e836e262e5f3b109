"""Keras's `fit` and `compile` call these methods, in this order."""

import inspect

import keras
import numpy as np
import pytest

from tests._keras.contracts import (
    BACKEND,
    TRAINER,
    compiled,
    find,
    sequential,
    spy,
    with_metrics,
)
from tfmix._keras import training


def data():
    return np.ones((2, 3, 4), "float32"), np.zeros((2, 3, 4), "float32")


@pytest.mark.costly
@pytest.mark.parametrize("jit", [True, False])
def test_fit_scales_the_loss_and_then_applies_the_gradients(monkeypatch, jit):
    # TensorFlow's step keeps its state in variables, and JAX's returns it.
    apply = {"tensorflow": "apply_gradients", "jax": "stateless_apply"}
    model, calls = compiled(jit_compile=jit), []
    for name in ("scale_loss", apply[BACKEND], "apply"):
        spy(monkeypatch, model.optimizer, name, calls)
    model.fit(*data(), verbose=0)
    assert [c[0] for c in calls] == ["scale_loss", apply[BACKEND], "apply"]


def test_fit_takes_the_methods_of_the_one_model(monkeypatch):
    # tfmix puts its wrappers on the model, not on its class.
    model, calls = compiled(), []
    names = ["compute_loss", "_compute_loss", "compute_metrics"]
    step = {"tensorflow": "train_step", "jax": "compute_loss_and_updates"}
    for name in [step[BACKEND], *names]:
        spy(monkeypatch, model, name, calls)
    model.fit(*data(), verbose=0)
    order = list(dict.fromkeys(call[0] for call in calls))
    # Before the step, Keras builds the loss and the metrics with shapes.
    assert set(order) == {step[BACKEND], *names}
    start = [c[0] for c in calls].index(step[BACKEND])
    assert [c[0] for c in calls[start:]] == [
        step[BACKEND],
        "_compute_loss",
        "compute_loss",
        "compute_metrics",
    ]


def test_compute_loss_of_a_model_takes_what_its_step_passes():
    model = compiled()
    x, y = data()
    loss = model._compute_loss(
        x=x, y=y, y_pred=model(x), sample_weight=None, training=True
    )
    assert np.shape(loss) == ()


def test_a_compiled_loss_is_called_with_labels_and_results(monkeypatch):
    model, calls = compiled(), []
    original = model._compile_loss
    vars(model)["_compile_loss"] = lambda *given: calls.append(given) or 1.0
    x, y = data()
    model.compute_loss(x=x, y=y, y_pred=x, sample_weight=None)
    assert len(calls) == 1
    assert calls[0][0] is y
    assert calls[0][1] is x
    assert calls[0][2] is None
    compile_loss = find("keras.src.trainers.compile_utils.CompileLoss")
    assert type(original) is compile_loss
    assert original._user_loss == "mse"
    assert list(original._user_loss_weights) == [0.5]


def test_a_loss_of_the_same_settings_gives_the_same_loss():
    compile_loss = find("keras.src.trainers.compile_utils.CompileLoss")
    x, y = data()
    loss = compile_loss(loss="mse", loss_weights=[0.5])
    assert float(loss(y, x)) == float(compiled()._compile_loss(y, x)) == 0.5


def test_a_built_loss_knows_each_output_by_its_path():
    compile_loss = find("keras.src.trainers.compile_utils.CompileLoss")
    made = compile_loss(loss={"b": "mse", "a": "mae"}, output_names=["b", "a"])
    assert made.output_names == ["b", "a"]
    outputs = [keras.KerasTensor((4, 2)), keras.KerasTensor((4, 3))]
    made.build(outputs, outputs)
    found = [(one.path, one.loss.name) for one in made._flat_losses]
    assert found == [((0,), "mse"), ((1,), "mae")]


def test_added_losses_are_aggregated_before_the_sum(monkeypatch):
    model = keras.Sequential([keras.layers.Dense(4, kernel_regularizer="l2")])
    model.compile("sgd", loss="mse")
    trainer = find(TRAINER)
    calls = spy(monkeypatch, trainer, "_aggregate_additional_loss")
    x, y = data()
    y_pred = model(x)
    model.compute_loss(x=x, y=y, y_pred=y_pred)
    assert len(calls) == 1
    assert calls[0][1] is model
    assert float(calls[0][2]) > 0.0


def test_models_are_trainers():
    trainer = find(TRAINER)
    assert issubclass(keras.Model, trainer)
    assert {"compile", "fit", "_aggregate_additional_loss"} <= {*vars(trainer)}


@pytest.mark.costly
def test_metrics_of_compile_are_known_before_they_are_built():
    model = with_metrics()
    (given,) = model._compile_metrics._user_metrics
    assert not model._compile_metrics.built
    assert given not in model.metrics
    assert given in training.metrics(model)
    x = np.ones((2, 3, 4))
    model.fit(x, 0.0 * model.predict(x, verbose=0), verbose=0)
    assert model._compile_metrics.built
    assert training.metrics(model) == model.metrics


def test_the_compile_config_is_what_a_model_saves_of_compile():
    model = compiled()
    assert model._compile_config.config["loss"] == "mse"
    model._compile_config.config["loss"] = "mae"
    assert model.get_compile_config()["loss"] == "mae"
    assert not hasattr(sequential(), "_compile_config")


def test_safe_mode_is_what_the_scope_says():
    def config():
        layer = keras.layers.Lambda(lambda x: x)
        return keras.saving.serialize_keras_object(layer)

    scope = find("keras.src.saving.serialization_lib.SafeModeScope")
    load = keras.saving.deserialize_keras_object
    with scope(False):
        assert isinstance(load(config(), safe_mode=None), keras.Layer)
    with scope(True), pytest.raises(ValueError, match="[Ll]ambda"):
        load(config(), safe_mode=None)


def test_keras_classes_are_in_modules_of_its_name():
    # tfmix distinguishes Keras's own layers and regularizers by this.
    assert keras.layers.Dense.__module__.startswith("keras.src.")
    assert keras.regularizers.L2.__module__.startswith("keras.src.")
    assert inspect.isfunction(vars(keras.regularizers.L2)["__call__"])


def test_the_symbolic_build_makes_losses_metrics_and_optimizer():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("adam", loss="mse", metrics=["mae"])
    before = len(model.metrics_variables)
    data = keras.KerasTensor((8, 4)), keras.KerasTensor((8, 2))
    model._symbolic_build(data_batch=data)
    assert len(model.metrics_variables) > before
    assert model.optimizer.built
