"""What the scaler costs as the model grows, and as replicas do.

    python -m benchmarks.scale [--only NAME ...] [--runs 9] [--json] [--save]

Variables: 10 to 5,000 at a million parameters; parameters: 1e5 to 1e8 at a
hundred variables; replicas: `MirroredStrategy` over 1 to 8 logical CPUs.
Variables have shapes of a transformer, kernels of four sizes and biases; one
model has no two variables of one shape, which tfmix cannot join for the check.

The inner optimizer is SGD. The bare one, Keras's scaler around it and tfmix's
share the variables and take turns in one process. Operations are counted in
the traced graph with all its branches. Memory is how far the peak of the
resident set rises in a step, in a process of its own for each.
"""

import argparse
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import pairs, results, turns

SYSTEMS = ("bare", "Keras", "tfmix")
Row = dict[str, Any]
# Name: variables and parameters.
BY_VARIABLES = {
    "10": (10, 10**6),
    "100": (100, 10**6),
    "500": (500, 10**6),
    "5,000": (5000, 10**6),
}
BY_PARAMETERS = {
    "1e5": (100, 10**5),
    "1e6": (100, 10**6),
    "1e7": (100, 10**7),
    "1e8": (100, 10**8),
}
# The worst case for tfmix, which joins variables of one shape for its check.
DIFFERENT = "500, no two alike"
MEASURED_MEMORY = ("1e7", "1e8")
REPLICAS = (1, 2, 4, 8)
# Each replica is traced on its own: 8 times 50 variables, three times.
ON_REPLICAS = (50, 10**6)
PARTS = ("variables", "parameters", "replicas")
_NOTES = {
    "variables": "Operations are those of the whole step, its branches "
    "included; the first call is tracing and one step.",
    "parameters": "Peak: how far variables, gradients and a step raise the "
    "resident set.",
    "replicas": "Two cores compute all replicas, so each makes the step "
    "longer. Keras's scaler looks at the gradients of the first replica only, "
    "before the sum: its step costs less than a right one would.",
}


def system_rows(number: str, made: dict[str, Any], runs: int) -> list[Row]:
    """Times the systems in turn; returns a row for each."""
    from benchmarks import scale_steps

    times = scale_steps.times_in_turns(made, runs)
    bare = made["bare"]
    rows = []
    for system, step in made.items():
        is_bare = system == "bare"
        own, base = times[system], times["bare"]
        extra = results.spread(pairs.differences(own, base))
        ratio = results.spread(pairs.ratios(own, base))
        rows.append(
            {
                "number": number,
                "system": system,
                "step, ms": results.spread(own),
                "added, ms": None if is_bare else extra,
                "ratio": None if is_bare else ratio,
                "operations": step.operations,
                "added": None if is_bare else step.operations - bare.operations,
                "first call, s": step.first,
            }
        )
    return rows


def size_rows(sizes: dict[str, tuple[int, int]], runs: int) -> list[Row]:
    """Returns the rows for each size of a model."""
    from benchmarks import scale_steps

    found = []
    for name, size in sizes.items():
        made = scale_steps.prepared(scale_steps.shapes(*size))
        found += system_rows(name, made, runs)
    return found


def unlike_rows(runs: int) -> list[Row]:
    """Returns the rows of a model whose variables all differ in shape."""
    from benchmarks import scale_steps

    shapes = scale_steps.different_shapes(*BY_VARIABLES["500"])
    return system_rows(DIFFERENT, scale_steps.prepared(shapes), runs)


def replica_rows(replicas: int, runs: int) -> list[Row]:
    """Returns the rows of some replicas; once in a process."""
    from benchmarks import scale_steps

    strategy = scale_steps.strategy_of(replicas)
    shapes = scale_steps.shapes(*ON_REPLICAS)
    made = scale_steps.prepared(shapes, strategy=strategy)
    rows = system_rows(str(replicas), made, runs)
    # Each replica takes part in every exchange, so each has its node.
    return [
        row | {"all-reduces": made[row["system"]].collectives // replicas}
        for row in rows
    ]


def with_peak(row: Row) -> Row:
    """Adds how far a step raises the resident set, where that is asked."""
    peak = None
    if row["number"] in MEASURED_MEMORY:
        words = ("--peak", row["system"], row["number"])
        peak = turns.answer_of("benchmarks.scale", *words)
    return row | {"peak, MB": peak}


def table(part: str, runs: int) -> results.Table:
    """Measures one part; returns its table."""
    if part == "variables":
        rows = [*size_rows(BY_VARIABLES, runs), *unlike_rows(runs)]
        title = "Number of variables, 1e6 parameters in all"
    elif part == "parameters":
        rows = [with_peak(row) for row in size_rows(BY_PARAMETERS, runs)]
        title = "Number of parameters, in 100 variables"
    else:
        words = ("--runs", str(runs), "--replicas")
        rows = [
            row
            for number in REPLICAS
            for row in turns.answer_of("benchmarks.scale", *words, str(number))
        ]
        title = "Number of replicas (logical CPUs, MirroredStrategy), "
        title += f"{ON_REPLICAS[0]} variables, 1e6 parameters"
    return results.Table(title, rows, _NOTES[part])


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints and, if asked, keeps the tables."""
    words = sys.argv[1:] if arguments is None else arguments
    options = _parse(words)
    if options.peak:
        from benchmarks import scale_steps

        system, name = options.peak
        shapes = scale_steps.shapes(*BY_PARAMETERS[name])
        turns.answer(scale_steps.peak_mb(system, shapes))
        return
    if options.replicas:
        turns.answer(replica_rows(options.replicas, options.runs))
        return
    how = f"no randomness; median and extremes of {options.runs} turns"
    run = results.Run("scale", words, "tensorflow", how)
    tables = [table(part, options.runs) for part in options.only]
    results.publish(run.record(tables), options)


def _parse(words: list[str]) -> argparse.Namespace:
    parser = results.parser("scale", __doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--runs", type=int, default=9)
    # What the processes that this one starts are told.
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--replicas", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
