"""`Policy`: a dtype policy with a list of what stays in float32."""

import functools
from collections.abc import Iterable
from typing import Any

import keras

from tfmix import _arguments, _formats
from tfmix.policy import float32_layers as layer_rules
from tfmix.policy import op_lists as op_rules
from tfmix.policy.devices import auto_policy, is_on_tensorflows_cpu

DTYPE_NAMES = (
    "float32",
    "mixed_float16",
    "mixed_bfloat16",
    "float16",
    "bfloat16",
)
# This policy is mixed_bfloat16, with float8 products in some layers.
FLOAT8 = "mixed_float8"
NAMES = (*DTYPE_NAMES, FLOAT8, "auto", *layer_rules.LEVELS)

# Every 16-bit policy has this rule, in addition to its ops.
SIXTEEN_BIT = "(16 bit)"
_SETTINGS = ("float32_layers", "float32_ops", "float8_layers")


class Policy(keras.DTypePolicy):
    """A dtype policy, and the layers and ops it leaves in float32.

    Use it where a name is not enough: to keep more, or less, in float32 than
    the defaults. Layers and saved models hold the plain `keras.DTypePolicy` of
    the same name instead, which loads without tfmix.

    Args:
        name: String. `"float32"`, `"mixed_float16"`, `"mixed_bfloat16"`,
            `"float16"`, `"bfloat16"`; `"mixed_float8"`, which is
            `"mixed_bfloat16"` with the matrix products of some layers in
            float8; `"auto"`, which asks the hardware; or a level, `"O0"` to
            `"O3"`.
        float32_layers: List of layers kept in float32, the whole list: layer
            classes, class names, or regular expressions matched whole against
            a layer's name or path. Defaults to what was measured to break;
            `tfmix.Policy.default_float32_layers(add=[...])` extends it. With
            `"float16"` and `"bfloat16"`, no list leaves out
            `BatchNormalization`, whose moving statistics need small updates.
        float32_ops: List of `keras.ops` computed in float32, the whole list.
            Defaults to those that were measured to be wrong, infinite or
            missing in 16 bit; `tfmix.Policy.default_float32_ops(add=[...])`
            extends it.
        float8_layers: List of the layers that multiply in float8 under
            `"mixed_float8"`, as in `float32_layers`: `Dense` and
            `EinsumDense` layers, those inside of attention included, whose
            kernels' sides are multiples of 16. Defaults to `None`: those that
            gained on an H100 (2048 x 8192, 4096 x 4096 and larger), except
            the model's first and last.

    Raises:
        TypeError: If `name` or a list has the wrong type.
        ValueError: If `name` is none of the above, a list names something
            unknown, or `float8_layers` is given to another
            policy than `"mixed_float8"`.

    Examples:
        >>> policy = Policy("mixed_float16", float32_layers=["head"])
        >>> policy.compute_dtype, policy.variable_dtype
        ('float16', 'float32')
        >>> policy.float32_layers
        ['head']
    """

    default_float32_layers = staticmethod(layer_rules.default_float32_layers)
    default_float32_ops = staticmethod(op_rules.default_float32_ops)

    def __init__(
        self,
        name: str,
        *,
        float32_layers: Iterable[layer_rules.RuleItem] | None = None,
        float32_ops: Iterable[str] | None = None,
        float8_layers: Iterable[layer_rules.RuleItem] | None = None,
    ) -> None:
        check_name(name)
        level = layer_rules.LEVELS.get(name)
        self.is_float8 = name == FLOAT8
        # The name it was created with, if its dtypes have another name.
        self.level = name if level or self.is_float8 else None
        dtypes = level.policy if level else name
        dtypes = "mixed_bfloat16" if self.is_float8 else dtypes
        super(Policy, self).__init__(  # noqa: UP008, see `__class__`
            auto_policy() if name == "auto" else dtypes
        )
        defaults = level.layers if level else layer_rules.DEFAULT_LAYERS
        self._float32_layers: tuple[layer_rules.RuleItem, ...] = (
            tuple(defaults)
            if float32_layers is None
            else layer_rules.resolve(float32_layers)
        )
        with_ops = level.op_rules if level else True
        self._float32_ops: tuple[str, ...] = (
            (op_rules.DEFAULT_FLOAT32_OPS if with_ops else ())
            if float32_ops is None
            else op_rules.resolve(float32_ops)
        )
        self._float8_layers = _float8_layers(name, float8_layers)
        # Keras asks for it whenever a layer is created.
        self._plain = keras.DTypePolicy(self.name)

    # mypy does not allow a property to replace `__class__`.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Keras writes `obj.__class__` into a saved model. Returning the plain
        # class here lets that model load without tfmix. `type(policy)` and
        # `isinstance` still see `Policy`. The short form of `super()` would
        # need this name for itself, so the long form stands above.
        return keras.DTypePolicy

    @property
    def float32_layers(self) -> list[layer_rules.RuleItem]:
        """The layers kept in float32, as a copy."""
        return list(self._float32_layers)

    @property
    def float32_ops(self) -> list[str]:
        """The ops computed in float32, as a copy."""
        return list(self._float32_ops)

    @property
    def float8_layers(self) -> list[layer_rules.RuleItem] | None:
        """The layers that multiply in float8; `None`: all that get faster."""
        chosen = self._float8_layers
        return None if chosen is None else list(chosen)

    @property
    def has_default_rules(self) -> bool:
        """Whether the rules are the defaults of the policy's name."""
        return self._content() == _default(self.name)._content()

    def why_float32(
        self, layer_class: type, name: str, path: str | None = None
    ) -> str | None:
        """Returns why a layer stays in float32, `None` if it does not.

        Args:
            layer_class: The layer's class.
            name: The layer's name.
            path: Its path. Defaults to `None` for a path that is not known
                yet: rules that name a path are then left out.

        Returns:
            The reason, as reports print it.

        Examples:
            >>> policy = Policy("mixed_float16", float32_layers=["head"])
            >>> policy.why_float32(keras.layers.Dense, "head")
            "listed in float32_layers: 'head'"
        """
        if self.compute_dtype not in _formats.SIXTEEN_BIT:
            return None
        for item in self._float32_layers:
            if layer_rules.matches(item, layer_class, name, path):
                shown = item.__name__ if isinstance(item, type) else repr(item)
                listed = f"listed in float32_layers: {shown}"
                return layer_rules.REASONS.get(item, listed)
        is_pure = self.compute_dtype == self.variable_dtype
        kept = ["BatchNormalization"] * (is_pure and self.level is None)
        for item in ["TFSMLayer", *kept]:
            if layer_rules.matches(item, layer_class, name):
                return layer_rules.REASONS[item]
        if self.compute_dtype == _formats.FLOAT16.name:
            for item, why in layer_rules.NO_CPU_KERNELS.items():
                if layer_rules.matches(item, layer_class, name):
                    return why if is_on_tensorflows_cpu() else None
        return None

    def outside_white_list(self, layer_class: type) -> bool:
        """Returns whether level O1 keeps a class in float32 (no matmul)."""
        return self.level == "O1" and not any(
            base.__name__ in layer_rules.MATMUL_LAYERS
            for base in layer_class.__mro__
        )

    def __repr__(self) -> str:
        shown = [repr(self.level or self.name)]
        default = _default(self.level or self.name)
        for field in _SETTINGS:
            value = getattr(self, field)
            if value != getattr(default, field):
                shown.append(f"{field}={value!r}")
        return f"Policy({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        if type(other) is Policy:
            return self._content() == other._content()
        if isinstance(other, keras.DTypePolicy):
            # Equal policies must behave in the same way everywhere.
            classes = (keras.DTypePolicy, keras.FloatDTypePolicy)
            same = type(other) in classes and self.name == other.name
            return same and self.has_default_rules
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._content())

    def __reduce__(self) -> tuple[Any, ...]:
        # `copy` and `pickle` would use `__class__`, and lose the rules.
        settings = {field: getattr(self, field) for field in _SETTINGS}
        return functools.partial(Policy, **settings), (self.level or self.name,)

    def _content(self) -> tuple[Any, ...]:
        lists = self._float32_layers, self._float32_ops, self._float8_layers
        return self.name, self.level, *lists


def check_name(name: object) -> None:
    """Raises an error for an unknown policy name, and suggests the closest."""
    allowed = f"one of {list(NAMES)}"
    if not isinstance(name, str):
        raise TypeError(
            f"A policy's name must be a string, {allowed}. "
            f"Received: name={name!r} of type {type(name).__name__}."
        )
    if name not in NAMES:
        raise ValueError(
            f"A policy's name must be {allowed}. Received: name={name!r}."
            f"{_arguments.did_you_mean(name, NAMES)}"
        )


def _float8_layers(
    name: str, items: Iterable[layer_rules.RuleItem] | None
) -> tuple[layer_rules.RuleItem, ...] | None:
    if items is None:
        return None
    if name != FLOAT8:
        raise ValueError(
            f"`float8_layers` goes with the policy {FLOAT8!r}. "
            f"Received: name={name!r}, float8_layers={items!r}."
        )
    return layer_rules.resolve(items, "float8_layers")


def changed(policy: Policy, **settings: Any) -> Policy:
    """Returns a policy with other settings."""
    kept = {field: getattr(policy, field) for field in _SETTINGS}
    return Policy(policy.level or policy.name, **{**kept, **settings})


def with_rules(policy: keras.DTypePolicy) -> Policy:
    """Returns a `Policy` unchanged, and the default one for any other policy.

    Maps and quantized policies get the rules of their compute dtype.
    """
    if isinstance(policy, Policy):
        return policy
    if policy.name in DTYPE_NAMES:
        return _default(policy.name)
    dtype = policy.compute_dtype
    mixed = policy.variable_dtype != dtype
    if dtype in _formats.SIXTEEN_BIT:
        return _default(f"mixed_{dtype}" if mixed else dtype)
    return _default("float32")


def plain(policy: keras.DTypePolicy) -> keras.DTypePolicy:
    """Returns the policy that layers keep, without tfmix's rules."""
    return policy._plain if isinstance(policy, Policy) else policy


@functools.cache
def _default(name: str) -> Policy:
    """Returns the policy with the default rules of a dtype or a level."""
    return Policy(name)


def is_sixteen_bit(policy: keras.DTypePolicy) -> bool:
    """Returns whether a policy, or any policy of a map, computes in 16 bit."""
    parts = [policy]
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        parts += [policy[key] for key in policy]
    return any(part.compute_dtype in _formats.SIXTEEN_BIT for part in parts)


def rules_of(policy: keras.DTypePolicy | None) -> frozenset[str]:
    """Returns the rules of a policy; there are none without 16 bit."""
    if policy is None or not is_sixteen_bit(policy):
        return frozenset()
    return frozenset({*with_rules(policy).float32_ops, SIXTEEN_BIT})
