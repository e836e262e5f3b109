"""Programs of several ops give float32's results and gradients, to 16 bit.

`test_every_op` asks each op alone. Here a generator makes chains of three ops,
which begin with slices, casts and functions of a weight, or contain loops.
"""

import random

import numpy as np
import pytest
from keras import ops

from tests import helpers, steps
from tests.ops import against_float32

RNG = np.random.default_rng(3)
# Both formats hold these numbers, so an error is one of the ops.
X = RNG.integers(-60, 60, (2000, 4)).astype("float32") / 32
W = RNG.integers(10, 60, 4).astype("float32") / 32


def by_rows(t, w):
    return ops.einsum("ni,i->n", t, ops.reshape(w, (-1,)))


ALONE = {
    "sin": ops.sin,
    "tanh": ops.tanh,
    "exp": ops.exp,
    "square": ops.square,
    "root": lambda t: ops.sqrt(ops.square(t) + 0.5),
    "logarithm": lambda t: ops.log(ops.square(t) + 0.5),
    "softplus": ops.softplus,
    "sigmoid": ops.sigmoid,
    "gelu": ops.gelu,
    "half": lambda t: t * 0.5 + 0.25,
    "far": lambda t: t * 1e5 * 1e-5,
    "inverse": lambda t: 1 / (1 + t * t),
    "cube": lambda t: t**3,
    "softmax": lambda t: ops.softmax(t, -1),
    "standardised": lambda t: (
        (t - ops.mean(t, -1, keepdims=True))
        / (ops.std(t, -1, keepdims=True) + 1)
    ),
    "unit": lambda t: t / (ops.norm(t, axis=-1, keepdims=True) + 0.5),
    "normalized": lambda t: ops.rms_normalization(t),
    "cumulated": lambda t: ops.cumsum(t, -1),
    "flipped": lambda t: ops.flip(t, -1),
    "rolled": lambda t: ops.roll(t, 1, -1),
    "repeated": lambda t: ops.repeat(t[..., :2], 2, -1),
    "tiled": lambda t: ops.tile(t[..., :2], [1] * (len(t.shape) - 1) + [2]),
    "joined": lambda t: ops.concatenate([t[..., 2:], t[..., :2]], -1),
    "stacked": lambda t: ops.sum(ops.stack([t, t * 2], 0), 0),
    "split": lambda t: ops.concatenate(ops.split(t, 2, -1)[::-1], -1),
    "in float32": lambda t: ops.cast(t, "float32"),
}
LOOPS = {
    "a sum in a loop": lambda t: ops.fori_loop(
        0, 5, lambda n, y: y + 0.1 * ops.sin(t), t
    ),
    "a scan": lambda t: ops.scan(
        lambda c, n: (c * 0.9 + t * 0.1,) * 2, t, np.ones(5, "float32")
    )[0],
    "a while loop": lambda t: ops.while_loop(
        lambda n, y: n < 4, lambda n, y: (n + 1, y * 0.5 + t), (0, t)
    )[1],
}
# What a program makes of a weight before it meets the input.
OF_WEIGHT = {
    "itself": lambda w, t: w,
    "a new axis": lambda w, t: w[None],
    "slices": lambda w, t: ops.concatenate([w[2:], w[:2]]),
    "an element": lambda w, t: w[1],
    "cast to the input's dtype": lambda w, t: ops.cast(w, t.dtype),
    "cast to float32": lambda w, t: ops.cast(w, "float32"),
    "converted": lambda w, t: ops.convert_to_tensor(w),
    "exponential": lambda w, t: ops.exp(w) * 0.1,
    "softmax": lambda w, t: ops.softmax(w),
    "standardised": lambda w, t: (w - ops.mean(w)) / (ops.std(w) + 0.1),
    "absolute": lambda w, t: ops.abs(w - 0.3),
    "taken": lambda w, t: ops.take(w, np.array([1, 0, 3, 1])),
    "reshaped": lambda w, t: ops.reshape(ops.transpose(w[:, None]), (4,)),
    "beside the input": lambda w, t: w * ops.ones((1, 4), t.dtype),
    "per row": lambda w, t: ops.broadcast_to(w, ops.shape(t)),
}
TOGETHER = {
    "sum": lambda t, w: t + w,
    "difference": lambda t, w: w - t,
    "product": lambda t, w: t * w,
    "ops.multiply": lambda t, w: ops.multiply(w, t),
    "quotient": lambda t, w: t / (ops.square(w) + 1),
    "hypot": lambda t, w: ops.hypot(t, w + 2),
    "matmul": lambda t, w: ops.matmul(t, ops.ones((4, 4), t.dtype) * w),
    "matrix of a weight": lambda t, w: t @ ops.outer(w, w),
    "einsum": lambda t, w: ops.einsum("ni,i->ni", t, w),
    "reduced": lambda t, w: t + by_rows(t, w)[:, None],
    "chosen": lambda t, w: ops.where(X > 0, t, w),
    "power": lambda t, w: ops.power(ops.square(t) + 0.5, w),
    "logaddexp": lambda t, w: ops.logaddexp(t, w),
    "joined": lambda t, w: ops.concatenate([t[:, :2], t[:, 2:] * w], 1),
    "stacked": lambda t, w: ops.sum(ops.stack([t, t + w]), 0),
}


def total(y):
    """Returns a sum that a normalization does not make constant."""
    y = ops.cast(y, "float32")
    return ops.sum(ops.square(y + 0.5))


def program(seed):
    """Returns a function of an input and a weight, and its name."""
    draw = random.Random(seed)
    first, last = (draw.choice([*ALONE]) for _ in range(2))
    if draw.random() < 0.2:
        last = draw.choice([*LOOPS])
    of_weight = draw.choice([*OF_WEIGHT])
    together = draw.choice([*TOGETHER])
    ends = {**ALONE, **LOOPS}

    def function(x, w):
        t = ALONE[first](x)
        y = ends[last](TOGETHER[together](t, OF_WEIGHT[of_weight](w, t)))
        # The sum of a softmax, or of standardised numbers, has no gradient.
        return ops.cast(y, "float32") * np.float32([1, 2, -1, 0.5])

    return function, f"{first}, {together} ({of_weight}), {last}"


def penalised(function):
    """Returns a function whose gradient by a weight is a second derivative."""
    if helpers.ON_JAX:
        import jax

        def slope(x, w):
            return jax.grad(lambda x: total(function(x, w)))(x)

        return slope
    import tensorflow as tf

    def slope(x, w):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = total(function(x, w))
        return tape.gradient(y, x)

    return slope


def errors(seed, policy, mode="eager"):
    """Returns how far a program is from float32; none if that raises."""
    function, _ = program(seed)
    if seed % 4 == 3:
        function = penalised(function)
    x = X[: 20 if seed % 4 else len(X)]
    try:
        right = against_float32.results("float32", function, x, W)
    except Exception:
        return []
    found = against_float32.results(policy, function, x, W, mode)
    pairs = zip(found, right, strict=True)
    return [against_float32.error(one, other) for one, other in pairs]


# A difference of numbers that are alike has few digits, once they are rounded.
WITHIN = {"mixed_float16": 0.03, "mixed_bfloat16": 0.2}
# In the last one, a tape watches a tensor whose sine is taken.
QUICK = (*range(12), 139)
ALL = range(300)


def check(seed, policy, mode="eager"):
    far = max(errors(seed, policy, mode), default=0)
    assert far < WITHIN[policy], program(seed)[1]


@pytest.mark.parametrize("seed", QUICK)
def test_a_program_of_three_ops_gives_what_float32_gives(seed):
    check(seed, "mixed_float16")


@pytest.mark.slow
@pytest.mark.parametrize("policy", WITHIN)
@pytest.mark.parametrize("seed", ALL)
def test_each_program_of_three_ops_gives_what_float32_gives(seed, policy):
    check(seed, policy)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*steps.MODES][1:])
@pytest.mark.parametrize("seed", range(24))
def test_a_compiled_program_gives_what_float32_gives(seed, mode):
    if mode == "xla" and program(seed)[1].rpartition(", ")[2] in LOOPS:
        pytest.skip("Keras's TensorFlow loops have no gradient under XLA")
    check(seed, "mixed_float16", mode)
