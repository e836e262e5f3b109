"""What `compile`, `summary` and `check` say of the dtypes of a model."""

import keras
from keras import ops

from tfmix import _formats, _messages
from tfmix._keras import layers
from tfmix.autocast import global_policy, record
from tfmix.conversion import planned_policies
from tfmix.policy import policy as policies
from tfmix.tools.diagnostics import plans

# float16 rounds half of its smallest number, 6e-8, to 0.
_DIGITS = {
    "float16": "3 digits, and those below 3e-8 become 0",
    "bfloat16": "2 digits",
}


def on_compile(model: keras.Model) -> None:
    """Warns once of float32 layers that the policy does not reach.

    It also names a last activation in 16 bit.
    """
    for note in last_activations(model):
        _messages.warn_once("%s", note, about=note)
    policy = global_policy.global_policy()
    if not policies.is_sixteen_bit(policy):
        return
    wide = [
        step.layer
        for step in planned_policies.plan(model, policy)
        if step.shown
        and planned_policies.entry(step.policy, step.layer).compute_dtype
        in _formats.SIXTEEN_BIT
    ]
    late = [*filter(record.is_float32_without_policy, wide)]
    if not late:
        return
    is_name = policies.with_rules(policy).has_default_rules
    _messages.warn_once(
        "%d of %d layers that gain from %r compute in float32: they come from "
        "a float32 file, or were made before the policy was set. Write "
        "tfmix.apply_policy(model, %s).",
        len(late),
        len(wide),
        policy.name,
        repr(policy.name) if is_name else "tfmix.global_policy()",
        about=("float32 layers", model.name, len(late), len(wide)),
    )


def last_activations(
    model: keras.Model, planned: plans.Plan | None = None
) -> list[str]:
    """Names each last layer whose probabilities are rounded to 16 bit.

    Args:
        model: The model. In one that is neither Functional nor Sequential, each
            softmax counts as last.
        planned: The policies to assume. Defaults to those of the layers.
    """
    last = {id(layer) for layer in planned_policies.heads(model)}
    is_known = layers.is_structure(model)
    notes = []
    for layer in layers.that_compute(model):
        name = layers.last_activation(layer)
        is_last = id(layer) in last if is_known else name == "softmax"
        if name is None or not is_last:
            continue
        dtype = plans.dtype(planned or {}, layer)
        if dtype in _formats.SIXTEEN_BIT and _returns(model, name, dtype):
            notes.append(
                f"the last layer, {layer.name!r}, returns its {name} in "
                f"{dtype}: predictions keep {_DIGITS[dtype]}. Give it "
                f"dtype='float32', or put tfmix.float32_output({name!r}) "
                "behind a layer without an activation."
            )
    return notes


def _returns(model: keras.Model, name: str, dtype: str) -> bool:
    """Returns whether an activation returns the 16 bit that it gets."""
    activation = getattr(keras.activations, name)
    with record.under_rules(model):
        result = activation(ops.zeros((1, 2), dtype))
    return keras.backend.standardize_dtype(result.dtype) == dtype


record.advise_by(on_compile)
