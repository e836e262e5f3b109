"""Keras's optimizers know their variables and apply gradients like this."""

import contextlib

import keras
import pytest

from tests._keras.contracts import (
    BACKEND,
    ready,
    skip_unless_here,
    spy,
    tensorflow_only,
)


def ones():
    return [keras.ops.ones((1,)), keras.ops.ones((1,))]


def test_the_key_of_a_variable_does_not_use_the_optimizer():
    made, (variable, _) = ready()
    key = keras.optimizers.Optimizer._var_key(None, variable)
    assert key == made._var_key(variable)
    wanted = variable.value._unique_id if BACKEND == "tensorflow" else None
    assert key == (wanted or id(variable))


def test_the_variables_are_those_of_the_build_in_its_order():
    made, variables = ready()
    assert made._trainable_variables == variables
    keys = [made._var_key(variable) for variable in variables]
    assert made._trainable_variables_indices == dict(
        zip(keys, range(2), strict=True)
    )
    assert [made._get_variable_index(v) for v in variables] == [0, 1]


def test_the_index_of_a_variable_is_that_of_the_dictionary():
    made, (one, two) = ready()
    vars(made)["_trainable_variables_indices"] = {made._var_key(two): 5}
    assert made._get_variable_index(two) == 5
    with pytest.raises(KeyError):
        made._get_variable_index(one)


def test_a_variable_outside_the_build_is_refused():
    made, variables = ready()
    made._check_variables_are_known(variables)
    with pytest.raises(ValueError, match="[Uu]nknown variable"):
        made._check_variables_are_known([keras.Variable([1.0])])


def test_all_variables_are_in_one_list_of_which_a_copy_is_public():
    made, _ = ready(momentum=0.9)
    assert made._variables == made.variables
    assert made._variables is not made.variables
    names = [each.name for each in made._variables]
    assert names[:2] == ["iteration", "learning_rate"]
    assert [name for name in names if name.endswith("momentum")] == names[2:]
    assert len(names) == 4


def test_the_tracker_adds_only_variables_it_does_not_know():
    made, _ = ready()
    before = len(made._variables)
    known, unknown = keras.Variable([1.0]), keras.Variable([1.0])
    made._tracker.stored_ids["variables"].add(id(known))
    made.known, made.unknown = known, unknown
    assert len(made._variables) == before + 1
    assert made._variables[-1] is unknown


def test_apply_checks_the_variables_and_asks_which_to_overwrite(monkeypatch):
    made, variables = ready()
    calls = []
    for name in (
        "_check_variables_are_known",
        "_overwrite_variable_with_gradient",
    ):
        spy(monkeypatch, made, name, calls)
    made.apply(ones(), variables)
    assert calls[0][0] == "_check_variables_are_known"
    asked = [c[1] for c in calls if c[0].startswith("_overwrite")]
    assert {id(each) for each in asked} == {id(each) for each in variables}


def test_a_variable_that_is_overwritten_gets_its_gradient(monkeypatch):
    made, (one, two) = ready()
    monkeypatch.setitem(
        vars(made),
        "_overwrite_variable_with_gradient",
        lambda variable: variable is one,
    )
    made.apply([keras.ops.full((1,), 7.0)] * 2, [one, two])
    assert float(one.value[0]) == 7.0
    assert float(two.value[0]) == pytest.approx(0.3)


def test_an_attribute_of_a_variable_says_that_it_is_overwritten():
    made, (one, _) = ready()
    assert not made._overwrite_variable_with_gradient(one)
    one.overwrite_with_gradient = True
    assert made._overwrite_variable_with_gradient(one)


def test_weight_decay_asks_for_each_variable(monkeypatch):
    made, variables = ready(weight_decay=0.5)
    calls = spy(monkeypatch, made, "_use_weight_decay")
    made.apply(ones(), variables)
    assert len(calls) == 2


def test_weight_decay_is_decided_by_a_set_of_keys_and_noted_at_the_build():
    skip_unless_here("_weight_decay_by_var_key")
    made = keras.optimizers.SGD(0.1, weight_decay=0.5)
    one, two = (keras.Variable([1.0], name=name) for name in ("one", "two"))
    made.exclude_from_weight_decay(var_list=[one])
    keys = made._var_key(one), made._var_key(two)
    assert made._exclude_from_weight_decay == {keys[0]}
    excluded = [made._is_excluded_from_weight_decay(v) for v in (one, two)]
    assert excluded == [True, False]
    made.build([one, two])
    assert made._weight_decay_by_var_key == {keys[0]: False, keys[1]: True}
    vars(made)["_weight_decay_by_var_key"][keys[0]] = True
    assert made._use_weight_decay(one)


def test_weight_decay_is_decided_by_the_set_of_keys_and_its_cache():
    skip_unless_here("_exclude_from_weight_decay_cache")
    made, (one, two) = ready(weight_decay=0.5)
    made.built = False
    made.exclude_from_weight_decay(var_list=[one])
    made.built = True
    assert made._exclude_from_weight_decay == {made._var_key(one)}
    assert [made._use_weight_decay(v) for v in (one, two)] == [False, True]
    assert made._exclude_from_weight_decay_cache == {
        made._var_key(one): False,
        made._var_key(two): True,
    }
    # Another set counts once the cache is empty.
    vars(made)["_exclude_from_weight_decay"] = {made._var_key(two)}
    assert not made._use_weight_decay(one)
    vars(made)["_exclude_from_weight_decay_cache"] = {}
    assert [made._use_weight_decay(v) for v in (one, two)] == [True, False]


def test_a_multi_optimizer_finds_the_optimizer_of_a_variable_by_its_key():
    skip_unless_here("_var_to_optimizer_idx")
    inner = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2)]
    made = keras.optimizers.MultiOptimizer(
        lambda variable: inner[variable.name == "two"]
    )
    variables = [keras.Variable([1.0], name=name) for name in ("one", "two")]
    made.build(variables)
    assert made.optimizers == inner
    assert made._var_to_optimizer_idx == {
        made._var_key(each): index for index, each in enumerate(variables)
    }
    # The other optimizer does not know the variable, and was asked.
    vars(made)["_var_to_optimizer_idx"].clear()
    swapped = zip(map(made._var_key, variables), (1, 0), strict=True)
    vars(made)["_var_to_optimizer_idx"].update(dict(swapped))
    with pytest.raises(ValueError, match="[Uu]nknown variable"):
        made.apply(ones(), variables)


@tensorflow_only
def test_apply_sums_the_gradients_over_the_replicas_once():
    made, variables = ready()
    calls = []

    def double(pairs):
        calls.append(pairs)
        return [(2.0 * gradient, variable) for gradient, variable in pairs]

    vars(made)["_all_reduce_sum_gradients"] = double
    made.apply(ones(), variables)
    assert len(calls) == 1
    assert [pair[1] for pair in calls[0]] == [v.value for v in variables]
    # Its result is applied.
    assert float(variables[0].value[0]) == pytest.approx(0.8)


@tensorflow_only
def test_list_may_replace_the_sum_over_the_replicas():
    made, variables = ready()
    vars(made)["_all_reduce_sum_gradients"] = list
    made.apply(ones(), variables)
    assert float(variables[0].value[0]) == pytest.approx(0.9)


@tensorflow_only
def test_apply_updates_through_the_strategy_of_the_optimizer():
    import tensorflow as tf

    made, variables = ready()
    assert made._distribution_strategy is tf.distribute.get_strategy()
    updated = []

    class Extended:
        def update(self, variable, function, args=(), group=True):
            updated.append(variable)
            return function(variable, *args)

    class Strategy:
        extended = Extended()

    vars(made)["_distribution_strategy"] = Strategy()
    made.apply(ones(), variables)
    assert [id(each) for each in updated] == [id(v.value) for v in variables]


@tensorflow_only
def test_slots_are_placed_by_the_strategy_of_the_optimizer():
    made, (one, _) = ready()
    beside = []

    class Extended:
        def colocate_vars_with(self, variable):
            beside.append(variable)
            return contextlib.nullcontext()

    class Strategy:
        extended = Extended()

    vars(made)["_distribution_strategy"] = Strategy()
    made.add_variable_from_reference(one, name="slot")
    assert beside == [one.value]
