"""Searches for a policy that fixes a model: faulty layers in float32."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from tfmix import _messages, _progress
from tfmix.diagnostics import float8_products, probe, verdicts
from tfmix.policy import names as policy_names
from tfmix.policy import policy as policies


class Checked(Protocol):
    """The part of `NumericsReport` that the search needs."""

    @property
    def policy(self) -> policies.Policy:
        """The policy that was checked."""

    @property
    def targets(self) -> Mapping[str, probe.Target]:
        """The watched layers by name."""

    @property
    def sixteen_bit_layers(self) -> int:
        """The number of layers that computed in 16 bit."""

    @property
    def healthy(self) -> bool:
        """True if every row is fine."""

    @property
    def faults(self) -> tuple[verdicts.LayerVerdict, ...]:
        """The rows that are not fine."""

    @property
    def float8(self) -> tuple[float8_products.Float8Product, ...]:
        """The float8 products."""

    @property
    def again(self) -> Callable[[policies.Policy], "Checked"]:
        """Checks the same model and batch under another policy."""


def float32_layers(report: Checked, progress: bool) -> policies.Policy:
    """Does the work of `NumericsReport.suggested_policy`."""
    if not all(product.is_fine for product in report.float8):
        # Each product was judged by itself, so the other layers keep float8.
        report = report.again(_without_faulty_float8(report))
    if report.healthy:
        return report.policy
    if broken := [row.layer for row in report.faults if row.broken]:
        raise ValueError(
            "No dtype policy can fix this model: it is not finite in "
            f"float32 either, first at {broken[0]!r}. Look for NaN or "
            "infinity in the data and the weights."
        )
    searching = "Searching float32 layers"
    with _progress.shown(searching, hidden=not progress) as say:
        needed = _search(report, lambda: say(f"{searching}: trying more"))
    tried = _try(report, needed)
    if tried is not None and not tried.sixteen_bit_layers:
        is_float16 = report.policy.compute_dtype == "float16"
        _messages.warn(
            "nothing is left in 16 bit under the suggested policy; use %r.",
            "mixed_bfloat16" if is_float16 else "float32",
        )
    return with_layers(report, needed)


def with_layers(report: Checked, names: Iterable[str]) -> policies.Policy:
    """Returns a report's policy with more layers in float32."""
    base = report.policy
    before = base.float32_layers
    added = [re.escape(name) for name in names]
    return policies.Policy(
        base.level or base.name,
        float32_layers=[
            *before,
            *(pattern for pattern in added if pattern not in before),
        ],
        float32_ops=base.float32_ops,
        keep_batchnorm_fp32=base.keep_batchnorm_fp32,
        float8_layers=base.float8_layers,
    )


def in_float8(report: Checked) -> list[str]:
    """Returns patterns for the layers whose products are all fine."""
    paths = {product.layer for product in report.float8}
    faulty = {product.layer for product in report.float8 if not product.is_fine}
    return [re.escape(path) for path in sorted(paths - faulty)]


def _without_faulty_float8(report: Checked) -> policies.Policy:
    base, kept = report.policy, in_float8(report)
    return policies.Policy(
        policy_names.FLOAT8 if kept else "mixed_bfloat16",
        float32_layers=base.float32_layers,
        float32_ops=base.float32_ops,
        keep_batchnorm_fp32=base.keep_batchnorm_fp32,
        float8_layers=kept or None,
    )


def _try(report: Checked, names: Iterable[str]) -> Checked | None:
    """Checks with more layers in float32; None if the model fails to run."""
    try:
        return report.again(with_layers(report, names))
    except Exception:
        # A custom layer may add 16-bit inputs to the output of an inner float32
        # layer. Each backend raises another error for that.
        return None


def _search(report: Checked, step: Callable[[], None]) -> list[str]:
    """Adds faulty layers until the model is healthy."""
    names: dict[str, None] = {}
    # The first report may be about the model without the policy.
    current = _try(report, names)
    while current is None or not current.healthy:
        step()
        before = len(names)
        if current is not None:
            for row in current.faults:
                last = list(report.targets)[-1:]
                is_loss = row.layer == verdicts.LOSS
                added = last if is_loss else _with_inner(report, row.layer)
                names.update(dict.fromkeys(added))
        if len(names) == before:
            # No faulty layer is left to add, so all layers are added.
            names.update(dict.fromkeys(report.targets))
        if len(names) == before:
            break
        current = _try(report, names)
    return list(names)


def _with_inner(report: Checked, name: str) -> list[str]:
    """Returns a layer and its inner layers, which compute its tensors."""
    targets = report.targets.values()
    return [name, *(target.name for target in targets if name in target.inside)]
