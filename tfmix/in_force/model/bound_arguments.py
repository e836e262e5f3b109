"""Arguments of a call by name, also of a method that takes `**kwargs`."""

import inspect
from typing import Any


def get(bound: inspect.BoundArguments, name: str, default: Any = None) -> Any:
    """Returns what an argument was given or, if declared, is by default."""
    if name in bound.signature.parameters:
        declared = bound.signature.parameters[name].default
        if declared is not inspect.Parameter.empty:
            default = declared
        return bound.arguments.get(name, default)
    return _extra(bound).get(name, default)


def put(bound: inspect.BoundArguments, name: str, value: Any) -> None:
    """Sets an argument, if the method takes one of that name."""
    declared = name in bound.signature.parameters
    (bound.arguments if declared else _extra(bound))[name] = value


def _extra(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Returns what went into the `**kwargs` of an overridden method."""
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            extra: dict[str, Any] = bound.arguments.setdefault(name, {})
            return extra
    return {}
