"""A jitted function that reports its calls is still one of JAX's."""

import copy

import numpy as np
import pytest

from tests._keras.contracts import jax_only
from tfmix.tools.run import compiled_calls


@jax_only
@pytest.mark.parametrize("copied", [lambda jit: jit, copy.copy, copy.deepcopy])
def test_it_is_copied_and_is_a_method_as_under_jax(copied):
    import jax

    def double(_, x):
        return 2 * x

    jit = compiled_calls._jit(jax.jit)

    class Model:
        twice = copied(jit(double, static_argnums=0))

    assert Model().twice(np.ones(2)).tolist() == [2, 2]
    if copied is not copy.deepcopy:  # JAX cannot lower one of its own
        assert Model().twice.lower(None, np.ones(2)).as_text()
