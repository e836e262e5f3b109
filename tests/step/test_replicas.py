"""If one replica is bad, all skip, the scale moves once, and nothing hangs.

The table of faults (`tests/promises/test_faults.py`) has clipping,
accumulation, float8 and the start of a run on replicas.
"""

import contextlib

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix.loss_scaling import optimizer as optimizers

if keras.backend.backend() != "tensorflow":
    pytest.skip("tf.distribute is TensorFlow's own", allow_module_level=True)

import tensorflow as tf

from tfmix.step import replicas

Wrapped = optimizers.LossScaleOptimizer


def own(values):
    """Returns the value of the replica that runs this."""
    context = tf.distribute.get_replica_context()
    return values[context.replica_id_in_sync_group]


def assert_replicas_agree(variables):
    for variable in variables:
        first, *others = variable.value.values
        for other in others:
            helpers.assert_same_bits(other.numpy(), first.numpy())


class Trainer:
    """A linear model under two replicas, with gradients from the test."""

    def __init__(
        self, wrapped_arguments=None, graph=True, dtype="float32", **inner
    ):
        self.dtype = dtype
        self.strategy = helpers.mirrored_strategy()
        with self.strategy.scope():
            self.weight = keras.Variable(np.zeros(3, "float32"), name="weight")
            self.optimizer = Wrapped(
                keras.optimizers.SGD(**{"learning_rate": 1.0, **inner}),
                **(wrapped_arguments or {"loss_scale": 4.0}),
            )
            self.optimizer.build([self.weight])
        helpers.takes_scaled_gradients(self.optimizer)
        self.step = tf.function(self._step) if graph else self._step

    def _step(self, grads):
        def on_replica(grads):
            self.optimizer.apply([own(grads)], [self.weight])
            return self.optimizer.last_step_applied()

        return self.strategy.run(on_replica, args=(grads,))

    def __call__(self, one, two):
        grads = tf.constant([one, two], tf.float32) * self.optimizer.loss_scale
        grads = tf.cast(grads, self.dtype)
        applied = self.strategy.experimental_local_results(self.step(grads))
        assert len({bool(each) for each in applied}) == 1
        assert_replicas_agree([self.weight, *self.optimizer.variables])
        return bool(applied[0])

    def value(self):
        return self.weight.value.values[0].numpy().tolist()


def test_a_sum_over_replicas_that_overflows_is_caught():
    train = Trainer({"loss_scale": 1.0})
    assert not train([3e38] * 3, [3e38] * 3)
    assert train([3e38] * 3, [-3e38] * 3)


def test_unscaled_gradients_of_one_bad_replica_make_all_skip():
    train = Trainer()

    @tf.function
    def step(grads):
        def on_replica(grads):
            true = train.optimizer.unscale_gradients([own(grads)])
            # Clipping by value hides the infinity of this replica.
            clipped = [tf.clip_by_value(true[0], -1.0, 1.0)]
            train.optimizer.apply(clipped, [train.weight], unscaled=True)

        return train.strategy.run(on_replica, args=(grads,))

    step(tf.constant([[8.0] * 3, [np.inf] * 3]))
    assert train.value() == [0.0] * 3
    step(tf.constant([[8.0] * 3, [2.0] * 3]))
    assert_replicas_agree([train.weight])
    assert train.value() == [-1.5] * 3


@pytest.mark.costly
@pytest.mark.parametrize("seed", range(10))
def test_random_fault_schedules_equal_a_single_device_oracle(seed):
    rng = np.random.default_rng(seed)
    train = Trainer({"initial_scale": 64.0}, learning_rate=0.1, momentum=0.9)
    plain = keras.Variable(np.zeros(3, "float32"))
    oracle = keras.optimizers.SGD(0.1, momentum=0.9)
    skipped = 0
    for _ in range(40):
        grads = rng.normal(size=(2, 3)).astype("float32")
        if rng.random() < 0.2:
            grads[rng.integers(2), rng.integers(3)] = np.nan
        if np.isfinite(grads).all():
            oracle.apply([tf.constant(grads.sum(axis=0))], [plain])
        else:
            skipped += 1
        train(grads[0], grads[1])
    helpers.assert_close(train.value(), plain, "float32")
    assert train.optimizer.skipped_steps == skipped
    assert train.optimizer.loss_scale == max(64.0 / 2**skipped, 1.0)


def test_a_strategy_without_merge_calls_takes_the_same_path(monkeypatch):
    # MirroredStrategy reports this on GPUs under XLA, and TPUStrategy always.
    train = Trainer({"initial_scale": 8.0})
    monkeypatch.setattr(
        train.strategy.extended, "_use_merge_call", lambda: False
    )
    assert train([1.0] * 3, [2.0] * 3)
    assert not train([1.0] * 3, [np.inf] * 3)
    assert train.value() == [-3.0] * 3
    assert train.optimizer.loss_scale == 4.0


def test_on_a_tpu_the_optimizer_does_not_sum_a_second_time(monkeypatch):
    # There is no TPU here, and no replacement for its variables. So only the
    # method that differs there is tested.
    strategy = helpers.mirrored_strategy()
    with strategy.scope():
        weight = keras.Variable(np.zeros(1, "float32"))
        inner = keras.optimizers.SGD()
    pairs = [(tf.ones(1), weight)]

    class TPUStrategy:
        pass

    def on_replica():
        with contextlib.ExitStack() as alone:
            with monkeypatch.context() as patch:
                patch.setattr(tf.distribute, "get_strategy", TPUStrategy)
                alone.enter_context(replicas.one_replica([weight], inner))
            # They are returned unchanged, for any number of replicas.
            assert inner._all_reduce_sum_gradients(pairs) == pairs
        assert "_all_reduce_sum_gradients" not in vars(inner)

    strategy.run(on_replica)


def test_gradients_outside_a_replica_are_refused():
    train = Trainer()
    with train.strategy.scope():
        with pytest.raises(ValueError, match="strategy.run"):
            train.optimizer.apply([tf.ones(3)], [train.weight])


def test_strategies_that_cannot_skip_together_are_refused(monkeypatch):
    strategy = tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=["CPU:0", "CPU:1"], parameter_device="CPU:0"
    )
    optimizer = Wrapped("sgd", loss_scale=1.0)
    with strategy.scope():
        weight = keras.Variable(np.ones(1, "float32"))
        with pytest.raises(ValueError, match="CentralStorage"):
            optimizer.apply([weight.value], [weight])

    class ParameterServerStrategyV2:
        """Has the name of the strategy, which needs a cluster to exist."""

    get = "get_strategy"
    monkeypatch.setattr(tf.distribute, get, ParameterServerStrategyV2)
    with pytest.raises(ValueError, match="MirroredStrategy"):
        replicas.check_replica_context()


def test_variables_are_whole_again_after_an_error():
    strategy = helpers.mirrored_strategy()
    with strategy.scope():
        weight = keras.Variable(np.zeros(1, "float32"))
    value = weight.value

    def fail():
        with replicas.one_replica([weight]):
            assert not isinstance(weight.value, type(value))
            raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        strategy.run(fail)
    assert weight.value is value


def test_scale_and_counters_are_read_inside_the_scope_as_outside():
    train = Trainer({"initial_scale": 1024.0})
    train([1.0, 2.0, 3.0], [np.inf, 2.0, 3.0])

    def seen():
        optimizer = train.optimizer
        optimizer.check_health()
        counts = (optimizer.skipped_steps, optimizer.consecutive_skips)
        return optimizer.loss_scale, counts, optimizer.overflow_counts

    with train.strategy.scope():
        inside = seen()
        train.optimizer.loss_scale = 64.0
        assert train.optimizer.loss_scale == 64.0
    assert inside == (512.0, (1, 1), {"weight": 1})
    assert seen() == (64.0, (1, 1), {"weight": 1})


def test_overwriting_values_are_maxed_and_the_rest_is_summed():
    strategy = helpers.mirrored_strategy()
    with strategy.scope():
        variables = [
            keras.Variable(np.zeros(shape, "float32"))
            for shape in ((2,), (), (2,), (1,))
        ]
    for variable in variables[:2]:
        variable.overwrite_with_gradient = True
    values = tf.constant([[1.0, -5.0], [3.0, -7.0]])

    @tf.function
    def run(values):
        def on_replica():
            mine = own(values)
            grads = [mine, mine[1], mine, None]
            *sums, absent = replicas.sum_gradients(grads, variables)
            assert absent is None
            return sums

        return strategy.run(on_replica)

    def both(values):
        return [
            [each.numpy().tolist() for each in summed.values]
            for summed in run(values)
        ]

    assert both(values) == [[[3.0, -5.0]] * 2, [-5.0] * 2, [[4.0, -12.0]] * 2]
    for bad in (np.nan, np.inf):
        for place in np.ndindex(2, 2):
            array = values.numpy()
            array[place] = bad
            pair, *_ = both(tf.constant(array))
            expected = [place[1] != 0, place[1] != 1]
            assert np.isfinite(pair).tolist() == [expected] * 2


def bytes_summed(function, *arguments):
    """Lists the bytes that each replica sends for the sums of a function."""
    graph = function.get_concrete_function(*arguments).graph
    sent = [
        operation.inputs[0]
        for operation in graph.get_operations()
        if operation.type == "CollectiveReduceV2"
    ]
    return [each.shape.num_elements() * each.dtype.size for each in sent]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_that_a_loop_casts_are_summed_in_16_bit(dtype):
    # Three numbers are exchanged, and nothing else.
    for each, size in (("float32", 12), (dtype, 6)):
        grads = tf.ones((2, 3), each)
        assert bytes_summed(Trainer().step, grads) == [size, size]


@pytest.mark.parametrize("graph", [True, False])
def test_a_sum_that_overflows_in_16_bit_is_skipped_on_all(graph):
    train = Trainer({"initial_scale": 1024.0}, graph, dtype="float16")
    # Each is finite in float16 when scaled, but their sum is not.
    assert not train([40.0] * 3, [1.0, 40.0, 1.0])
    assert (train.optimizer.loss_scale, train.value()) == (512.0, [0.0] * 3)
    assert train([40.0] * 3, [1.0, 40.0, 1.0])
    assert train.value() == [-41.0, -80.0, -41.0]
