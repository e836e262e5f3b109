"""Runs orders, and shrinks those that break a law."""

import collections
import dataclasses
import re
import tempfile
import traceback
import warnings
from unittest import mock

import keras

import tfmix
from tests.orders.laws import Broken, keras_before
from tests.orders.machine import Machine
from tests.orders.order import Order, numbered
from tfmix.optimizers import eight_bit_slots


def run(order):
    """Runs an order, and restores the policy; raises an error for a break."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)
        # Keras as it is without tfmix, which watches `compile` from its import.
        tfmix.set_global_policy("float32")
        try:
            keras_before()
            # Small variables would keep float32 state.
            small = mock.patch.object(eight_bit_slots, "SMALL", 1)
            with small, tempfile.TemporaryDirectory() as folder:
                Machine(order, folder).run()
        finally:
            tfmix.set_global_policy("float32")
            keras.utils.clear_session(free_memory=False)


def failure(order):
    """Returns one line about the broken law; an empty string if none is."""
    try:
        run(order)
    except Exception as error:
        return _gist(error)
    return ""


def _gist(error):
    text = " ".join(str(error).split())[:300]
    if isinstance(error, Broken):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/tfmix/" in f.filename] or frames
    last = ours[-1]
    place = f"{last.filename.split('/tfmix/')[-1]}:{last.lineno} {last.name}"
    return f"raises {type(error).__name__} at {place}: {text}"


def kind_of(text):
    """Returns the part of a message that failures of one cause share."""
    head = re.sub(r"[-+]?\d[\d.e+-]*|'[^']*'|\"[^\"]*\"", "#", text)
    return head[:90]


def shrunk(order):
    """Returns the smallest order found that still breaks the same law."""
    wanted = kind_of(failure(order))
    changed = True
    while changed and wanted:
        changed = False
        for smaller in _smaller(order):
            if kind_of(failure(smaller)) == wanted:
                order, changed = smaller, True
                break
    return order


def _smaller(order):
    """Yields orders with one step fewer or a simpler setting."""
    for index in range(len(order.steps)):
        steps = order.steps[:index] + order.steps[index + 1 :]
        yield dataclasses.replace(order, steps=steps)
    plainest = Order(steps=order.steps)
    for field in ("made", "wrap", "kind", "optimizer", "mode"):
        value = getattr(plainest, field)
        if getattr(order, field) != value:
            yield dataclasses.replace(order, **{field: value})


def run_many(count, seed, replicas=1, modes=None, report=print, shrink=True):
    """Runs numbered orders; returns the failures by kind, with an order."""
    found = collections.defaultdict(list)
    for number in range(count):
        order = numbered(number, seed, replicas, modes)
        text = failure(order)
        if not text:
            continue
        kind = kind_of(text)
        if shrink and not found[kind]:
            order = shrunk(order)
            text = failure(order)
        if not found[kind]:
            report(f"number {number}, seed {seed}: {text}\n    {order}")
        found[kind].append((number, order))
    return found
