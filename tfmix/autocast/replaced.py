"""Lists every name that is replaced in the process, with its maker and why.

`_keras/replacing` puts these names in and takes them out, in three groups:

- `compile` is replaced from the import of tfmix on, because copies and loaded
  files give you models with 16-bit layers while no policy is active.
- What makes a new layer is replaced while a policy is set or a scope is open.
- Ops and the methods beside them are replaced while rules are active for any
  caller. Each replacement looks up the rules of its caller, and calls the
  original if there are none.

Besides these names, a model with a record holds wrappers of its own methods
(`record`), and `tfmix run` replaces what it watches (`tools/run`). TensorFlow's
registry keeps a gradient of ours for each trace, under a name that begins with
"Tfmix" (`_keras/tapes`); no other op has it.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from tfmix._keras import context, layers, op_places, replacing, tapes
from tfmix._keras import variables as keras_variables
from tfmix._keras.replacing import COMPILE, LAYERS, OPS
from tfmix.autocast import bare_optimizers, global_policy, layer_calls, record
from tfmix.ops import apply, attention, logits, recomputation, tensors, ways
from tfmix.optimizers import wrapper
from tfmix.policy import op_lists
from tfmix.policy import policy as policies


class Replaced(NamedTuple):
    """Some names that are replaced together.

    Attributes:
        group: When they are replaced: `COMPILE`, `LAYERS` or `OPS`.
        why: What is different under a policy.
        places: The owner and the name of each, or what finds these.
        make: Takes the original, and returns what replaces it.
        rule: The rule under which an op or method is replaced.
    """

    group: str
    why: str
    places: Sequence[replacing.Place] | Callable[[], Sequence[replacing.Place]]
    make: replacing.Maker
    rule: str = policies.SIXTEEN_BIT


_under_policy = functools.partial(replacing.under, policies.SIXTEEN_BIT)


if keras.backend.backend() == "tensorflow":
    _OF_BACKEND: tuple[Replaced, ...] = (
        Replaced(
            OPS,
            "A user's gradient runs under the settings of the layer's call.",
            tapes.CUSTOM,
            replacing.lazily(recomputation.alike),
        ),
        Replaced(
            OPS,
            "A tape may watch the 16-bit copy of a tensor.",
            tapes.WATCH,
            replacing.lazily(tensors.watching),
        ),
        Replaced(
            OPS,
            "The gradients of a graph have the dtypes of its tensors.",
            tapes.GRADIENTS,
            tapes.without_rules,
        ),
        Replaced(
            OPS,
            "A function that was traced without a tape has no gates.",
            tapes.TRACE,
            tapes.traced_for_gradients,
        ),
        Replaced(
            OPS,
            "Dropout makes up for just what it drops.",
            [op_places.DROPOUT],
            replacing.lazily(ways.unbiased_dropout),
        ),
    )
else:
    from tfmix.gradient_scaling import gates_jax

    _OF_BACKEND = (
        Replaced(
            OPS,
            "A user's gradient function in a model gets unscaled gradients.",
            tapes.CUSTOM,
            replacing.lazily(gates_jax.of_users),
        ),
    )

LIST = (
    Replaced(
        COMPILE,
        "A model with 16-bit layers gets its optimizer and its guard.",
        functools.partial(replacing.definers, keras.Model, "compile"),
        record.make_compile,
    ),
    Replaced(
        LAYERS,
        "A new layer gets tfmix's policy, in all threads.",
        [context.POLICY_STORE],
        global_policy.policy_store,
    ),
    Replaced(
        LAYERS,
        "Rules keep a layer in float32, and its code may fall back to that.",
        [(keras.Layer, "__init__")],
        global_policy.initializer,
    ),
    Replaced(
        OPS,
        "A variable's 16-bit copy knows its float32 source.",
        [keras_variables.AUTOCAST],
        apply.noting_weights,
    ),
    Replaced(
        OPS,
        "A layer's state is what float32 computes.",
        [keras_variables.ASSIGN],
        functools.partial(apply.assigning, exactly=layer_calls.assign_exactly),
    ),
    Replaced(
        OPS,
        "A loop would keep float32 sums of all its steps.",
        layers.LOOPS,
        _under_policy(ways.in_time_steps),
    ),
    Replaced(
        OPS,
        "A step whose gradients are not finite is skipped.",
        lambda: [
            *replacing.definers(keras.optimizers.Optimizer, "apply"),
            (wrapper.OptimizerWrapper, "apply"),
        ],
        _under_policy(bare_optimizers.make_apply),
    ),
    *_OF_BACKEND,
    Replaced(
        OPS,
        "With dropout, attention layers do not call the op.",
        op_places.ATTENTION_METHODS,
        replacing.under(op_places.ATTENTION, attention.attention_in_float32),
        rule=op_places.ATTENTION,
    ),
)
_OPS = {*op_lists.NARROW, *op_lists.DEFAULT_FLOAT32_OPS, *ways.WAYS}
_OF_OPS = "An op computes by the policy's lists, and by what comes."


def names(
    group: str, what: Any
) -> Iterator[tuple[replacing.Place, replacing.Maker, str]]:
    """Yields each name of a group, what makes its replacement, and why.

    Args:
        group: One of `COMPILE`, `LAYERS` and `OPS`.
        what: For ops, the active rules.
    """
    if group == OPS:
        for place, make in _of_rules(what).items():
            yield place, make, _OF_OPS
    for entry in LIST:
        if entry.group == group and (group != OPS or entry.rule in what):
            found = entry.places
            for place in found() if callable(found) else found:
                yield place, entry.make, entry.why


def _of_rules(rules: frozenset[str]) -> dict[replacing.Place, replacing.Maker]:
    """Returns what a set of rules replaces of ops, with what makes it."""
    found: dict[replacing.Place, replacing.Maker] = {}
    ops = set(rules) - {policies.SIXTEEN_BIT}
    if policies.SIXTEEN_BIT in rules:
        ops |= _OPS
        for place, (name, is_reversed) in op_places.OPERATORS.items():
            found[place] = functools.partial(
                _of_op, name=name, is_reversed=is_reversed
            )
    for name in ops:
        # A module is copied as a whole, with a stand-in for each of its ops.
        found |= dict.fromkeys(
            op_places.targets(name), functools.partial(_of_op, name=name)
        )
    return found


def _of_op(original: Any, name: str, is_reversed: bool = False) -> Any:
    """Returns a function that computes an op by the rules of its caller."""
    if inspect.ismodule(original):
        copy = op_places.copy_module(original, _by_rules)
        for name in logits.LOSSES.keys() & vars(copy).keys():
            # These also hold where a loop computes the loss, outside of rules.
            make = replacing.lazily(logits.recovering)
            setattr(copy, name, make(getattr(copy, name)))
        return copy
    return _by_rules(original, name, is_reversed=is_reversed)


_by_rules = functools.partial(apply.by_rules, ways=ways.WAYS)


def _makers(group: str, what: Any) -> Mapping[replacing.Place, replacing.Maker]:
    return {place: make for place, make, _ in names(group, what)}


def begin() -> None:
    """Replaces `compile`, and others as policies need them."""
    replacing.use(_makers)
    replacing.want(COMPILE, True)
