"""A jitted function that reports its calls is still one of JAX's."""

import copy

import numpy as np
import pytest

from tests._keras.contracts import jax_only
from tfmix._keras import compiled_calls


@jax_only
@pytest.mark.parametrize("copied", [lambda jit: jit, copy.copy, copy.deepcopy])
def test_it_is_copied_and_is_a_method_as_under_jax(copied):
    import jax

    double = jax.jit(lambda _, x: 2 * x, static_argnums=0)

    class Model:
        twice = copied(compiled_calls.Jitted(double))

    assert Model().twice(np.ones(2)).tolist() == [2, 2]
    if copied is not copy.deepcopy:  # JAX cannot lower one of its own
        assert Model().twice.lower(None, np.ones(2)).as_text()
