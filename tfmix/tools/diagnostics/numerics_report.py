"""The result of `check`: a table, and a policy that fixes the model."""

import dataclasses
import json
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tfmix import _formats, _messages, _tables
from tfmix.policy import policy as policies
from tfmix.tools.diagnostics import probe, verdicts


@dataclasses.dataclass(frozen=True, eq=False)
class NumericsReport(_tables.Printed):
    """The result of `tfmix.check`; prints as a table.

    Attributes:
        rows: One `LayerVerdict` per layer and phase, the most severe first.
        policy: The `tfmix.Policy` that was checked.
        model_name: The name of the model.
        loss_scale: The optimizer's loss scale at which gradients were judged,
            the first one if they fit there. `model.optimizer.loss_scale =
            report.loss_scale` makes `fit` begin at it.
        again: Function that checks the same batch under another policy.
        targets: The watched layers by name.
        sixteen_bit_layers: How many layers computed in 16 bit.
        notes: Sentences on faults of the model as a whole, on layers that
            fell back to float32, and on parts that were not checked.
        verbose: Whether it prints every row.
    """

    rows: tuple[verdicts.LayerVerdict, ...]
    policy: policies.Policy
    model_name: str
    again: Callable[[policies.Policy], "NumericsReport"] = dataclasses.field(
        repr=False
    )
    targets: Mapping[str, probe.Target] = dataclasses.field(repr=False)
    sixteen_bit_layers: int
    loss_scale: float
    notes: tuple[str, ...]
    verbose: bool = False

    @property
    def healthy(self) -> bool:
        """True if every row is fine."""
        return not self.faults

    @property
    def faults(self) -> tuple[verdicts.LayerVerdict, ...]:
        """The rows that are not fine, the most severe first."""
        return tuple(row for row in self.rows if row.verdict != verdicts.OK)

    @property
    def forward_only(self) -> bool:
        """True if no gradients were checked, because there were no targets."""
        return all(row.phase != verdicts.BACKWARD for row in self.rows)

    @property
    def title(self) -> str:
        """One line: the policy, and whether the model is healthy."""
        data = [row.layer for row in self.faults if not row.dtype]
        count = len({row.layer for row in self.faults}) - len(data)
        state = f"{count} layer{'s' * (count != 1)} at fault"
        if data:
            # Rows about `x` or `y` do not count as layers.
            bad = f"{' and '.join(data)} not finite"
            state = f"{bad}, {state}" if count else bad
        if self.healthy:
            nothing = "no layer computes in 16 bit"
            state = "healthy" if self.sixteen_bit_layers else nothing
        if self.forward_only:
            state += ", forward pass only"
        return f"{_name(self.policy)} against float32: {state}"

    def suggested_policy(self) -> policies.Policy:
        """Moves faulty layers to float32 until the model is healthy.

        Each policy is checked on the same batch, so the search takes as long
        as a few checks. A warning is logged if no layer is left in 16 bit.

        Returns:
            A `tfmix.Policy`: the checked one if it is healthy, otherwise one
            with more `float32_layers`.

        Raises:
            ValueError: If the model is not finite in float32 either.
        """
        if broken := [row.layer for row in self.faults if row.broken]:
            raise ValueError(
                "No dtype policy can fix this model: it is not finite in "
                f"float32 either, first at {broken[0]!r}. Look for NaN or "
                "infinity in the data and the weights."
            )
        if self.healthy:
            return self.policy
        # This report may be about the model without its policy.
        report, tried = self.again(self.policy), set[str]()
        while not report.healthy and repr(report.policy) not in tried:
            tried.add(repr(report.policy))
            report = self.again(_healthier(report))
        if self.sixteen_bit_layers and not report.sixteen_bit_layers:
            is_float16 = report.policy.compute_dtype == "float16"
            _messages.warn(
                "nothing is left in 16 bit under the suggested policy; use %r.",
                "mixed_bfloat16" if is_float16 else "float32",
            )
        return report.policy

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws the headroom of each layer."""
        from tfmix.tools.diagnostics import plotting

        return plotting.headroom(self, path)

    def to_json(self) -> str:
        """Returns the report as JSON; infinities and NaN become null."""
        return json.dumps(
            {
                "healthy": self.healthy,
                "forward_only": self.forward_only,
                "policy": _name(self.policy),
                "loss_scale": self.loss_scale,
                "notes": list(self.notes),
                "rows": [_plain(row) for row in self.rows],
            },
            indent=2,
        )

    def tables(self) -> list[_tables.Table]:
        """Returns the table to print: the faults, and the least headroom.

        `rows` and a `verbose` report have all rows.
        """
        fine = [row for row in self.rows if row.verdict == verdicts.OK]
        # Headroom in the 16-bit format does not matter for float32 layers.
        near = [row for row in fine if row.dtype in _formats.SIXTEEN_BIT]
        fine = near or fine
        fine.sort(key=lambda row: row.headroom_bits)
        kept = (*self.faults[:_FAULTS_SHOWN], *fine[:_FINE_SHOWN])
        identities = set(map(id, self.rows if self.verbose else kept))
        shown = [row for row in self.rows if id(row) in identities]
        notes = list(self.notes)
        if more := len(self.rows) - len(shown):
            seen = sum(row.verdict != verdicts.OK for row in shown)
            notes.append(
                f"{len(self.faults) - seen} more at fault and {more} more rows "
                "in all: see `report.rows`, and in a shell `--verbose`."
            )
        title = self.title
        if not self.forward_only:
            title += f" (loss scale {self.loss_scale:g})"
        cells = list(map(_cells, shown))
        code = _code(shown if self.verbose else shown[:_ADVICE_SHOWN])
        return [_tables.Table(_HEADS, cells, title, notes, code)]


def _name(policy: policies.Policy) -> str:
    return policies.FLOAT8 if policy.is_float8 else policy.name


_HEADS = ("layer", "dtype", "phase", "verdict", "error", "headroom")
# So many rows and lines of code fit on one screen.
_FAULTS_SHOWN, _FINE_SHOWN, _ADVICE_SHOWN = 8, 5, 5


def _cells(row: verdicts.LayerVerdict) -> tuple[str, ...]:
    bits = row.headroom_bits
    headroom = f"{bits:+.0f} bits" if math.isfinite(bits) else ""
    fields = row.layer, row.dtype, row.phase, row.verdict
    return (*fields, _error(row), headroom)


def _error(row: verdicts.LayerVerdict) -> str:
    """Returns the error and its bound, "" for rows about data or NaN."""
    is_fine = row.relative_error <= row.bound
    is_overflow = row.verdict == verdicts.OVERFLOW
    if not math.isfinite(row.relative_error) or (is_overflow and is_fine):
        return ""
    return f"{row.relative_error:.2g} of {row.bound:g}"


def _code(rows: Iterable[verdicts.LayerVerdict]) -> list[str]:
    """Returns the lines of code to write, each below its reason."""
    reasons: dict[str, str] = {}
    for row in rows:
        # A fault that float32 has as well comes with a reason, but no code.
        if row.verdict != verdicts.OK:
            reasons.setdefault(row.code, row.reason)
    head = "What to write:" if any(reasons) else "What is at fault:"
    lines = [head] if reasons else []
    for code, reason in reasons.items():
        # Every other line is a comment, so that you can paste all of it.
        lines += [f"# {line}" for line in textwrap.wrap(reason, 76)]
        lines += [code] * bool(code)
    return lines


def _plain(row: verdicts.LayerVerdict) -> dict[str, Any]:
    values = dataclasses.asdict(row)
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[key] = None
    return values


def _healthier(report: NumericsReport) -> policies.Policy:
    """Returns a policy without the faults that a report has."""
    targets = [*report.targets.values()]
    faulty = {row.layer for row in report.faults}
    if verdicts.LOSS in faulty:
        faulty.add(targets[-1].name)
    # The inner layers of a faulty one compute its tensors.
    found = [x.name for x in targets if faulty & {x.name, *x.inside}]
    before = [*report.policy.float32_layers]
    for wanted in (found, [target.name for target in targets]):
        added = [x for x in map(re.escape, wanted) if x not in before]
        if added:
            break
    return policies.changed(report.policy, float32_layers=[*before, *added])
