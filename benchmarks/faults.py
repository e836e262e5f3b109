"""Compares how runs survive faults under Keras's loss scaler and tfmix's.

python -m benchmarks.faults [--only=NAME,...] [--systems=NAME,...] [--json]
                             [--save=docs]

`--systems=masters,flat,split,stochastic` shows pure 16-bit variables.
KERAS_BACKEND=jax runs the rows that do not need `tf.distribute`.

Every outcome is computed from this run. The exit status is 1 if any system but
Keras's does not survive a row.
"""

import os
import sys
from collections.abc import Mapping, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from absl import flags, logging

from benchmarks import results
from benchmarks.fault_cases import catalogue, resumable, systems
from benchmarks.fault_cases.record import Fault, Outcome

Outcomes = Mapping[tuple[str, str], Outcome]


def run_all(
    faults: Sequence[Fault], columns: Sequence[systems.System]
) -> Outcomes:
    """Runs every fault under every system that it applies to.

    Returns:
        Outcomes by fault name and system name.
    """
    outcomes = {}
    for fault in faults:
        for system in columns:
            if fault.name not in system.inapplicable:
                outcome = fault.run(systems.by_name(system.name))
                outcomes[fault.name, system.name] = outcome
                logging.info("%s, %s: %s", fault.name, system.name, outcome)
    return outcomes


def table(
    faults: Sequence[Fault],
    columns: Sequence[systems.System],
    outcomes: Outcomes,
) -> results.Table:
    """Returns one row per fault and one column per system."""

    def cell(fault: Fault, system: systems.System) -> str:
        if fault.name in system.inapplicable:
            return f"does not apply: {system.inapplicable[fault.name]}"
        return str(outcomes[fault.name, system.name])

    rows = [
        {"fault": fault.title, "name": fault.name}
        | {system.name: cell(fault, system) for system in columns}
        for fault in faults
    ]
    return results.Table(f"{len(faults)} faults", rows)


def survived_table(
    columns: Sequence[systems.System], outcomes: Outcomes
) -> results.Table:
    """Returns how many faults each system survives."""
    rows = []
    for system in columns:
        own = [o for (_, name), o in outcomes.items() if name == system.name]
        survived = sum(outcome.survived for outcome in own)
        rows.append(
            {"library": system.name, "faults": len(own), "survived": survived}
        )
    return results.Table("Survived", rows)


FLAGS = results.flag_values()
results.add_names(
    FLAGS,
    "systems",
    systems.ALL,
    [each.name for each in systems.SYSTEMS],
    "what to compare",
)
flags.DEFINE_list("only", [], "names of faults", flag_values=FLAGS)


def main(arguments: list[str] | None = None) -> int:
    """Parses, runs, prints; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    run = results.Run("faults", words, keras.backend.backend())
    results.parse(FLAGS, words)
    faults = [catalogue.by_name(name) for name in FLAGS.only]
    faults = faults or catalogue.on_this_backend()
    columns = [systems.by_name(name) for name in FLAGS.systems]
    outcomes = run_all(faults, columns)
    survived = survived_table(columns, outcomes)
    results.publish(
        run.record([table(faults, columns, outcomes), survived]), FLAGS
    )
    return int(
        any(
            row["survived"] < row["faults"]
            for row in survived.rows
            if row["library"] != systems.Keras.name
        )
    )


if __name__ == "__main__":
    resumable.split_the_cpu(2)
    results.start(main, FLAGS)
