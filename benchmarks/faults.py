"""Compares how runs survive faults under Keras's loss scaler and tfmix's.

python -m benchmarks.faults [--only=NAME,...] [--json] [--save=docs]

KERAS_BACKEND=jax runs the rows that do not need `tf.distribute`.

Every outcome is computed from this run. A fault is survived if training ends
as without it. If an error or a warning names the cause instead, it counts
apart.
The exit status is 1 if tfmix loses a row and nothing says so.
"""

from collections.abc import Mapping, Sequence

from absl import flags, logging

from benchmarks import results
from benchmarks.fault_cases import catalogue, resumable, systems
from benchmarks.fault_cases.record import Fault, Outcome

# The keys are the names of a fault and of a library.
Outcomes = Mapping[tuple[str, str], Outcome]


def run_all(faults: Sequence[Fault]) -> Outcomes:
    """Runs every fault under both libraries."""
    outcomes = {}
    for fault in faults:
        for library in systems.LIBRARIES:
            outcome = fault.run(systems.by_name(library))
            outcomes[fault.name, library] = outcome
            logging.info("%s, %s: %s", fault.name, library, outcome)
    return outcomes


def tables(faults: Sequence[Fault], outcomes: Outcomes) -> list[results.Table]:
    """Returns one row per fault, then how many each library survives.

    The rest is lost, some of it with an error or a warning that says why.
    """
    rows = [
        {"fault": fault.title, "name": fault.name}
        | {one: str(outcomes[fault.name, one]) for one in systems.LIBRARIES}
        for fault in faults
    ]
    counts = [
        {
            "library": library,
            "faults": len(faults),
            "survived": _count(faults, outcomes, library, "survives"),
            "lost, but says so": _count(faults, outcomes, library, "says so"),
        }
        for library in systems.LIBRARIES
    ]
    return [
        results.Table(f"{len(faults)} faults", rows),
        results.Table("Survived", counts),
    ]


def _count(
    faults: Sequence[Fault], outcomes: Outcomes, library: str, word: str
) -> int:
    return sum(outcomes[fault.name, library].word == word for fault in faults)


FLAGS = results.flag_values()
flags.DEFINE_list("only", [], "names of faults", flag_values=FLAGS)


def main(words: list[str] | None = None) -> int:
    """Parses, runs, prints; returns the exit status."""
    results.parse(FLAGS, words)
    faults = [catalogue.by_name(name) for name in FLAGS.only]
    faults = faults or catalogue.on_this_backend()
    _, survived = results.measure(
        "faults", FLAGS, lambda: tables(faults, run_all(faults)), words=words
    )
    ours = survived.rows[-1]
    return int(ours["survived"] + ours["lost, but says so"] < len(faults))


if __name__ == "__main__":
    resumable.split_the_cpu(2)
    results.start(main, FLAGS)
