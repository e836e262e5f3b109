"""Compares Keras before `import tfmix` and after all uses of it."""

import pytest

from tests import processes

FIRST = """
import sys, types
import keras
import numpy as np

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = np.arange(8) % 3

# Rebound by Keras itself with each session or class.
VOLATILE = {
    "_abc_impl", "GLOBAL_STATE_TRACKER", "GLOBAL_SETTINGS_TRACKER",
}

def snapshot():
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != "keras" or module is None:
            continue
        for name, value in list(vars(module).items()):
            found[module_name, name] = value
            if isinstance(value, type) and value.__module__ == module_name:
                for attribute, inner in list(vars(value).items()):
                    found[module_name, name, attribute] = inner
    return {k: v for k, v in found.items() if k[-1] not in VOLATILE}

def differences():
    now = snapshot()
    plain = (int, float, str, tuple, types.MappingProxyType)
    return [
        key
        for key in {**before, **now}
        if key[0] in modules
        and now.get(key) is not before.get(key)
        and not (
            isinstance(now.get(key), plain) and now[key] == before.get(key)
        )
    ]

def make():
    return keras.Sequential([
        keras.Input((4,)),
        keras.layers.Dense(8, activity_regularizer="l2"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(3, "softmax"),
    ])

def use(model, optimizer="adam"):
    model.compile(
        optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    model.fit(X, Y, verbose=0)
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    model.save("model.keras")
    return keras.saving.load_model("model.keras")

# Once without tfmix: what Keras and Python set up at the first use.
use(make(), keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
keras.models.clone_model(make())
before = snapshot()
modules = {key[0] for key in before}
assert len(before) > 10_000
import tfmix
# What the import replaces.
found = {key[1:] for key in differences()}
assert found == {("Trainer", "compile")}, found
# A float32 model is left alone all the same.
model, adam = make(), keras.optimizers.Adam()
kept = set(vars(model))
model.compile(adam, "mse")
assert model.optimizer is adam
plain = make()
keras.Model.compile.__wrapped__(plain, keras.optimizers.Adam(), "mse")
assert set(vars(model)) == set(vars(plain))
own = model._compile_config.config, plain._compile_config.config
assert own[0].keys() == own[1].keys()
tfmix.set_global_policy("float32")
assert not differences(), differences()
"""
PARTS = {
    "policies": """
for name in ("O1", "mixed_bfloat16", "float16", "mixed_float16"):
    tfmix.set_global_policy(name)
    use(make())
changed = differences()
assert ("keras.src.layers.layer", "Layer", "__init__") in changed
""",
    "scopes": """
with tfmix.policy_scope("mixed_float16"):
    model = make()
    assert differences()
use(model)
try:
    with tfmix.policy_scope("O2"):
        raise KeyError
except KeyError:
    pass
""",
    "conversion": """
model = make()
use(model)
report = tfmix.apply_policy(model, "mixed_float16")
model.fit(X, Y, verbose=0)
tfmix.set_global_policy("float32")
assert not differences(), differences()
report.undo()
model.fit(X, Y, verbose=0)
use(tfmix.convert_model(model, "mixed_float16"))
model, optimizer, report = tfmix.prepare(model, "adam")
use(model, optimizer)
""",
    "reports": """
from tfmix import callbacks
tfmix.check(make(), X, Y, loss="sparse_categorical_crossentropy")
model = make()
use(model, tfmix.LossScaleOptimizer("adam"))
tfmix.guard(model)
monitors = [callbacks.LossScaleMonitor(), callbacks.NumericsMonitor()]
model.fit(X, Y, verbose=0, callbacks=monitors)
""",
}
# A model with a policy leaves its rules' replacements until then.
LAST = """
tfmix.set_global_policy("float32")
assert not differences(), differences()
"""


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_nothing_of_keras_differs_from_before_the_import(part, tmp_path):
    code = FIRST + PARTS[part] + LAST
    done = processes.python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
