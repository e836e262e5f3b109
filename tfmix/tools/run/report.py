"""Holds what `tfmix run` measured of one run or several, and prints it."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfmix import _tables
from tfmix.tools.run import verdict

# A smaller difference in memory is no reason to choose a policy, and a smaller
# one between losses is no reason against it.
_SMALLER, _OTHER_LOSS = 0.9, 0.05
# Runs that differ by less have the same seed, or do not depend on it.
_ALIKE = 1e-3
_UNKNOWN = "-"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a script. `None` means that something was not measured."""

    policy: str
    dtype: str  # the compute dtype
    why: str  # the reason for this policy
    device: str
    fast: bool  # true if the device is faster in this dtype
    is_cpu: bool  # true if no accelerator was found
    failed: str  # why something could not be measured, "" for nothing
    steps: int  # the train steps, skipped ones included
    skipped: int | None
    milliseconds: float | None  # the median time of a step, without the first
    timed: int  # the steps of that median
    blocks: list[float]  # the same of blocks of steps, see `verdict`
    first_seconds: float | None  # the time of the first step
    peak_bytes: int | None
    loss: float | None  # the mean loss of the last tenth of the steps
    float32_layers: dict[str, int]  # their number by class
    layers: int  # the number of layers that compute
    layer_dtype: str  # in which most layers with weights compute, or ""
    fallen: tuple[str, ...]  # layers that fell back, each with the reason

    def is_float32(self) -> bool:
        """Returns whether this is the run in float32."""
        return self.policy == "float32"

    def notes(self) -> list[str]:
        """Returns the sentences below the table."""
        notes = [f"{self.policy} on {self.device}: {self.why}"]
        if not self.steps:
            notes.append(
                "No step of an optimizer was seen in this process, so nothing "
                "was measured."
            )
        if self.failed:
            notes.append(f"not measured to the end, because of {self.failed}")
        if self.steps and not self.is_float32():
            notes.append(f"in float32: {self._kept()}")
        notes += self.fallen
        return notes

    def _kept(self) -> str:
        """Describes which layers and ops stay in float32."""
        total = sum(self.float32_layers.values())
        kinds = ", ".join(
            name if count == 1 else f"{count} {name}"
            for name, count in self.float32_layers.items()
        )
        return f"{total} of {self.layers} layers" + f" ({kinds})" * bool(kinds)


def _milliseconds(value: float) -> str:
    return format(value, ",.3g" if value < 100 else ",.0f")


# The rows of the table: a head, the value of a run, and how to show it.
_ROWS: tuple[tuple[str, Callable[[Run], Any], Callable[[Any], str]], ...] = (
    ("train steps", lambda run: run.steps, "{:,}".format),
    ("skipped", lambda run: run.skipped, "{:,}".format),
    ("milliseconds a step", lambda run: run.milliseconds, _milliseconds),
    ("first step, seconds", lambda run: run.first_seconds, "{:.2f}".format),
    (
        "peak memory, MiB",
        lambda run: run.peak_bytes and run.peak_bytes / 2**20,
        "{:,.0f}".format,
    ),
    ("loss, last tenth", lambda run: run.loss, "{:.4g}".format),
)


@dataclasses.dataclass(frozen=True)
class Report(_tables.Printed):
    """A report of runs in one policy, or of as many in another, too.

    Attributes:
        script: The name of the script.
        runs: The runs in the policy that was asked for.
        others: The runs to compare with; each ran before its partner.
    """

    script: str
    runs: tuple[Run, ...]
    others: tuple[Run, ...] = ()

    def tables(self) -> list[_tables.Table]:
        """Returns the tables to print."""
        columns = [*filter(None, (self.runs, self.others))]
        rows = [
            (
                head,
                *(
                    _cell([value(run) for run in runs], form)
                    for runs in columns
                ),
            )
            for head, value, form in _ROWS
        ]
        rows = [row for row in rows if set(row[1:]) != {_UNKNOWN}]
        notes = [note for *_, run in columns for note in run.notes()]
        heads = ["", *(runs[-1].policy for runs in columns)]
        title = f"tfmix run: {self.script}"
        if self.others:
            title += f". {self.verdict()}"
        elif self.runs[-1].is_cpu:
            title += f". {_CPU}"
        return [_tables.Table(heads, rows, title, notes)]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain JSON values.

        JSON has no NaN and no infinity. They are strings, such as "nan".
        """
        data = dataclasses.asdict(self)
        for run in (*data["runs"], *data["others"]):
            run |= {name: _json(value) for name, value in run.items()}
        if self.others:
            speedup = self.speedup()
            data["speedup"] = speedup and dataclasses.asdict(speedup)
            data["verdict"] = self.verdict()
        return data

    def _sides(self) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
        """Returns the runs of both policies, those in float32 last."""
        if self.runs[-1].is_float32() and not self.others[-1].is_float32():
            return self.others, self.runs
        return self.runs, self.others

    def speedup(self) -> verdict.Ratio | None:
        """Returns how many times as fast 16 bit is, None for too few steps."""
        pairs = [*zip(*self._sides(), strict=True)]
        if not all(run.blocks for pair in pairs for run in pair):
            return None
        return verdict.compare([(a.blocks, b.blocks) for a, b in pairs])

    def verdict(self) -> str:
        """Returns some sentences on whether 16 bit is worth it.

        A CPU shows whether the losses agree, but not what a GPU gains.
        """
        (*_, narrow), (*_, wide) = self._sides()
        if narrow.policy == wide.policy:
            return f"Both ran in {wide.policy}, so there is nothing to compare."
        losses = _losses(*self._sides())
        if narrow.is_cpu:
            return f"{losses} {_CPU}{self._on_cpu(wide)}"
        if _is_lost(narrow) and not _is_lost(wide):
            return losses
        return f"{self._on_time(narrow, wide)}{_saved(narrow, wide)} {losses}"

    def _on_cpu(self, wide: Run) -> str:
        speedup = self.speedup()
        return f" Here: {speedup} times as fast as {wide.policy}." * bool(
            speedup
        )

    def _on_time(self, narrow: Run, wide: Run) -> str:
        speedup = self.speedup()
        if speedup is None:
            timed = min(run.timed for run in (*self.runs, *self.others))
            return (
                f"{_NO_DIFFERENCE}: it takes {verdict.LEAST_STEPS} steps, and "
                f"{timed} were timed after the first."
            )
        times = f"{speedup} times as fast as {wide.policy}"
        if speedup.is_faster():
            return f"Worth it: {times}."
        if speedup.is_slower():
            return f"Not worth it: {times}{_reason(narrow)}."
        more = "" if len(self.runs) > 1 else " `--repeat 3` would show more."
        return f"{_NO_DIFFERENCE}: {times}.{more}"


_NO_DIFFERENCE = "No difference that this run can show"
_CPU = "The time on a CPU does not forecast that on a GPU."


def _reason(narrow: Run) -> str:
    """Returns the reason that 16 bit is slower, if it is known."""
    if narrow.fast:
        return ". The layers may be too small, see `tfmix advise`"
    return f", as this {narrow.device} emulates {narrow.dtype}"


def _saved(narrow: Run, wide: Run) -> str:
    if not narrow.peak_bytes or not wide.peak_bytes:
        return ""
    share = narrow.peak_bytes / wide.peak_bytes
    if share > _SMALLER:
        return ""
    return f" It takes {share:.0%} of the memory."


def _is_lost(run: Run) -> bool:
    return run.loss is not None and not math.isfinite(run.loss)


def _losses(narrow: Sequence[Run], wide: Sequence[Run]) -> str:
    """Compares the losses, with their spread if there are several."""
    ours, theirs = (
        [run.loss for run in runs if run.loss is not None]
        for runs in (narrow, wide)
    )
    if not ours or not theirs:
        return "No loss is known to compare."
    mine, other = float(np.median(ours)), float(np.median(theirs))
    gap = mine - other
    if not math.isfinite(gap):
        if math.isfinite(other):
            return (
                f"Not worth it as it is: the loss in {narrow[-1].policy} is "
                f"{mine} at the end, in {wide[-1].policy} {other:.4g}."
            )
        return f"The loss in {wide[-1].policy} is {other} at the end."
    by = f"by {gap:+.2g}"
    if abs(gap) <= _OTHER_LOSS * abs(other):
        return f"The losses agree: they differ {by}."
    if len(narrow) == 1:
        return (
            f"The losses differ {by}; with other seeds they may as well agree: "
            "add `--repeat 3`."
        )
    spread = float(max(np.ptp(ours), np.ptp(theirs)))
    if spread <= _ALIKE * abs(other):
        return (
            f"The losses differ {by}. The runs of one policy are all alike, as "
            "with a seed that the script sets, so they say nothing about other "
            "seeds: change it and compare again."
        )
    if abs(gap) <= spread:
        return (
            f"The losses agree: they differ {by}, those of one policy by "
            f"{spread:.2g}."
        )
    return (
        f"The losses differ {by}, more than those of one policy with other "
        f"seeds, {spread:.2g}."
    )


def _cell(values: Sequence[Any], form: Callable[[Any], str]) -> str:
    """Returns the value of some runs, or their range."""
    known = [value for value in values if value is not None]
    if not known:
        return _UNKNOWN
    ends = dict.fromkeys((form(min(known)), form(max(known))))
    return " to ".join(ends)


def _json(value: Any) -> Any:
    """Returns a value that JSON has: its numbers are finite."""
    is_lost = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_lost else value
