"""Lists the benchmarks, in the order of the page."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

TENSORFLOW, JAX = "tensorflow", "jax"


@dataclasses.dataclass(frozen=True)
class Quote:
    """A table of a record, of which the page shows some columns and rows.

    Attributes:
        backend: The backend of the record.
        table: The title of the table.
        columns: The names of the columns, in order; `()` for all.
        where: Column names to the values that a row must have to be quoted.
        only_note: Whether to show the note of the table and no row.
    """

    backend: str
    table: str
    columns: Sequence[str] = ()
    where: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    only_note: bool = False


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One benchmark, run as `python -m benchmarks.NAME`.

    Attributes:
        name: The module's name.
        title: The heading on the page.
        about: Explanation of the measurement, as Markdown.
        backends: The Keras backends to run it under.
        quotes: The tables that the page shows; `None` for all.
        unquoted: The titles of tables that the page never shows.
        on_page: Whether the page has a section for it; if not, there is only
            its record.
    """

    name: str
    title: str
    about: str
    backends: tuple[str, ...]
    quotes: tuple[Quote, ...] | None = ()
    unquoted: tuple[str, ...] = ()
    on_page: bool = True


# The others are levels, and models that were converted.
_EXAMPLES = (
    *("three_lines", "languages", "float8", "fine_tuning, R2"),
    *("gan, drawings recognised", "diffusion, drawings recognised"),
    *("many_devices", "many_devices, jax", "many_workers", "tpu"),
)
# The least and the most of each column are among them.
_WITHOUT_XLA = (
    *("three Dense", "the same on two replicas", "three Conv2D", "two LSTM"),
    *("ConvLSTM2D", "Embedding", "MultiHeadAttention"),
)

BENCHMARKS = (
    Benchmark(
        "gpu",
        "On a GPU",
        "Whole training steps with `model.fit`. TensorFlow was not timed. The "
        "record also has single products in [float8](float8.md#which-layers).",
        (JAX, TENSORFLOW),
        None,
        ("Single products: how many times as fast float8 is",),
    ),
    Benchmark(
        "recipes",
        "Examples against float32",
        "The scripts of `examples/`, trained in float32 and in 16 bit from the "
        "same three seeds: mean, lowest and highest test accuracy in percent, "
        "or what is named. `many_devices` and `many_workers` also skip one bad "
        "step in each epoch.",
        (TENSORFLOW,),
        (
            Quote(
                TENSORFLOW,
                "Examples in 16 bit",
                where={"script": _EXAMPLES},
            ),
        ),
    ),
    Benchmark(
        "real_data",
        "Real data",
        "Small networks on data that come with packages, trained from three "
        "seeds: mean and standard deviation of the score on test data (of the "
        "graph, on all members). The record has the epochs until the target, "
        "and bfloat16. "
        'Outputs are float32, as in Keras\'s guide. "Worse" means that the '
        "best seed is worse than the worst of float32.",
        (TENSORFLOW,),
        (
            Quote(
                TENSORFLOW,
                "10 tasks on real data",
                (
                    *("task", "data", "score (target)", "float32"),
                    *("Keras, float16", "tfmix, float16"),
                ),
            ),
        ),
    ),
    Benchmark(
        "wild",
        "Scripts with one changed line",
        "The scripts of `tests/wild`: examples of Keras, research code, layers "
        "with fixed dtypes, chosen because something in them is hard in 16 "
        "bit. A script trains if all losses are finite, and the last ones are "
        "within the range of three float32 runs and as much around it.",
        (TENSORFLOW,),
        (Quote(TENSORFLOW, "Scripts with one line on top, mixed_float16"),),
    ),
    Benchmark(
        "pretrained",
        "Networks with their weights",
        "",
        (TENSORFLOW,),
        on_page=False,
    ),
    Benchmark(
        "faults",
        "Faults",
        "Each case provokes one fault: a NaN on one replica, a loss scale of "
        "0, a killed process. A run survives if its weights, statistics and "
        "loss scale end as they do without the fault. Where they do not, an "
        "error or a warning may say so, which counts apart.",
        (TENSORFLOW,),
        (Quote(TENSORFLOW, "Survived"),),
    ),
    Benchmark(
        "low_memory", "Optimizer state in 8 bits", "", (JAX,), on_page=False
    ),
    Benchmark("master", "16-bit weights", "", (TENSORFLOW,), on_page=False),
    Benchmark(
        "overhead",
        "The optimizer step on a CPU",
        "",
        (TENSORFLOW, JAX),
        on_page=False,
    ),
    Benchmark("first_use", "The first use", "", (JAX,), on_page=False),
    Benchmark(
        "graph",
        "TensorFlow without XLA",
        "What one step runs on a GPU in TensorFlow's kernels, over Keras's "
        "own policy: the time of products at a T4's peaks, bytes, kernels. "
        "Counted, not timed. A loop counts for each of its steps; an `LSTM` "
        "or `GRU` runs one only where cuDNN does not take it.",
        (TENSORFLOW,),
        (
            Quote(
                TENSORFLOW,
                "A step without XLA: mixed_float16",
                where={"model": _WITHOUT_XLA},
            ),
        ),
    ),
    Benchmark(
        "sparse_memory", "Sparse gradients", "", (TENSORFLOW,), on_page=False
    ),
    Benchmark("monitors", "Monitors", "", (TENSORFLOW,), on_page=False),
    Benchmark(
        "compiled",
        "Compiled for an H200",
        "",
        (TENSORFLOW, JAX),
        on_page=False,
    ),
    Benchmark("float8", "Scales in float8", "", (JAX,), on_page=False),
    Benchmark(
        "layers",
        "Every layer and op",
        "Every layer and activation of Keras, forward and backward, in float16 "
        "and bfloat16, on inputs that are standard normal, scaled by 200 or "
        "offset by 100, against float32. The error is `max|a - b| / max|b|`. A "
        "layer is out of line beyond 16 [epsilons](glossary.md) in float16 and "
        "8 in bfloat16. [What stays "
        "float32](what-stays-float32.md#still-out-of-line) has the reasons.",
        (TENSORFLOW, JAX),
        (
            Quote(TENSORFLOW, "Out of line", only_note=True),
            Quote(JAX, "Out of line", only_note=True),
        ),
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

    If a backend is set for this process, it is the only one.
    """
    backends = by_name(name).backends
    chosen = os.environ.get("KERAS_BACKEND")
    if chosen in backends:
        backends = (chosen,)
    return [(backend, {"KERAS_BACKEND": backend}) for backend in backends]
