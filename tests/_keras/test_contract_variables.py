"""Variables of Keras and TensorFlow hold their values like this."""

import keras
import numpy as np
import pytest

from tests import helpers
from tests._keras.contracts import (
    jax_only,
    ready,
    tensorflow_only,
)


@jax_only
def test_a_constant_belongs_to_the_function_that_jax_compiles():
    import jax

    found = []

    def inner(x):
        found.append(jax.numpy.zeros(())._trace)
        return x * 2.0

    @jax.jit
    def outer(x):
        # It is kept alive, because equal addresses would prove nothing.
        found.append(jax.numpy.zeros(())._trace)
        return jax.grad(inner)(x) + jax.vmap(inner)(x[None])[0] + outer_too(x)

    outer_too = jax.jit(inner)
    outer(jax.numpy.ones(()))
    around, differentiated, mapped, compiled = found
    assert around is differentiated is mapped
    assert compiled is not around
    jax.grad(lambda x: found.append(jax.numpy.zeros(())) or x)(1.0)
    assert not isinstance(found[-1], jax.core.Tracer)


@jax_only
def test_the_layout_of_a_variable_places_another_beside_it():
    # Its type differs between Keras 3.12 and 3.15, and tfmix passes it on.
    devices = keras.distribution.list_devices("cpu")[:2]
    mesh = keras.distribution.DeviceMesh((2,), ["model"], devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*split"] = ("model", None)
    made, _ = ready()
    distribution = keras.distribution.ModelParallel(layout_map=layouts)
    with distribution.scope():
        one = keras.Variable(np.ones((4, 3)), name="split")
    slot = made.add_variable(
        one.shape, layout=one._layout, aggregation=one.aggregation
    )
    assert len(one.value.sharding.device_set) == 2
    assert not one.value.sharding.is_fully_replicated
    assert slot.value.sharding.is_equivalent_to(one.value.sharding, 2)


@tensorflow_only
def test_get_returns_this_replicas_copy():
    import tensorflow as tf

    strategy = helpers.mirrored_strategy()
    with strategy.scope():
        variable = keras.Variable([1.0])
    assert isinstance(variable._value, tf.distribute.DistributedValues)
    copies = []
    strategy.run(lambda: copies.append(variable._value._get()))
    assert len(copies) == 2
    assert not any(
        isinstance(each, tf.distribute.DistributedValues) for each in copies
    )
    assert len({id(each) for each in copies}) == 2
    plain = keras.Variable([1.0]).value
    assert not isinstance(plain, tf.distribute.DistributedValues)


@tensorflow_only
def test_what_tensorflow_tracks_starts_with_self(tmp_path):
    import tensorflow as tf

    variable = keras.Variable([1.0])
    before = set(vars(variable))
    tf.train.Checkpoint(one=variable).write(str(tmp_path / "saved"))
    new = set(vars(variable)) - before
    assert new
    assert all(name.startswith("_self_") for name in new)


@tensorflow_only
@pytest.mark.parametrize("tensors", [{}, {"part": 3.0}], ids=["none", "one"])
def test_a_checkpoint_asks_a_variable_for_its_tensors(tmp_path, tensors):
    import tensorflow as tf

    calls = []

    class Own(keras.Variable):
        def _serialize_to_tensors(self):
            calls.append("save")
            return {k: tf.constant(v) for k, v in tensors.items()}

        def _restore_from_tensors(self, restored_tensors):
            calls.append({k: float(v) for k, v in restored_tensors.items()})

    # There is a second variable, since there may be nothing to write.
    checkpoint = tf.train.Checkpoint(one=Own([1.0]), two=tf.Variable(2.0))
    path = checkpoint.write(str(tmp_path / "saved"))
    assert calls == ["save"]
    checkpoint.read(path).assert_existing_objects_matched()
    given = [call for call in calls if call != "save"]
    # An object that saved nothing is not asked to restore.
    assert given == ([tensors] if tensors else [])
