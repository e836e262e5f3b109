"""One way to build a layer or activation for the sweep."""

import dataclasses
from collections.abc import Callable
from typing import Any

# Of one input; a cell's state may be a tuple of shapes.
Shape = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way to build a layer or activation, and the input it is tried on.

    Attributes:
        make: Builds it; called once for every policy.
        shapes: Shape of each input, batch included.
        training: The `training` argument, `None` where there is none.
        call: Further arguments of the call.
        as_list: Whether the inputs go in as one list.
    """

    make: Callable[[], Any]
    shapes: tuple[Shape, ...]
    training: bool | None = None
    call: dict[str, Any] = dataclasses.field(default_factory=dict)
    as_list: bool = False
