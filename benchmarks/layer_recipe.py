"""One way to build a layer or activation for the sweep."""

import dataclasses
from collections.abc import Callable
from typing import Any

# The shape of one input. The state of a cell may be a tuple of shapes.
Shape = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way to build a layer or activation, and the shapes of its inputs.

    Attributes:
        make: Function that builds it; called once for every policy.
        shapes: The shape of each input, batch included.
        training: The `training` argument, `None` for none.
        call: Further arguments of the call.
        as_list: Whether the inputs are passed as one list.
    """

    make: Callable[[], Any]
    shapes: tuple[Shape, ...]
    training: bool | None = None
    call: dict[str, Any] = dataclasses.field(default_factory=dict)
    as_list: bool = False
