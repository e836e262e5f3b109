"""A user's program for type checkers; it never runs.

`test_typed_user.py` checks it with mypy from outside of the tree. A checker
that does not see our types fails at `assert_type`.
"""

from typing import Any, assert_type

import keras
import numpy as np

import tfmix
from tfmix import callbacks


def train(model: keras.Model, x: np.ndarray, y: np.ndarray) -> int:
    """Trains under a policy, with a custom loss scale."""
    tfmix.set_global_policy("mixed_float16")
    policy = tfmix.Policy(
        "mixed_float16",
        float32_layers=tfmix.Policy.default_float32_layers(
            add=["head", "enc/.*"]
        ),
        float32_ops=tfmix.Policy.default_float32_ops(add=["cos"]),
    )
    assert_type(policy.float32_ops, list[str])
    rule = tfmix.DynamicLossScale(1024.0, growth_steps=100)
    optimizer = tfmix.LossScaleOptimizer("adam", loss_scale=rule)
    with tfmix.policy_scope(policy):
        model.compile(optimizer, loss="mse")
    monitor = callbacks.LossScaleMonitor()
    model.fit(x, y, callbacks=[monitor, callbacks.NumericsMonitor(every=10)])
    assert_type(optimizer.overflow_counts, dict[str, int])
    optimizer.check_health(max_consecutive_skips=5)
    return optimizer.skipped_steps


class Halving(tfmix.loss_scaling.LossScale):
    """A custom rule."""

    def init(self) -> tfmix.loss_scaling.LossScaleState:
        """Starts like another rule."""
        return tfmix.FixedLossScale(8.0).init()


def look(model: keras.Model, x: np.ndarray, y: np.ndarray) -> str:
    """Reads reports, and writes them."""
    report = tfmix.check(model, x, y, loss="mse", policy="mixed_float16")
    assert_type(report.healthy, bool)
    for row in report.faults:
        assert_type(row.layer, str)
        assert_type(row.headroom_bits, float)
    assert_type(report.suggested_policy(), tfmix.Policy)
    report.plot("headroom.png")
    advice = tfmix.hardware.advise(model, 32)
    assert_type(advice.share_16bit, float)
    names = [device.name for device in tfmix.hardware.devices()]
    assert_type(names, list[str])
    target = tfmix.hardware.targets()[0]
    step = tfmix.hardware.compile_for(model, 32, target=target.name)
    print(tfmix.summary(model), step)
    return report.to_json()


def convert(model: keras.Model, dataset: Any) -> tuple[Any, ...]:
    """Converts models to another policy, and back."""
    report = tfmix.apply_policy(model, "mixed_bfloat16")
    assert_type([row.after for row in report.rows], list[str])
    report.undo()
    prepared = tfmix.prepare(model, "sgd", level="O2")
    twin = tfmix.convert_model(prepared.model, tfmix.Policy("bfloat16"))
    tfmix.guard(twin)
    weights = tfmix.optimizers.export_float32(model, "model.weights.h5")
    assert_type(weights, list[np.ndarray])
    tfmix.optimizers.load_float32(model, weights)
    finite = tfmix.all_finite(weights)
    head = tfmix.float32_output("softmax", name="probabilities")
    return finite, head


def optimizers() -> list[keras.optimizers.Optimizer]:
    """Creates one optimizer of each kind."""
    inner = keras.optimizers.Adam()
    try:
        return [
            tfmix.LossScaleOptimizer(inner, loss_scale=tfmix.NoLossScale()),
            tfmix.LossScaleOptimizer(inner, loss_scale=8.0),
            tfmix.optimizers.MasterWeightOptimizer(inner, name="masters"),
            tfmix.optimizers.BFloat16Optimizer(inner, seed=1),
            tfmix.optimizers.LowMemoryOptimizer(inner, seed=1),
        ]
    except tfmix.LossScaleError as error:
        raise SystemExit(str(error)) from error


policy: keras.DTypePolicy = tfmix.global_policy()
