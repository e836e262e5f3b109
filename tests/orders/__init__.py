"""Random orders of actions on a model, and laws that no order may break."""

from tests.orders.laws import Broken as Broken
from tests.orders.laws import fresh_dtypes as fresh_dtypes
from tests.orders.machine import run as run
from tests.orders.order import Order as Order
from tests.orders.order import draw as draw
