"""Whatever users do to a model, and in whatever order: the laws hold."""

import hypothesis
import pytest
from hypothesis import strategies

from tests import helpers, orders

# A first run compiles the float32 twins; the deadline is not for that.
SETTINGS = hypothesis.settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
RANDOM = strategies.randoms(use_true_random=False, note_method_calls=False)


def drawn(**how):
    return RANDOM.map(lambda rng: orders.draw(rng, **how))


@hypothesis.settings(SETTINGS, max_examples=8)
@hypothesis.given(drawn(modes=["eager"]))
def test_a_few_orders_break_no_law(order):
    orders.run(order)


@pytest.mark.slow
@hypothesis.settings(SETTINGS, max_examples=700)
@hypothesis.given(drawn())
def test_many_orders_break_no_law(order):
    orders.run(order)


@pytest.mark.slow
@helpers.requires_backend("tensorflow")
@hypothesis.settings(SETTINGS, max_examples=300)
@hypothesis.given(drawn(replicas=2))
def test_many_orders_on_two_replicas_break_no_law(order):
    orders.run(order)


def test_an_order_is_its_line_again():
    order = orders.numbered(3, replicas=2)
    assert orders.Order.parse(str(order)) == order
    assert orders.numbered(3, replicas=2) == order
    assert orders.numbered(4, replicas=2) != order
