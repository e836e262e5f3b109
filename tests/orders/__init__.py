"""Random orders of actions on a model, and laws that no order may break."""

from tests.orders.laws import fresh_dtypes as fresh_dtypes
from tests.orders.order import Order as Order
from tests.orders.order import draw as draw
from tests.orders.order import numbered as numbered
from tests.orders.running import failure as failure
from tests.orders.running import run as run
from tests.orders.running import shrunk as shrunk
