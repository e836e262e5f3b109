"""The laws hold for any actions on a model, in any order."""

import types

import hypothesis
import keras
import pytest
from hypothesis import strategies

import tfmix
from tests import helpers, orders
from tfmix.step import finite

# A first run compiles the float32 models, so there is no deadline.
SETTINGS = hypothesis.settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
RANDOM = strategies.randoms(use_true_random=False, note_method_calls=False)


def drawn(**how):
    return RANDOM.map(lambda rng: orders.draw(rng, **how))


@hypothesis.settings(SETTINGS, max_examples=1)
@hypothesis.given(drawn(modes=["eager"]))
def test_an_order_breaks_no_law(order):
    orders.run(order)


@pytest.mark.slow
@hypothesis.settings(SETTINGS, max_examples=150)
@hypothesis.given(drawn())
def test_many_orders_break_no_law(order):
    orders.run(order)


@pytest.mark.slow
@helpers.requires_backend("tensorflow")
@hypothesis.settings(SETTINGS, max_examples=50)
@hypothesis.given(drawn(replicas=2))
def test_many_orders_on_two_replicas_break_no_law(order):
    orders.run(order)


def scaled_twice(monkeypatch):
    """Scales the loss twice, while gradients are divided once."""
    once = tfmix.LossScaleOptimizer.scale_loss
    monkeypatch.setattr(
        tfmix.LossScaleOptimizer,
        "scale_loss",
        lambda self, loss: once(self, once(self, loss)),
    )


def converts_nothing(monkeypatch):
    report = types.SimpleNamespace(undo=lambda: None)
    monkeypatch.setattr(tfmix, "apply_policy", lambda *_: report)


def skips_nothing(monkeypatch):
    def update(grads, update, variables):
        update()
        return True, keras.ops.zeros(len(grads), "bool")

    monkeypatch.setattr(finite, "apply_if_finite", update)


def keeps_wrappers(monkeypatch):
    convert = tfmix.apply_policy

    def apply_policy(model, policy):
        report = convert(model, policy)
        if policy == "float32" and model.compiled:
            model.optimizer = tfmix.LossScaleOptimizer(model.optimizer)
        return report

    monkeypatch.setattr(tfmix, "apply_policy", apply_policy)


def leaves_a_method(monkeypatch):
    monkeypatch.setattr(keras.layers.ReLU, "call", keras.layers.Softmax.call)


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize(
    ("fault", "law", "wrap"),
    [
        # The wrapper of `compile` would not scale, so this needs the user's.
        (scaled_twice, "a", "scaled"),
        (converts_nothing, "b", "bare"),
        (skips_nothing, "d", "bare"),
        (keeps_wrappers, "e", "bare"),
        (leaves_a_method, "f", "bare"),
    ],
)
def test_a_fault_breaks_its_law(monkeypatch, fault, law, wrap):
    orders.run(orders.Order((), wrap=wrap))
    # The expected dtypes are cached before the fault is injected.
    orders.fresh_dtypes("sequential", "mixed_float16")
    fault(monkeypatch)
    steps = "apply:mixed_float16", "apply:float32"
    with pytest.raises(orders.Broken, match=f"^{law}: "):
        orders.run(orders.Order(steps, wrap=wrap))
