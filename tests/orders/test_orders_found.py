"""Orders that once broke a law, each as short as possible.

Hypothesis prints such a line. The comments name the cause.
"""

import pytest

from tests import helpers, orders

EVERYWHERE = {
    # The first step creates the metrics, and a skip did not reset them.
    "a bad first step of a compiled model": orders.Order(
        ("compile:same",), made="O2", optimizer="sgd", mode="graph", inside=True
    ),
    # `compile` and conversions did not add masters inside a loss scaler.
    "a loss scaler given to a pure model": orders.Order(
        ("compile:adam:scaled",), made="float16"
    ),
    # Under XLA, a skipped step restored views of 16-bit variables twice.
    "lost bits under XLA": orders.Order(
        ("thaw",), made="bfloat16", wrap="stochastic", mode="xla"
    ),
    # The guard of the former optimizer refused the new one.
    "a bare optimizer after a scaled one in float32": orders.Order(
        ("copy:float32", "compile:sgd:bare"), wrap="masters"
    ),
    "the way back to float32 of a model guarded by hand": orders.Order(
        ("guard", "apply:float32"), made="mixed_float16"
    ),
    # A built optimizer takes no masters, and the model stays as it was.
    "back to a pure policy": orders.Order(
        ("copy:bfloat16", "apply:mixed_float16", "apply:bfloat16"),
        optimizer="sgd",
        mode="eager",
        inside=True,
    ),
    "to the pure policy that a copy had": orders.Order(
        ("copy:float16", "apply:float16"), optimizer="sgd", wrap="scaled"
    ),
    # tfmix did not remove its own wrappers.
    "the way back to float32 from mixed_float16": orders.Order(
        ("apply:float32",), made="mixed_float16"
    ),
    "from pure to mixed": orders.Order(
        ("apply:mixed_bfloat16",), made="bfloat16", optimizer="momentum"
    ),
    "from float16 to bfloat16 arithmetic": orders.Order(
        ("apply:mixed_bfloat16",), made="O1"
    ),
    # `undo` restored a `call` of tfmix as if it was the user's.
    "back into the 16 bits a model was made in": orders.Order(
        ("apply:float32", "undo"), made="mixed_float16"
    ),
    # `undo` wrote the state of one optimizer into another.
    "another optimizer between conversion and undo": orders.Order(
        ("apply:mixed_float16", "compile:adam:bare", "undo"),
        optimizer="momentum",
    ),
}
ON_REPLICAS = {
    # A conversion created variables and optimizers outside of the scope.
    "conversion to 16-bit variables": orders.Order(
        ("apply:bfloat16", "undo"), replicas=2, mode="graph"
    ),
    "the same outside of the strategy's scope": orders.Order(
        ("apply:float16", "undo"), replicas=2, inside=False
    ),
    # The monitor called `int()` on a mirrored variable.
    "the monitor of the scale": orders.Order(
        ("scale_monitor",), made="mixed_float16", replicas=2
    ),
}


def cases(found):
    return [pytest.param(order, id=name) for name, order in found.items()]


@pytest.mark.costly
@pytest.mark.parametrize("order", cases(EVERYWHERE))
def test_an_order_that_broke_a_law(order):
    orders.run(order)


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("order", cases(ON_REPLICAS))
def test_an_order_that_broke_a_law_on_two_replicas(order):
    orders.run(order)
