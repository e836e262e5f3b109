"""Lists every name that is replaced in the process, with its maker and why.

`stand_ins` replaces the ops behind `keras.ops` and the operators of tensors
while a 16-bit policy is active, and the methods below. `global_policy` replaces
what says which policy a new layer gets, and `compile_method` Keras's `compile`.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import (
    compile_method,
    custom_vjp,
    layers,
    op_places,
    replacing,
    tapes,
    training,
)
from tfmix._keras import variables as keras_variables
from tfmix.autocast import bare_optimizers, fallback
from tfmix.ops import (
    apply,
    attention,
    exact_values,
    recomputation,
    stand_ins,
    ways,
)
from tfmix.ops.stand_ins import Method, late
from tfmix.optimizers import sixteen_bit_optimizer


def _recomputed(original: Callable) -> Any:
    return recomputation.alike(original, stand_ins.block_as_now)


if keras.backend.backend() == "tensorflow":
    _OF_BACKEND: tuple[Method, ...] = (
        # A user may ask for the gradient of the 16-bit copy of a tensor.
        Method(tapes.GRADIENTS, late(tapes.noting_sources), always=True),
        Method(tapes.OF_GRAPHS, late(tapes.without_rules), always=True),
        # A graph that was traced without a tape has no gates.
        Method(tapes.TRACE, late(tapes.traced_for_gradients), always=True),
    )
else:
    from tfmix.ops import jax_custom_gradients

    _OF_BACKEND = (
        # Gradients are scaled inside of a model, but not those of a user's.
        Method(
            custom_vjp.PLACES,
            late(jax_custom_gradients.unscaled),
            always=True,
        ),
    )

METHODS = (
    # It makes a copy of a variable that knows its float32 source.
    Method(
        [keras_variables.AUTOCAST],
        apply.noting_weights,
        always=True,
    ),
    # A loop would keep float32 sums of all its steps.
    Method(layers.LOOPS, ways.in_time_steps),
    # A layer's state is what float32 computes.
    Method(
        [keras_variables.ASSIGN],
        functools.partial(
            keras_variables.assigning, exactly=fallback.assign_exactly
        ),
        always=True,
    ),
    # Regularizers and added losses exceed float16.
    Method(training.PENALTIES, exact_values.with_float32_arguments),
    # A step whose gradients are not finite is skipped.
    Method(
        functools.partial(
            replacing.definers, keras.optimizers.Optimizer, "apply"
        ),
        bare_optimizers.applying,
    ),
    Method(
        [(sixteen_bit_optimizer.SixteenBitOptimizer, "apply")],
        bare_optimizers.applying,
    ),
    # A user's gradient runs after the layer's call, under its settings.
    Method(recomputation.PLACES, late(_recomputed), always=True),
    *_OF_BACKEND,
    # Files name the optimizer that `compile` got.
    Method(
        [compile_method.OLD_FORMAT],
        late(compile_method.naming_saved_optimizer),
        always=True,
    ),
    # With dropout, attention layers do not call the op.
    Method(
        op_places.ATTENTION_METHODS,
        attention.attention_in_float32,
        rule=op_places.ATTENTION,
    ),
)
