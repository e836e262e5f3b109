"""`all_finite` finds a single bad number anywhere, and nothing else."""

import keras
import numpy as np
import pytest
from keras import ops

from tests import helpers, steps
from tfmix._keras import kernels
from tfmix.step import finite

BAD = [np.nan, np.inf, -np.inf]
LARGEST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38}
# Large tensors are checked in pieces, which these fill partly or wholly.
SHAPES = [(4, 5), (24577,), (480_000,), (129, 131), (700, 600), (30, 20, 800)]


PLACES = (0, 777, -1)


def compiled_check():
    """Returns a newly compiled function that lists what is not finite."""
    check = steps.compiled(lambda x: finite.not_finite(x), steps.MODES[-1])
    return lambda tensors: ops.convert_to_numpy(check(tensors)).tolist()


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bad", BAD)
def test_one_bad_number_anywhere_is_found(shape, bad, dtype):
    array = np.full(shape, LARGEST[dtype], "float32")
    array.flat[1] = 1e-45
    good, not_finite = ops.cast(array, dtype), compiled_check()
    assert bool(finite.all_finite([good, {"key": (-good, None)}]))
    for place in PLACES:
        broken = array.copy()
        broken.flat[place % array.size] = bad
        broken = ops.cast(broken, dtype)
        assert not_finite([good, broken, -good]) == [False, True, False]
        assert not bool(finite.all_finite([good, {"key": (broken, None)}]))


def test_integers_nones_and_nothing_are_finite():
    assert bool(finite.all_finite([]))
    assert bool(finite.all_finite([None, ops.convert_to_tensor([1, 2])]))
    assert bool(finite.all_finite([np.ones(3), 2.0]))


@pytest.mark.parametrize("bad", BAD)
def test_both_parts_of_a_complex_number_are_looked_at(bad):
    good = np.array([1 + 2j, -3j], "complex64")
    for broken in (complex(bad, 1.0), complex(1.0, bad)):
        numbers = np.array([1j, broken], "complex64")
        assert not bool(finite.all_finite([good, numbers]))
        assert compiled_check()([good, numbers]) == [False, True]
    assert bool(finite.all_finite([good, 1j]))


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("mode", steps.MODES[1:])
@pytest.mark.parametrize(
    ("values", "rows", "dtype", "expected"),
    [
        ([1.0, 2.0, 3.0], [0, 1, 1], "float32", True),
        ([1.0, np.nan, 3.0], [0, 1, 1], "float32", False),
        ([3e38, 3e38, 1.0], [1, 1, 0], "float32", False),
        # The sum of all magnitudes counts, which is above that of a row.
        ([3e38, 3e38, 1.0], [1, 2, 0], "float32", False),
        # Optimizers sum in float32.
        ([64000.0, 64000.0, 1.0], [1, 1, 0], "float16", True),
        ([64000.0, np.inf, 1.0], [1, 1, 0], "float16", False),
        ([1j, 2j, 3.0], [0, 1, 1], "complex64", True),
        ([1j, 3e38j, 3e38j], [0, 1, 1], "complex64", False),
        ([1j, np.nan * 1j, 1.0], [0, 1, 1], "complex64", False),
    ],
)
def test_rows_that_overflow_only_when_summed_are_caught(
    values, rows, dtype, expected, mode
):
    import tensorflow as tf

    def check(values, rows):
        shape = tf.constant([5, 1])
        return finite.all_finite([tf.IndexedSlices(values, rows, shape)])

    values = tf.cast(tf.constant(values)[:, None], dtype)
    found = steps.compiled(check, mode)(values, tf.constant(rows))
    assert bool(found) is expected


@pytest.mark.costly
@helpers.requires_backend("jax")
def test_a_check_works_inside_jaxs_transformations():
    import jax

    rows = np.float32([[1.0, 2.0], [3.0, np.inf]])
    assert jax.vmap(finite.all_finite)(rows).tolist() == [True, False]

    def loss(x):
        return x.sum(), finite.all_finite([x])

    gradient, fine = jax.jit(jax.grad(loss, has_aux=True))(rows[0])
    assert gradient.tolist() == [1.0, 1.0]
    assert bool(fine)


@pytest.mark.parametrize(
    "variant",
    [
        "single",
        pytest.param("default", marks=helpers.requires_backend("jax")),
    ],
)
@pytest.mark.parametrize("bad", [None, 0, 2, 3, 4, 5, 6])
def test_each_variant_distinguishes_all_tensors(variant, bad, monkeypatch):
    chosen = kernels.VARIANTS[variant]
    monkeypatch.setattr(kernels, "not_finite_alike", chosen)
    large = 520, 520
    shapes = [(3, 4), None, (2,), (3, 4), large, (2,), large, (), ()]
    shapes += [(0, 2), (0, 2)]
    given = [
        None if shape is None else np.ones(shape, "float32") for shape in shapes
    ]
    if bad is not None:
        given[bad].flat[-1] = np.nan
    # Integers are finite.
    given.append(np.array([7]))
    expected = [place == bad for place in range(len(given))]
    assert compiled_check()(given) == expected


@helpers.requires_backend("jax")
@pytest.mark.parametrize(
    ("platform", "size", "count"),
    [("cuda", 600, 1), ("tpu", 3, 1), ("cpu", 3, 3)],
)
def test_small_tensors_of_one_shape_are_read_together(platform, size, count):
    import jax

    def told(tensors):
        return finite.not_finite(tensors)

    traced = jax.jit(told).trace([np.ones((size, size), "float32")] * 3)
    lowered = traced.lower(lowering_platforms=(platform,)).as_text()
    assert lowered.count("stablehlo.reduce") == count


@helpers.requires_backend("jax")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("columns", [3, 2**18])
def test_gradients_on_explicit_axes_are_checked(columns, count):
    import jax

    devices = jax.devices()[:count]
    mesh = jax.make_mesh((len(devices),), ("d",), devices=devices)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    check = jax.jit(lambda tensors: finite.all_finite(tensors))
    given = [np.ones((4, columns), "float32") for _ in range(2)]
    assert bool(check(jax.device_put(given, rows)))
    given[1][2, 1] = np.inf
    assert not bool(check(jax.device_put(given, rows)))


def rows(variable):
    import tensorflow as tf

    ones = tf.ones((1, 2))
    variable.scatter_add(tf.IndexedSlices(ones, tf.constant([1]), (3, 2)))


def branch(variable):
    import tensorflow as tf

    def chosen():
        variable.assign_add(tf.ones((3, 2)))
        return tf.constant(True)

    # The compiler cannot know it.
    tf.cond(tf.reduce_all(variable > -1), chosen, lambda: tf.constant(False))


WRITES = {
    "assign": lambda variable: variable.assign(variable + 1.0),
    "assign_add": lambda variable: variable.assign_add(variable + 1.0),
    "assign_sub": lambda variable: variable.assign_sub(variable - 1.0),
    "rows": rows,
    "branch": branch,
}


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("second", WRITES)
@pytest.mark.parametrize("first", WRITES)
def test_a_skipped_step_under_xla_undoes_every_kind_of_write(first, second):
    import tensorflow as tf

    variable = keras.Variable(np.zeros((3, 2), "float32"))
    inner = variable.value

    def update():
        for name in (first, second):
            WRITES[name](inner)

    @tf.function(autograph=False, jit_compile=True)
    def step(grad):
        finite.apply_if_finite([grad], update, [variable])

    step(tf.constant([1.0, np.nan]))
    assert not variable.numpy().any()
    update()
    expected = variable.numpy()
    variable.assign(np.zeros((3, 2)))
    step(tf.constant([1.0, 2.0]))
    assert expected.any()
    np.testing.assert_array_equal(variable.numpy(), expected)
