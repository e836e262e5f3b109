"""What a check found: a table, a page, and the policy that fixes it."""

import base64
import dataclasses
import io
import json
import math
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tfmix import _formats, _tables
from tfmix.diagnostics import float8_products, probe, suggest, verdicts
from tfmix.policy import names
from tfmix.policy import policy as policies


@dataclasses.dataclass(frozen=True, eq=False)
class NumericsReport(_tables.Printed):
    """The result of `tfmix.check`; prints as a table.

    Attributes:
        rows: One `LayerVerdict` per layer and phase, the most severe first.
        policy: The `tfmix.Policy` that was checked.
        model_name: The name of the model.
        loss_scale: The loss scale that gradients were judged under.
        again: Checks the same model and batch under another policy.
        targets: The watched layers by name.
        sixteen_bit_layers: How many layers computed in 16 bit.
        float8: One `Float8Product` for each product that a layer computes in
            float8, the worst first; empty where none does, and without `y`.
        notes: Sentences on what is wrong with the model as a whole, on layers
            that fell back to float32, and on what was not checked.
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
    float8: tuple[float8_products.Float8Product, ...] = ()
    verbose: bool = False

    @property
    def healthy(self) -> bool:
        """Whether every row is fine, and every product in float8."""
        return not self.faults and all(
            product.is_fine for product in self.float8
        )

    @property
    def faults(self) -> tuple[verdicts.LayerVerdict, ...]:
        """The rows that are not fine, the most severe first."""
        return tuple(row for row in self.rows if row.verdict != verdicts.OK)

    @property
    def forward_only(self) -> bool:
        """Whether no gradient was checked, for want of targets."""
        return all(row.phase != verdicts.BACKWARD for row in self.rows)

    @property
    def title(self) -> str:
        """One line: the policy, and whether the model is healthy."""
        data = [row.layer for row in self.faults if not row.dtype]
        count = len({row.layer for row in self.faults}) - len(data)
        state = f"{count} layer{'s' * (count != 1)} at fault"
        if data:
            # Rows of `x` or `y`, which are no layers.
            bad = f"{' and '.join(data)} not finite"
            state = f"{bad}, {state}" if count else bad
        if self.healthy:
            nothing = "no layer computes in 16 bit"
            state = "healthy" if self.sixteen_bit_layers else nothing
        elif not self.faults:
            state = "healthy but for float8"
        if self.forward_only:
            state += ", forward pass only"
        return f"{_name(self.policy)} against float32: {state}"

    def suggested_policy(self, *, progress: bool = True) -> policies.Policy:
        """Puts the layers at fault in float32 until the model is healthy.

        Each policy is checked on the same batch: it takes as long as a few
        checks. A warning says so if nothing is left in 16 bit.

        Args:
            progress: Boolean, whether to show the search. Defaults to `True`.

        Returns:
            A `tfmix.Policy`: the one that was checked if that is healthy;
            else one with fewer `float8_layers` or more `float32_layers`.

        Raises:
            ValueError: If the model is not finite in float32 either.
        """
        return suggest.float32_layers(self, progress)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws the headroom of each layer."""
        from tfmix.diagnostics import plotting

        return plotting.headroom(self, path)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes to `path` one page with table and figure, all in one file."""
        try:
            picture = _picture(self.plot())
        except ImportError:
            # The table says all that the picture shows.
            picture = ""
        # The worst rows and what to write come first, then every row.
        rows, *float8 = dataclasses.replace(self, verbose=True).tables()
        worst = dataclasses.replace(
            self.tables()[0], notes=self.notes, code=rows.code
        )
        rows = dataclasses.replace(rows, title="All rows", notes=(), code=())
        tables = [worst, *float8, rows]
        _tables.write_page(path, self.model_name, tables, picture)

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
                "float8": [_plain(product) for product in self.float8],
            },
            indent=2,
        )

    def tables(self) -> list[_tables.Table]:
        """Returns the table that is printed: the worst, and what is nearest.

        Of the rows that are fine, those with the least headroom are shown;
        `rows` and `to_html` have all, and so has a `verbose` report.
        """
        fine = [row for row in self.rows if row.verdict == verdicts.OK]
        # What is in float32 does not leave it.
        near = [row for row in fine if row.dtype in _formats.SIXTEEN_BIT]
        fine = near or fine
        fine.sort(key=lambda row: row.headroom_bits)
        kept = (*self.faults[:_FAULTS_SHOWN], *fine[:_FINE_SHOWN])
        identities = set(map(id, self.rows if self.verbose else kept))
        shown = [row for row in self.rows if id(row) in identities]
        notes = list(self.notes)
        if left_out := self._left_out(len(self.rows) - len(shown), shown):
            notes.append(left_out)
        title = self.title
        if not self.forward_only:
            title += f" (loss scale {self.loss_scale:g})"
        row_verdicts = [row.verdict for row in shown]
        cells = list(map(_cells, shown))
        code = _code(shown if self.verbose else shown[:_ADVICE_SHOWN])
        tables = [
            _tables.Table(_HEADS, cells, title, notes, code, row_verdicts)
        ]
        return [*tables, self._float8_table()] if self.float8 else tables

    def _float8_table(self) -> _tables.Table:
        """Returns the worst products in float8, and what to write."""
        shown = self.float8 if self.verbose else self.float8[:_FAULTS_SHOWN]
        table = float8_products.table(shown)
        notes = [f"{len(self.float8) - len(shown)} more: `report.float8`."]
        code: list[str] = []
        if not all(product.is_fine for product in self.float8):
            items = suggest.in_float8(self)
            code = ["# What to write, at fault: back to bfloat16"]
            code.append(
                f"tfmix.Policy({names.FLOAT8!r}, float8_layers={items})"
                if items
                else 'tfmix.Policy("mixed_bfloat16")'
            )
        notes = notes if len(shown) < len(self.float8) else []
        return dataclasses.replace(table, notes=notes, code=code)

    def _left_out(
        self, count: int, shown: Sequence[verdicts.LayerVerdict]
    ) -> str:
        """Says how many rows are not shown, "" if all are."""
        if not count:
            return ""
        seen = sum(row.verdict != verdicts.OK for row in shown)
        faulty = len(self.faults) - seen
        more = f"{faulty} more at fault and {count - faulty} more"
        more = f"{more if faulty else f'{count} more rows'} ok: "
        said = f"{more}`report.rows` and `report.to_html(path)` have all."
        if faulty:
            said += " `report.suggested_policy()` says which to change."
        return said


def _name(policy: policies.Policy) -> str:
    return names.FLOAT8 if policy.is_float8 else policy.name


_HEADS = ("layer", "dtype", "phase", "verdict", "error", "headroom")
# Rows that are printed, and lines to write: a screen in all.
_FAULTS_SHOWN, _FINE_SHOWN, _ADVICE_SHOWN = 8, 5, 5


def _cells(row: verdicts.LayerVerdict) -> tuple[str, ...]:
    return (
        row.layer,
        row.dtype,
        row.phase,
        row.verdict,
        _error(row),
        _headroom(row.headroom_bits),
    )


def _headroom(bits: float) -> str:
    return f"{bits:+.0f} bits" if math.isfinite(bits) else ""


def _error(row: verdicts.LayerVerdict) -> str:
    """Returns the error beside its bound; of data and NaN there is none."""
    is_fine = row.relative_error <= row.bound
    is_overflow = row.verdict == verdicts.OVERFLOW
    if not math.isfinite(row.relative_error) or (is_overflow and is_fine):
        return ""
    return f"{row.relative_error:.2g} of {row.bound:g}"


def _code(rows: Iterable[verdicts.LayerVerdict]) -> list[str]:
    """Returns the lines to write, each once, below a comment that says why."""
    known: dict[str, str] = {}
    for row in rows:
        # A fault of float32's as well is told of without a line to write.
        code, _, why = f" {row.advice}".partition(" # ")
        code = code.strip()
        if row.verdict != verdicts.OK:
            said = f"{row.layer}, {row.phase}, {row.verdict}: {why}"
            known.setdefault(code, said)
    # Of what is not finite in float32 either there is a comment alone.
    head = "What to write:" if any(known) else "What is at fault:"
    lines = [head] if known else []
    for code, said in known.items():
        # Each line a comment, so that all of it can be pasted.
        lines += [f"# {line}" for line in textwrap.wrap(said, 76)]
        lines += [code] * bool(code)
    return lines


def _plain(
    row: verdicts.LayerVerdict | float8_products.Float8Product,
) -> dict[str, Any]:
    values = dataclasses.asdict(row)
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[key] = None
    return values


def _picture(figure: Any) -> str:
    """Returns a figure as an address that holds all of it."""
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=110)
    data = base64.b64encode(written.getvalue()).decode("ascii")
    return f"data:image/png;base64,{data}"
