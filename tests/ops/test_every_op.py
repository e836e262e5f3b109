"""Each public op of Keras gives float32's result and gradients, to 16 bit.

The ops are those of the Keras that is installed, so one that a new version adds
is tried as well. Each is called with the first arguments that it accepts.
"""

import inspect

import keras
import numpy as np
import pytest
from keras import ops

from tests import helpers
from tests.ops import against_float32

RNG = np.random.default_rng(0)
ROWS = 20_000
PUBLIC = ops, ops.image, keras.activations
# How an op is called: with one argument, with another, with a list, or with a
# number behind. `t` and `u` are like each other.
FORMS = {
    "one": lambda f, t, u: f(t),
    "two": lambda f, t, u: f(t, u),
    "list": lambda f, t, u: f([t, u]),
    "number": lambda f, t, u: f(t, 1),
}
IMAGE = (1, 1, 4, 4)
CALLS = {
    # JAX would go through the rows of a variable without end.
    **dict.fromkeys(("dstack", "hstack", "stack", "vstack"), FORMS["list"]),
    "adaptive_average_pool": lambda f, t, u: f(image(t), 2),
    "adaptive_max_pool": lambda f, t, u: f(image(t), 2),
    "array_split": lambda f, t, u: f(t, 2)[0],
    "associative_scan": lambda f, t, u: f(lambda a, b: a + b, t),
    "average_pool": lambda f, t, u: f(image(t), (2, 2), (2, 2)),
    "batch_normalization": lambda f, t, u: f(t, u[0], u[1], -1),
    "bincount": lambda f, t, u: f(np.array([0, 1, 1, 2]), t[0]),
    "broadcast_to": lambda f, t, u: f(t, (3, 4, 4)),
    "cast": lambda f, t, u: f(t, "float32"),
    "affine_transform": lambda f, t, u: f(image(t), SHEARED),
    "clip": lambda f, t, u: f(t, 0.0, 0.5),
    "cond": lambda f, t, u: f(
        ops.sum(t) > 0, lambda: ops.sum(t), lambda: ops.sum(u)
    ),
    "conv": lambda f, t, u: f(image(t), ops.reshape(u, (2, 2, 1, 4))),
    "conv_transpose": lambda f, t, u: f(
        image(t), ops.reshape(u, (2, 2, 4, 1)), 1
    ),
    "correlate": lambda f, t, u: f(t[0], u[0]),
    "crop_images": lambda f, t, u: f(image(t), 1, 1, None, None, 2, 2),
    "cross": lambda f, t, u: f(t[:, :3], u[:, :3]),
    "ctc_loss": lambda f, t, u: f(
        np.array([[1, 2]]), t[None], np.array([2]), np.array([4])
    ),
    "depth_to_space": lambda f, t, u: f(ops.reshape(t, IMAGE), 2),
    "depthwise_conv": lambda f, t, u: f(image(t), ops.reshape(u, (2, 2, 1, 4))),
    "dot_product_attention": lambda f, t, u: f(
        *[ops.reshape(x, (1, 4, 1, 4)) for x in (t, u, u)]
    ),
    "dsplit": lambda f, t, u: f(ops.reshape(t, (2, 2, 4)), 2)[0],
    "elastic_transform": lambda f, t, u: f(image(t), seed=1),
    "eig": lambda f, t, u: ops.sort(ops.real(f(t)[0])),
    "einsum": lambda f, t, u: f("ij,jk->ik", t, u),
    "extract_patches": lambda f, t, u: f(image(t), (2, 2)),
    "extract_patches_3d": lambda f, t, u: f(
        ops.reshape(t, (1, 2, 2, 4, 1)), (2, 2, 2)
    ),
    "extract_sequences": lambda f, t, u: f(t, 2, 1),
    "fft": lambda f, t, u: f((t, u))[0],
    "fold": lambda f, t, u: f(ops.reshape(t, (1, 4, 4)), 4, 2, stride=2),
    "fori_loop": lambda f, t, u: f(0, 3, lambda n, x: x * 0.5 + u, t),
    "full_like": lambda f, t, u: f(t, 2.0),
    "get_item": lambda f, t, u: f(t, (slice(None), None)),
    "hsplit": lambda f, t, u: f(t, 2)[0],
    "gaussian_blur": lambda f, t, u: f(image(t), (3, 3), (1.0, 1.0)),
    "hsv_to_rgb": lambda f, t, u: f(rgb(t)),
    "istft": lambda f, t, u: f((t, u), 4, 2, 6),
    "meshgrid": lambda f, t, u: f(t[0], u[0]),
    **dict.fromkeys(("quantile", "nanquantile"), lambda f, t, u: f(t, 0.3)),
    "map_coordinates": lambda f, t, u: f(t, 3 * u[:2], 1),
    "map": lambda f, t, u: f(lambda row: row * 2, t),
    "max_pool": lambda f, t, u: f(image(t), (2, 2), (2, 2)),
    "moveaxis": lambda f, t, u: f(t, 0, 1),
    "pad_images": lambda f, t, u: f(image(t), 1, 1, 1, 1),
    "pad": lambda f, t, u: f(t, ((1, 1), (0, 2))),
    "perspective_transform": lambda f, t, u: f(
        image(t), 3 * CORNERS, 3 * CORNERS + 0.25
    ),
    "polar": lambda f, t, u: ops.real(f(t, u)),
    "power": lambda f, t, u: f(t, 3),
    "psnr": lambda f, t, u: f(t, u, 1.0),
    "rearrange": lambda f, t, u: f(t, "a b -> b a"),
    "resize": lambda f, t, u: f(image(t), (7, 7)),
    "rgb_to_grayscale": lambda f, t, u: f(rgb(t)),
    "rgb_to_hsv": lambda f, t, u: f(rgb(t)),
    "reshape": lambda f, t, u: f(t, (2, 8)),
    "saturate_cast": lambda f, t, u: f(t, "float32"),
    "scale_and_translate": lambda f, t, u: f(
        image(t), (1, 8, 8, 1), u[0, :2] + 2, u[1, :2], (1, 2), "linear"
    ),
    "scan": lambda f, t, u: f(lambda c, row: (c + row, c * row), t[0], u)[1],
    "scatter": lambda f, t, u: f(EVEN, t, (8, 4)),
    "scatter_update": lambda f, t, u: f(ops.concatenate([u, u], 0), EVEN, t),
    "segment_max": lambda f, t, u: f(t, np.array([0, 0, 1, 1]), 2),
    "segment_min": lambda f, t, u: f(t, np.array([0, 0, 1, 1]), 2),
    "segment_prod": lambda f, t, u: f(t, np.array([0, 0, 1, 1]), 2),
    "segment_sum": lambda f, t, u: f(t, np.array([0, 0, 1, 1]), 2),
    "select": lambda f, t, u: f([t > 0.5, t <= 0.5], [t, 2 * u]),
    "separable_conv": lambda f, t, u: f(
        image(t), ops.reshape(u, (2, 2, 1, 4)), ops.reshape(u, (1, 1, 4, 4))
    ),
    "slice": lambda f, t, u: f(t, (1, 0), (2, 3)),
    "slice_update": lambda f, t, u: f(t, (0, 0), u),
    "sobel_edges": lambda f, t, u: f(image(t)),
    "space_to_depth": lambda f, t, u: f(image(t), 2),
    "sparse_categorical_crossentropy": lambda f, t, u: f(
        np.array([0, 1, 2, 3]), t
    ),
    "split": lambda f, t, u: f(t, 2)[0],
    "ssim": lambda f, t, u: f(image(t), image(u), 1.0, filter_size=3),
    "stft": lambda f, t, u: f(ops.reshape(t, (16,)), 4, 2, 4)[0],
    "swapaxes": lambda f, t, u: f(t, 0, 1),
    "switch": lambda f, t, u: f(1, [lambda x: x, lambda x: 2 * x], t),
    "take": lambda f, t, u: f(t, np.array([1, 1, 0]), axis=1),
    "take_along_axis": lambda f, t, u: f(t, np.zeros((4, 1), "int32"), axis=1),
    "tensordot": lambda f, t, u: f(t, u, 1),
    "threshold": lambda f, t, u: f(t, 0.5, 0.25),
    "unfold": lambda f, t, u: f(ops.reshape(t, IMAGE), 2),
    "unstack": lambda f, t, u: f(t)[0],
    "vander": lambda f, t, u: f(t[0], 3),
    "vectorized_map": lambda f, t, u: f(lambda row: row * 2, t),
    "view_as_complex": lambda f, t, u: ops.real(f(ops.reshape(t, (8, 2)))),
    "view_as_real": lambda f, t, u: f(ops.view_as_complex(t[:, :2])),
    "vsplit": lambda f, t, u: f(t, 2)[0],
    "where": lambda f, t, u: f(t > 0.5, t, 0.5 * u),
    "while_loop": lambda f, t, u: f(
        lambda n, x: n < 3, lambda n, x: (n + 1, x * 0.5), (0, t)
    )[1],
}
SHEARED = np.array([[1, 0.25, 0, 0, 1, 0, 0, 0]], "float32")
CORNERS = np.array([[[0, 0], [0, 1], [1, 0], [1, 1]]], "float32")
EVEN = np.array([[0], [2], [4], [6]])
# These compute no floats of floats, or run what a user passes.
NOT_ASKED = {
    *("all", "allclose", "any", "arange", "argmax", "argmin", "argpartition"),
    *("argsort", "bartlett", "bitwise_and", "bitwise_invert", "bitwise_not"),
    *("bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "blackman"),
    *("bitwise_xor", "convert_to_numpy", "count_nonzero", "ctc_decode"),
    *("custom_gradient", "digitize", "dtype"),
    *("empty", "equal", "eye", "full", "gcd", "greater", "hamming"),
    *("greater_equal", "hanning", "histogram", "identity", "in_top_k", "isin"),
    *("is_tensor", "isclose", "isfinite", "isinf", "isnan", "isneginf"),
    *("isposinf", "isreal", "jvp", "kaiser", "lcm", "left_shift"),
    *("less", "less_equal", "logical_and", "logical_not", "logical_or"),
    *("logical_xor", "matrix_rank", "nanargmax", "nanargmin", "ndim", "ones"),
    *("nonzero", "not_equal", "right_shift", "tri"),
    *("searchsorted", "shape", "signbit", "size", "unravel_index"),
    *("vectorize", "zeros", "shuffle", "deserialize", "get", "serialize"),
}


def image(t):
    return ops.reshape(t, (1, 4, 4, 1))


def rgb(t):
    return ops.reshape(t[:3], (1, 2, 2, 3))


def op_of(name):
    """Returns a public function, wherever Keras has it."""
    (found, *_) = (getattr(m, name) for m in PUBLIC if hasattr(m, name))
    return found


def op_names():
    """Lists the functions of `keras.ops`, its images, and the activations."""
    public = {n for m in PUBLIC for n in dir(m) if n[0].islower()}
    functions = {n for n in public if inspect.isfunction(op_of(n))}
    return sorted(functions - NOT_ASKED)


def matrix(size=4):
    """Returns a positive definite matrix of numbers between 0 and 1."""
    values = RNG.uniform(0.05, 0.15, (size, size))
    return (np.tril(values) + np.tril(values).T + 0.6 * np.eye(size)).astype(
        "float32"
    )


def form_of(name):
    """Returns how to call an op, `None` for one that no form fits."""
    if name in CALLS:
        return CALLS[name]
    t = ops.convert_to_tensor(matrix())
    for form in FORMS.values():
        try:
            result = form(op_of(name), t, t)
        except Exception:
            continue
        if any(map(against_float32.is_float, keras.tree.flatten(result))):
            return form
    return None


SMALL = RNG.uniform(1e-4, 6e-4, (4, 4)).astype("float32")
ROLES = {
    "weight": (lambda f: lambda x, w: f(w, w + 0.1), SMALL, matrix()),
    "input": (lambda f: lambda x, w: f(x, x + 0.1), matrix(), SMALL),
    "both": (lambda f: lambda x, w: f(x, w), matrix(), matrix()),
    "small": (
        lambda f: (
            lambda x, w: ops.log(
                ops.abs(f(ops.square(x), 2 * ops.square(ops.flip(x)))) + 1e-12
            )
        ),
        SMALL,
        matrix(),
    ),
    "gain": (
        lambda f: lambda x, w: x * f(w, w + 0.1),
        RNG.uniform(3, 6, (ROWS, 4)).astype("float32"),
        RNG.uniform(0.3, 0.9, 4).astype("float32"),
    ),
    "rows": (
        lambda f: lambda x, w: f(x, w),
        RNG.uniform(3, 6, (ROWS, 4)).astype("float32"),
        RNG.uniform(0.5, 2, 4).astype("float32"),
    ),
}


def errors(name, role, policy):
    """Returns how far a result and its gradients are from float32's."""
    form = form_of(name)
    if form is None:
        return []
    make, x, weight = ROLES[role]
    op = op_of(name)
    function = make(lambda t, u: form(op, t, u))
    if role in ("gain", "rows") and not is_elementwise(function, x[:3], weight):
        return []
    try:
        right = against_float32.results("float32", function, x, weight)
    except Exception:
        # Float32 has no such result.
        return []
    found = against_float32.results(policy, function, x, weight)
    pairs = zip(found, right, strict=True)
    return [against_float32.error(one, other) for one, other in pairs]


def is_elementwise(function, rows, weight):
    """Returns whether a function repeats its second argument for rows."""
    try:
        results = [function(rows, weight), function(rows, 2 * weight)]
    except Exception:
        return False
    if getattr(results[0], "shape", None) != rows.shape:
        return False
    return not np.array_equal(*map(helpers.to_numpy, results))


QUICK = """
    softplus hypot divide where get_item tile einsum take add multiply maximum
    layer_normalization matmul mean sqrt clip cumsum
""".split()


def check(name, policy):
    far = {role: max(errors(name, role, policy), default=0) for role in ROLES}
    within = against_float32.WITHIN[policy]
    wrong = {role: error for role, error in far.items() if error > within}
    assert not wrong, far


@pytest.mark.parametrize("name", QUICK)
def test_an_op_gives_what_float32_gives(name):
    check(name, "mixed_float16")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", op_names())
def test_each_op_gives_what_float32_gives(name, policy):
    check(name, policy)


@pytest.mark.slow
def test_each_op_is_called():
    without = {name for name in op_names() if form_of(name) is None}
    assert not without, "write a call, or say that it computes no floats"
