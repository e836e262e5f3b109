"""Which benchmarks there are, in the order of the page."""

import dataclasses
import os

TENSORFLOW, JAX = "tensorflow", "jax"


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One benchmark, run as `python -m benchmarks.NAME`.

    Attributes:
        name: The module's name.
        title: The heading on the page.
        about: What is measured and how to read it, as Markdown.
        backends: Keras backends it is run under; empty where it starts
            processes of its own for each.
        minutes: What it takes on two cores, roughly, per backend.
        missing: What the page says while there is no result.
    """

    name: str
    title: str
    about: str
    backends: tuple[str, ...] = ()
    minutes: float = 1.0
    missing: str = "Not measured yet."


BENCHMARKS = (
    Benchmark(
        "overhead",
        "What loss scaling adds to an optimizer step",
        "The bare optimizer, Keras's scaler and tfmix's in turns: steps on "
        "variables only, time to the first step, sparse gradients, memory.",
        (TENSORFLOW, JAX),
        minutes=10,
    ),
    Benchmark(
        "scale",
        "Cost as the model and the replicas grow",
        "SGD, the cheapest optimizer there is, so that a ratio is the worst "
        "case; milliseconds are the scaler's own. What follows for thousands "
        "of replicas is in [How it works](how-it-works.md#at-scale).",
        (TENSORFLOW,),
        minutes=5,
    ),
    Benchmark(
        "peers",
        "Next to other libraries",
        "The same Adam step in processes that take turns. Overhead is what a "
        "scaler adds to the bare optimizer *of its own stack*: stacks differ "
        "in how fast Adam itself is.",
        minutes=4,
    ),
    Benchmark(
        "sparse_memory",
        "Sparse gradients",
        "Plain SGD on an embedding table: Keras's check makes the gradient "
        "dense, tfmix's does not.",
        (TENSORFLOW,),
        minutes=2,
    ),
    Benchmark(
        "monitors",
        "What the monitors cost",
        "`fit` with the callback over `fit` without it.",
        (TENSORFLOW, JAX),
        minutes=3,
    ),
    Benchmark(
        "master",
        "Pure 16 bit",
        "What each way to keep the bits that 16-bit variables lose costs and "
        "gives. Explained in [Pure 16 bit](pure-16-bit.md).",
        (TENSORFLOW,),
        minutes=10,
    ),
    Benchmark(
        "low_memory",
        "Optimizer state in 8 bits",
        "The same training with an optimizer's state in float32 and, all of "
        "them, in 8 bits. Noise is the deviation of the seeds in float32. "
        "Explained in [Pure 16 bit](pure-16-bit.md#optimizer-state-in-8-bits).",
        (JAX,),
        minutes=30,
    ),
    Benchmark(
        "faults",
        "What a fault does to a run",
        "Faults provoked on purpose. A run survives when its weights, its "
        "statistics and its scale are what the next good step needs.",
        (TENSORFLOW, JAX),
        minutes=8,
    ),
    Benchmark(
        "wild",
        "Scripts with one line on top",
        "The scripts of `tests/wild`, written as people write them, after the "
        "one line of each library. That their losses end where float32's do "
        "is tested there.",
        (TENSORFLOW, JAX),
        minutes=3,
    ),
    Benchmark(
        "layers",
        "Every layer in 16 bit",
        "Largest error against float32, forward and backward, in units of "
        "the format's epsilon. Only what is out of line is listed; what stays "
        "so under tfmix, and why, is in "
        "[What stays float32](what-stays-float32.md).",
        (TENSORFLOW, JAX),
        minutes=10,
    ),
    Benchmark(
        "compiled",
        "What accelerators run",
        "Programs of XLA's own compilers, for accelerators that were not "
        "there: nothing is timed. Kernels are launches, bytes what they read "
        "and write. An optimizer's step is given gradients in bfloat16 and "
        "casts them, as a mixed-precision backward pass does. GB accessed is "
        "a TPU's compiler's own count, which includes what stays on the chip. "
        "What that tells and what not is in "
        "[On hardware you do not have](hardware-you-do-not-have.md).",
        (TENSORFLOW, JAX),
        minutes=30,
        missing="Not compiled yet: `make targets`, then `python -m "
        "benchmarks.compiled --save` with `.venv-targets/bin/python`.",
    ),
    Benchmark(
        "float8",
        "float8 and its scales",
        "A step of the transformer with the scales of tfmix and with those "
        "that are known before, as an H200's compiler makes it. Explained in "
        "[float8](float8.md).",
        (TENSORFLOW, JAX),
        minutes=4,
        missing="Not compiled yet: `make targets`, then `python -m "
        "benchmarks.float8 --save` with `.venv-targets/bin/python`.",
    ),
    Benchmark(
        "gpu",
        "On a GPU",
        "Whole training steps with `fit`. The share is of the 16-bit matrix "
        "product rate measured on the same device in the same run.",
        (JAX, TENSORFLOW),
        minutes=20,
        missing="None has been measured yet: no GPU was at hand when the "
        "other tables were. `KERAS_BACKEND=jax python -m benchmarks.gpu "
        "--save` on a machine with one fills this section; without one it "
        "keeps the last table, with its date and machine.",
    ),
)


def by_name(name: str) -> Benchmark:
    """Returns the benchmark of a name.

    Raises:
        ValueError: If there is none.
    """
    for benchmark in BENCHMARKS:
        if benchmark.name == name:
            return benchmark
    known = ", ".join(each.name for each in BENCHMARKS)
    raise ValueError(f"There is no benchmark {name!r}. There are: {known}.")


def commands(name: str) -> list[tuple[str, dict[str, str]]]:
    """Returns the backends of a benchmark, each with its environment.

    The backend that is set for this process is the only one if there is one.
    """
    backends = by_name(name).backends
    chosen = os.environ.get("KERAS_BACKEND")
    if chosen in backends:
        backends = (chosen,)
    if not backends:
        return [("", {})]
    return [(backend, {"KERAS_BACKEND": backend}) for backend in backends]
