"""Runs the scripts of `examples/` from several seeds, and in float32.

A script runs in its own process and folder; only its constants are changed.
`python -m benchmarks.recipes` prints the scores.
"""

import ast
import dataclasses
import os
import tempfile
from typing import Any

from tests import processes
from tests.tree import ROOT

EXAMPLES = ROOT / "examples"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The variants of a script, and the score that it promises.

    Attributes:
        script: The script's name.
        variants: Constants by the name of a variant; the first is float32.
        least: The lowest allowed score of a run.
        score: The name of the score in the script, between 0 and 1.
        shown: Further values, as expressions in the script's names.
        backend: The Keras backend.
        workers: The number of processes that train together; 0 means no
            cluster.
    """

    script: str
    variants: dict[str, dict[str, Any]]
    least: float
    score: str = "accuracy"
    shown: dict[str, str] = dataclasses.field(default_factory=dict)
    backend: str = "tensorflow"
    workers: int = 0


def _policies(*names: str, constant: str = "POLICY") -> dict[str, Any]:
    return {name: {constant: name} for name in ("float32", *names)}


_HALF = _policies("mixed_float16")
_LOST = {"batches lost": "int(lost)"}
_SKIPPED = {"steps skipped": "skipped"}
COMPARISONS = {
    "three_lines": Comparison(
        "three_lines", _policies("mixed_float16", "mixed_bfloat16"), 0.9
    ),
    "levels": Comparison(
        "levels",
        {name: {"LEVEL": name} for name in ("O0", "O1", "O2", "O3")},
        0.9,
        shown={
            "float32 layers": "sum(layer.compute_dtype == 'float32' "
            "for layer in model.layers)",
            "weights": "model.layers[1].kernel.dtype",
        },
    ),
    "lenet": Comparison(
        "lenet",
        _policies("mixed_float16", constant="BODY"),
        0.9,
        shown={"final scale": "optimizer.loss_scale"},
    ),
    "languages": Comparison("languages", _HALF, 0.7),
    "float8": Comparison(
        "float8",
        {**_policies("mixed_bfloat16"), "mixed_float8": {}},
        0.85,
        shown={"check": "report.title.partition(': ')[2]"},
    ),
    "fine_tuning": Comparison(
        "fine_tuning",
        {
            "float32": {"POLICY": "float32"},
            "float16, scale 128": {},
            "float16, no scale": {"SCALE": 1.0},
        },
        0.75,
        score="r_squared",
    ),
    "one_call": Comparison("one_call", _HALF, 0.93),
    "training_loop": Comparison(
        "training_loop",
        {
            "float32": {"POLICY": "float32"},
            "fixed scale": {"LOSS_SCALE": 8.0},
            "dynamic scale": {},
        },
        0.93,
        shown=_LOST,
    ),
    "training_loop_jax": Comparison(
        "training_loop_jax", _HALF, 0.93, shown=_LOST, backend="jax"
    ),
    "updater": Comparison("updater", _HALF, 0.93, shown=_LOST),
    "gan": Comparison("gan", _HALF, 0.8),
    "diffusion": Comparison("diffusion", _HALF, 0.65),
    "many_devices": Comparison("many_devices", _HALF, 0.85, shown=_SKIPPED),
    "many_devices, jax": Comparison(
        "many_devices", _HALF, 0.85, shown=_SKIPPED, backend="jax"
    ),
    "many_workers": Comparison(
        "many_workers", _HALF, 0.8, shown=_SKIPPED, workers=2
    ),
    "tpu": Comparison(
        "tpu",
        _policies("mixed_bfloat16"),
        0.93,
        shown={"devices": "devices"},
        backend="jax",
    ),
}


def with_constants(source: str, constants: dict[str, Any]) -> str:
    """Returns a script with other values for its top-level constants."""
    tree, left = ast.parse(source), dict(constants)
    for node in tree.body:
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            if isinstance(target, ast.Name) and target.id in left:
                value = repr(left.pop(target.id))
                node.value = ast.parse(value, mode="eval").body
    if left:
        raise ValueError(f"The script sets no {sorted(left)} to a value.")
    return ast.unparse(tree)


def run(
    comparison: Comparison, constants: dict[str, Any], folder: str
) -> list[dict[str, Any]]:
    """Runs a script in a folder; returns the results of each process."""
    source = (EXAMPLES / f"{comparison.script}.py").read_text("utf-8")
    wanted = {"score": f"float({comparison.score})", **comparison.shown}
    values = ", ".join(f"{name!r}: {how}" for name, how in wanted.items())
    source = with_constants(source, constants)
    source += f"\nimport json\nprint('RESULT', json.dumps({{{values}}}))\n"
    path = os.path.join(folder, f"{comparison.script}.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(source)
    return processes.results(
        path,
        workers=comparison.workers,
        cwd=folder,
        KERAS_BACKEND=comparison.backend,
        TF_CPP_MIN_LOG_LEVEL="3",
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )


def run_all(
    comparison: Comparison, seeds: int = 3, **constants: Any
) -> dict[str, list[dict[str, Any]]]:
    """Runs every variant from every seed; returns the first process's runs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, own in comparison.variants.items():
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                given = {**own, **constants, "SEED": seed}
                result, *others = run(comparison, given, folder)
            if any(other != result for other in others):
                raise RuntimeError(f"Workers differ: {result}, {others}")
            found.setdefault(name, []).append(result)
    return found


def scores(runs: list[dict[str, Any]]) -> list[float]:
    """Returns the scores of a variant's runs, in percent."""
    return [100 * run["score"] for run in runs]


def gap(own: list[float], baseline: list[float]) -> tuple[float, float]:
    """Returns the distance of the means, and the noise of the seeds.

    The noise is the larger range from the worst to the best seed. (For three
    seeds this is 1.7 standard deviations on average. The difference of two
    such means has 0.8.)
    """
    distance = sum(own) / len(own) - sum(baseline) / len(baseline)
    return distance, max(max(s) - min(s) for s in (own, baseline))
