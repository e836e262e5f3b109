"""Faults of `compile` under a global 16-bit policy."""

from typing import Any

import keras
import numpy as np

from benchmarks.fault_cases import loops, words
from benchmarks.fault_cases.record import Outcome, fault


def _model(**settings: Any) -> Any:
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(4, **settings),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )


@fault()
def static_scale_replaced(system: Any) -> Outcome:
    """Model.compile(SGD(loss_scale_factor=1024)) under mixed_float16."""
    with system.under(system.policy):
        model = _model()
        with words.heard() as said:
            model.compile(keras.optimizers.SGD(loss_scale_factor=1024.0), "mse")
        optimizer, weights = model.optimizer, model.trainable_variables
        optimizer.build(weights)
        bad = [np.full(v.shape, np.inf, "float32") for v in weights]
        for _ in range(2):
            loops.step(optimizer, weights, bad)
    told = [text for text in said if "loss_scale_factor" in text]
    scale = words.scale(optimizer)
    return Outcome(
        scale == 1024.0 or bool(told),
        f"the fixed scale of 1024 is {scale:g} after 2 bad steps, "
        f"{len(told)} warning(s)",
    )


@fault()
def policy_map(system: Any) -> Outcome:
    """The global policy is a DTypePolicyMap; compile("sgd")."""
    policies = keras.dtype_policies.DTypePolicyMap(default_policy=system.policy)
    with system.under(policies):
        model = _model()
        model.compile("sgd", loss="mse")
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    return Outcome(
        scaled,
        f"layers compute in {model.layers[0].compute_dtype}, the loss is "
        f"{'' if scaled else 'not '}scaled",
    )


@fault()
def activity_regularizer(system: Any) -> Outcome:
    """An activity regularizer beside a compiled loss, mixed_float16."""
    with system.under(system.policy):
        model = _model(activity_regularizer=keras.regularizers.L2(0.01))
        model.compile("sgd", loss="mse")
        x = np.ones((8, 4), "float32")
        loss = model.fit(x, x[:, :1], verbose=0).history["loss"][0]
    return Outcome(bool(np.isfinite(loss)), f"trains, loss {loss:.3g}")


@fault()
def pure_without_masters(system: Any) -> Outcome:
    """Policy bfloat16, a wrapped SGD without masters, 200 small steps."""
    rng = np.random.default_rng(3)
    # An epoch has 200 steps, all on the same 16 rows.
    x = np.tile(rng.normal(size=(16, 4)).astype("float32"), (200, 1))
    y = x.sum(axis=1, keepdims=True)
    losses = {}
    start = _model().get_weights()
    for policy in ("float32", "bfloat16"):
        with system.under(policy):
            model = _model()
            # An initializer would draw other numbers in bfloat16.
            model.set_weights(start)
            # Each step is less than half a step of bfloat16 near 1.
            model.compile(system.wrap(keras.optimizers.SGD(1e-3)), loss="mse")
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
            losses[policy] = model.evaluate(x[:16], y[:16], verbose=0)
    return Outcome(
        losses["bfloat16"] < 1.2 * losses["float32"],
        f"loss {losses['bfloat16']:.3g} (float32: {losses['float32']:.3g})",
    )
