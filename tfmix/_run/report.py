"""Holds what `tfmix run` measured of one run or two, and prints it."""

import dataclasses
import math
from typing import Any

from tfmix import _tables

# Smaller differences in time or memory are no reason to choose a policy, and
# smaller ones between losses are no reason against it.
_FASTER, _SMALLER, _OTHER_LOSS = 1.1, 0.9, 0.05
_UNKNOWN = "-"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a script. `None` means that something was not measured."""

    policy: str
    dtype: str  # the compute dtype
    why: str  # the reason for this policy
    device: str
    fast: bool  # true if the device is faster in this dtype
    failed: str  # why something could not be measured, "" for nothing
    ended: str  # the error that ended it, "" for none
    steps: int  # the optimizer steps, skipped ones included
    skipped: int | None
    cause: str  # the likeliest cause of skipped steps, or ""
    milliseconds: float | None  # the median time of a step, without the first
    first_seconds: float | None  # the time of the first step
    peak_bytes: int | None
    loss: float | None  # the loss of the last step
    float32_layers: dict[str, int]  # their number by class
    layers: int  # the number of layers that compute
    float32_ops: tuple[str, ...]
    fallen: tuple[str, ...]  # layers that fell back, each with the reason

    def is_float32(self) -> bool:
        """Returns whether this is the run in float32."""
        return self.policy == "float32"

    def cells(self) -> list[str]:
        """Returns the column of the table."""
        is_short = self.milliseconds is not None and self.milliseconds < 100
        return [
            f"{self.steps:,}",
            _UNKNOWN if self.skipped is None else f"{self.skipped:,}",
            _shown(self.milliseconds, ",.3g" if is_short else ",.0f"),
            _shown(self.first_seconds, ".2f"),
            _shown(self.peak_bytes and self.peak_bytes / 2**20, ",.0f"),
            _shown(self.loss, ".4g"),
        ]

    def notes(self) -> list[str]:
        """Returns the sentences below the table."""
        notes = [f"{self.policy} on {self.device}: {self.why}"]
        if self.ended:
            notes.append(f"ended by {self.ended}")
        if not self.steps:
            notes.append(
                "No optimizer step was seen in this process, so nothing was "
                "measured."
            )
        if self.failed:
            notes.append(f"not measured to the end, because of {self.failed}")
        if self.cause:
            notes.append(f"skipped, most likely: {self.cause}")
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
        kept = f"{total} of {self.layers} layers" + f" ({kinds})" * bool(kinds)
        if self.float32_ops:
            shown = self.float32_ops[0]
            kept += f", and {len(self.float32_ops)} ops, such as {shown}"
        return kept


HEADS = (
    "optimizer steps",
    "skipped",
    "milliseconds a step",
    "first step, seconds",
    "peak memory, MiB",
    "last loss",
)


@dataclasses.dataclass(frozen=True)
class Report(_tables.Printed):
    """A report of one run, or of two to compare."""

    script: str
    run: Run
    other: Run | None = None

    @property
    def runs(self) -> list[Run]:
        """The runs, in their order."""
        return [self.run, *([self.other] if self.other else [])]

    def tables(self) -> list[_tables.Table]:
        """Returns the tables to print."""
        columns = [run.cells() for run in self.runs]
        rows = [
            row
            for row in zip(HEADS, *columns, strict=True)
            if set(row[1:]) != {_UNKNOWN}
        ]
        notes = [note for run in self.runs for note in run.notes()]
        if self.other:
            notes.append(self.verdict())
        heads = ["", *(run.policy for run in self.runs)]
        title = f"tfmix run: {self.script}"
        return [_tables.Table(heads, rows, title, notes)]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain JSON values.

        JSON has no NaN and no infinity. They are strings, such as "nan".
        """
        data = dataclasses.asdict(self)
        for run in filter(None, (data["run"], data["other"])):
            run |= {name: _json(value) for name, value in run.items()}
        if self.other:
            data["speedup"] = self.speedup()
            data["verdict"] = self.verdict()
        return data

    def pair(self) -> tuple[Run, Run]:
        """Returns the two runs, that in float32 last."""
        if self.other is None:
            raise ValueError("There is only one run, so nothing to compare.")
        if self.run.is_float32() and not self.other.is_float32():
            return self.other, self.run
        return self.run, self.other

    def speedup(self) -> float | None:
        """Returns how many times as fast the 16-bit run is."""
        narrow, wide = self.pair()
        if not narrow.milliseconds or not wide.milliseconds:
            return None
        return wide.milliseconds / narrow.milliseconds

    def verdict(self) -> str:
        """Returns a sentence or two on whether 16 bit is worth it."""
        narrow, wide = self.pair()
        if narrow.policy == wide.policy:
            return (
                f"Both ran in {narrow.policy}, so there is nothing to compare: "
                "name a policy, as in `tfmix run --policy mixed_bfloat16 "
                "--against float32 ...`."
            )
        speedup = self.speedup()
        if speedup is None:
            return "Not compared: one of the runs has too few steps to time."
        times = f"{speedup:.2f} times as fast as {wide.policy}"
        saved = _saved(narrow, wide)
        if speedup >= _FASTER:
            text = f"Worth it: {times}{saved}."
        elif saved:
            text = f"Worth it for memory alone: {times}{saved}."
        else:
            text = f"Not worth it: {times}{_reason(narrow, speedup)}."
        return text + _losses(narrow, wide)


def _reason(narrow: Run, speedup: float) -> str:
    """Returns the reason that 16 bit gains nothing, if it is known."""
    if narrow.fast:
        return ". The layers may be too small, see `tfmix advise`"
    emulates = speedup < 1 / _FASTER
    known = f", as this {narrow.device} emulates {narrow.dtype}"
    return known if emulates else ""


def _saved(narrow: Run, wide: Run) -> str:
    if not narrow.peak_bytes or not wide.peak_bytes:
        return ""
    share = narrow.peak_bytes / wide.peak_bytes
    return f", with {share:.0%} of the memory" if share <= _SMALLER else ""


def _losses(narrow: Run, wide: Run) -> str:
    if narrow.loss is None or wide.loss is None:
        return ""
    gap = narrow.loss - wide.loss
    if not math.isfinite(gap):
        return " The last loss of a run is not finite."
    text = f" The last losses differ by {gap:+.2g}"
    if abs(gap) <= _OTHER_LOSS * abs(wide.loss):
        return f"{text}."
    return f"{text}; two runs with other seeds may differ as much: try a few."


def _shown(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else format(value, form)


def _json(value: Any) -> Any:
    """Returns a value that JSON has: its numbers are finite."""
    is_lost = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_lost else value
