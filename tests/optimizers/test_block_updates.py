"""Updates block by block are those of whole variables, in less memory (JAX)."""

import collections
import functools
import re

import keras
import numpy as np
import pytest

import tfmix
from tfmix.optimizers import block_updates

if keras.backend.backend() != "jax":
    pytest.skip("only JAX needs blocks on a CPU", allow_module_level=True)
import jax

# With 1024 numbers at a time: rows, pieces of short rows with a rest, whole
# matrices, a vector that is not cut.
SHAPES = [(3, 700), (29, 256, 1), (4, 3, 20, 13), (4097,)]
RULES = [(".", "int8")]
MAKERS = {
    "adam": functools.partial(keras.optimizers.Adam, amsgrad=True),
    "averages": functools.partial(
        keras.optimizers.AdamW, weight_decay=0.1, use_ema=True
    ),
    "accumulation": functools.partial(
        keras.optimizers.Adam, gradient_accumulation_steps=2
    ),
    "nadam": keras.optimizers.Nadam,
    "lion": keras.optimizers.Lion,
    "momentum": functools.partial(
        keras.optimizers.SGD, momentum=0.9, nesterov=True
    ),
    "ftrl": keras.optimizers.Ftrl,
    # Its update of a variable needs all of it.
    "lamb": keras.optimizers.Lamb,
}


@pytest.fixture
def few_at_a_time(monkeypatch):
    """Returns a function that turns updates by blocks on or off."""
    # The tests' CPU has several devices.
    monkeypatch.setattr(block_updates, "_TOGETHER", 1024)
    return functools.partial(
        monkeypatch.setattr, block_updates, "_may_run_on_cpu"
    )


def step_of(optimizer, shapes):
    """Returns a step's function, its state and its gradients."""
    rng = np.random.default_rng(0)
    made = [rng.normal(size=shape).astype("float32") for shape in shapes]
    variables = [keras.Variable(value) for value in made]
    optimizer.build(variables)

    def step(state, grads):
        return optimizer.stateless_apply(state[1], grads, state[0])

    # A step may overwrite its state.
    state = [
        [jax.numpy.array(v.value) for v in each]
        for each in (variables, optimizer.variables)
    ]
    return step, state, [1e-2 * value for value in made]


def low(inner):
    return tfmix.optimizers.LowMemoryOptimizer(inner, RULES, seed=3)


def trained(make):
    """Returns the state after some steps, of which the second is skipped."""
    guarded = tfmix.LossScaleOptimizer(make(), loss_scale=1.0)
    step, state, grads = step_of(guarded, SHAPES)
    compiled = jax.jit(step, donate_argnums=0)
    for factor in (1.0, np.inf, -0.5, 2.0):
        state = compiled(state, [np.float32(factor) * grad for grad in grads])
    return jax.tree.map(np.asarray, state)


@pytest.mark.costly
@pytest.mark.parametrize("name", MAKERS)
def test_all_bits_are_those_of_whole_variables(few_at_a_time, name):
    found = {}
    for by_blocks in (False, True):
        few_at_a_time(lambda by_blocks=by_blocks: by_blocks)
        found[by_blocks] = trained(lambda: low(MAKERS[name]()))
    jax.tree.map(np.testing.assert_array_equal, *found.values())


class Warmup(keras.optimizers.Optimizer):
    """Declares that it is element-wise, but counts and reads a shape."""

    elementwise = True
    never_negative = ()

    def build(self, variables):
        super().build(variables)
        self.momentums = [
            self.add_variable_from_reference(v, "momentum") for v in variables
        ]
        self.calls = self.add_variable((), "zeros", "float32", name="calls")

    def update_step(self, gradient, variable, learning_rate):
        momentum = self.momentums[self._get_variable_index(variable)]
        self.calls.assign(self.calls + 1.0)
        self.assign(momentum, 0.9 * momentum + gradient)
        factor = learning_rate * keras.ops.minimum(self.calls / 10.0, 1.0)
        factors = keras.ops.broadcast_to(factor, variable.shape)
        self.assign_sub(variable, factors * momentum)


def test_a_users_update_gets_whole_variables(few_at_a_time):
    found = []
    for by_blocks in (False, True):
        few_at_a_time(lambda by_blocks=by_blocks: by_blocks)
        optimizer = low(Warmup(0.1))
        step, state, grads = step_of(optimizer, SHAPES)
        for _ in range(2):
            state = jax.jit(step)(state, grads)
        calls = [v.path.endswith("calls") for v in optimizer.variables]
        assert float(state[1][calls.index(True)]) == 2 * len(SHAPES)
        found.append(jax.tree.map(np.asarray, state))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("shared", ["state", "gradients", "both"])
def test_variables_on_explicit_axes_are_updated_as_a_whole(
    few_at_a_time, shared
):
    mesh = jax.make_mesh(
        (1,),
        ("rows",),
        devices=jax.devices()[:1],
        axis_types=(jax.sharding.AxisType.Explicit,),
    )

    def share(value):
        axes = ["rows"] if np.ndim(value) else []
        spec = jax.sharding.PartitionSpec(*axes)
        return jax.device_put(value, jax.sharding.NamedSharding(mesh, spec))

    few_at_a_time(lambda: True)
    step, state, grads = step_of(low(keras.optimizers.Adam()), [(64, 512)])
    compiled = jax.jit(step)
    expected = compiled(state, grads)
    if shared != "gradients":
        state = jax.tree.map(share, state)
    if shared != "state":
        grads = [*map(share, grads)]
    found = compiled(state, grads)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def compiled_step(optimizer, **settings):
    step, *given = step_of(optimizer, [(64, 512), (64, 512)])
    traced = jax.jit(step, donate_argnums=0).trace(*given)
    return traced.lower(**settings)


def test_a_step_needs_less_memory_than_one_variable(few_at_a_time):
    for by_blocks in (False, True):
        few_at_a_time(lambda by_blocks=by_blocks: by_blocks)
        lowered = compiled_step(low(keras.optimizers.Adam()))
        memory = lowered.compile().memory_analysis()
        is_small = memory.temp_size_in_bytes < 64 * 512 * 4
        assert is_small == by_blocks


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_an_accelerator_updates_whole_variables(few_at_a_time, platform):
    found = []
    for by_blocks in (False, True):
        few_at_a_time(lambda by_blocks=by_blocks: by_blocks)
        lowered = compiled_step(
            low(keras.optimizers.Adam()), lowering_platforms=(platform,)
        )
        names = re.findall(r"stablehlo\.(\w+)", lowered.as_text())
        found.append(collections.Counter(names))
    before, now = found
    assert "while" not in now
    # A choice by the platform is a conditional with a single branch.
    more = now - before
    assert set(more) == {"case", "constant", "return"}
    assert now - more == before
