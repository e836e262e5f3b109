"""Searches the smallest set of float32 layers that makes a model healthy."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import rich.progress

from tfmix.doctor import verdicts
from tfmix.policy import policy as policies

Names = tuple[str, ...]


def policy(report: Any, *, progress: bool) -> policies.Policy:
    """Searches by measurement: every candidate is checked.

    First all layers at fault become float32, then those that show a fault
    because of it, until none does. Then halves, quarters and single layers
    are taken out again as long as the model stays healthy.

    Args:
        report: A `NumericsReport`.
        progress: Whether to show a progress bar.

    Returns:
        The policy.

    Raises:
        ValueError: If the model is not finite in float32 either.
    """
    if report.healthy:
        return report.policy
    _refuse_broken(report)
    with rich.progress.Progress(transient=True, disable=not progress) as bar:
        task = bar.add_task("Searching float32 layers", total=None)

        def healthy(names: Names) -> bool:
            bar.update(task, advance=1, description=f"Trying {len(names)}")
            return _heals(report, names)

        names = _enough(report, lambda: bar.advance(task))
        # What holds the most is tried first, to be left out.
        names = tuple(sorted(names, key=lambda name: -_breadth(report, name)))
        return with_layers(report, fewest(names, healthy))


def with_layers(report: Any, names: Iterable[str]) -> policies.Policy:
    """Returns a report's policy with more layers in float32."""
    base = report.policy
    known = base.float32_layers
    added = [re.escape(name) for name in names]
    return policies.Policy(
        base.level or base.name,
        float32_layers=[*known, *(one for one in added if one not in known)],
        float32_ops=base.float32_ops,
        keep_batchnorm_fp32=base.keep_batchnorm_fp32,
    )


def fewest(names: Names, healthy: Callable[[Names], bool]) -> Names:
    """Takes names out, in large pieces first, while `healthy` holds.

    Args:
        names: Names that are healthy together.
        healthy: Says whether a subset is.

    Returns:
        A subset of which no single name can be taken out.

    Example:
        >>> fewest(("a", "b", "c", "d"), lambda names: "c" in names)
        ('c',)
    """
    size = len(names)
    while size >= 1:
        start = 0
        while start < len(names):
            rest = names[:start] + names[start + size :]
            if healthy(rest):
                names = rest
            else:
                start += size
        size //= 2
    return names


def _heals(report: Any, names: Names) -> bool:
    try:
        return bool(report.again(with_layers(report, names)).healthy)
    except Exception:
        # A layer of the user's adds 16-bit inputs to what a float32 layer
        # inside it returns: each backend has an error of its own for that.
        return False


def _enough(report: Any, step: Callable[[], None]) -> Names:
    """Adds what is at fault until nothing is."""
    names: dict[str, None] = {}
    current = report
    while not current.healthy:
        step()
        before = len(names)
        names.update(dict.fromkeys(_culprits(current)))
        if len(names) == before:
            # Nothing new to add: the rest of the model is what is left.
            names.update(dict.fromkeys(_all_layers(report)))
        if len(names) == before:
            break
        current = report.again(with_layers(report, names))
    return tuple(names)


def _culprits(report: Any) -> list[str]:
    found: list[str] = []
    for row in report.faults:
        if row.layer == verdicts.LOSS:
            found += _outputs(report)
        else:
            found += _parts(report, row.layer)
    return found


def _parts(report: Any, name: str) -> list[str]:
    """Returns a layer and what is inside: its tensors come from there."""
    inner = [
        target.name
        for target in report.targets.values()
        if name in target.inside
    ]
    return [name, *inner]


def _breadth(report: Any, name: str) -> int:
    return len(_parts(report, name))


def _outputs(report: Any) -> list[str]:
    return list(report.targets)[-1:]


def _all_layers(report: Any) -> list[str]:
    return list(report.targets)


def _refuse_broken(report: Any) -> None:
    for row in report.faults:
        if row.verdict == verdicts.NOT_FINITE and "in float32 either" in (
            row.advice
        ):
            raise ValueError(
                "No dtype policy can mend this model: it is not finite in "
                f"float32 either, first at layer {row.layer!r}. Look for NaN "
                "or infinity in the data and the weights."
            )
