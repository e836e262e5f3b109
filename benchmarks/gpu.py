"""Mixed precision on a GPU: whole training steps, and float8 products.

    python -m benchmarks.gpu [--part=models,products,tensorflow]
        [--models=NAME,...] [--minutes 8] [--into=FILE] [--at_once 4]
        [--dry_run] [--json] [--save=docs]

`models` trains the models of `gpu_models` with `fit`, under tfmix and under
Keras's own policies, and one of them in PyTorch and in plain JAX. `products`
compares single products in float8 with bfloat16. KERAS_BACKEND chooses the
backend. `tensorflow` writes TensorFlow's compiled steps beside FILE, where
TensorFlow is installed, and times them with JAX, which needs no TensorFlow: on
a GPU's machine without it, bring that folder along.

Each row has its own process; `--at_once` of them import and build while one
uses the GPU. Each row is written to FILE when it is done, and rows in FILE are
not measured again: the same command continues where a run ended. Rows are in
the order of their importance, and no row starts after `--minutes`.

Without a GPU nothing is measured; `--save` then keeps the rows of FILE, which
may come from another machine. `--dry_run` runs everything with tiny models on
any device; its figures mean nothing and are never saved.
"""

import concurrent.futures
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from absl import app, flags, logging

from benchmarks import answers, gpu_tensorflow, results

PARTS = ("models", "products", "tensorflow")
MODELS = ("llama", "vit", "transformer", "resnet50")
_BF16, _F16, _FLOAT8 = "mixed_bfloat16", "mixed_float16", "mixed_float8"
# Model, library, precision and optimizer, the most important first.
JOBS = (
    ("llama", "tfmix", _BF16, "adam"),
    ("llama", "tfmix", _FLOAT8, "adam"),
    ("vit", "tfmix", _BF16, "adam"),
    ("vit", "tfmix", _BF16, "LowMemoryOptimizer"),
    ("llama", "keras", _BF16, "adam"),
    ("llama", "keras", "float32", "adam"),
    ("llama", "tfmix", _BF16, "adam, unchecked"),
    ("llama", "keras", _FLOAT8, "adam"),
    ("products",),
    ("transformer", "tfmix", _BF16, "adam"),
    ("transformer", "keras", _BF16, "adam"),
    ("transformer", "keras", "float32", "adam"),
    ("transformer", "torch", _BF16, "adam"),
    ("transformer", "by hand", _BF16, "adam"),
    ("transformer", "tfmix", _F16, "adam"),
    ("transformer", "keras", _F16, "adam"),
    ("resnet50", "tfmix", _BF16, "adam"),
    ("resnet50", "keras", _BF16, "adam"),
    ("resnet50", "keras", "float32", "adam"),
    ("resnet50", "tfmix", _F16, "adam"),
    ("resnet50", "keras", _F16, "adam"),
    ("tensorflow", "llama"),
    ("tensorflow", "transformer"),
    ("tensorflow", "resnet50"),
)
DRY = "dry run, no figures"
_KEY = ("model", "library", "precision", "optimizer")
_HOW = (
    "each row is from a process of its own; median, least and most of five "
    "times twenty steps"
)
_MODELS_NOTE = (
    "Keras means its own policy, for float8 `quantize`; unchecked is "
    "Adam without a wrapper, set as `model.optimizer` after `compile`. "
    "PyTorch has autocast, `torch.compile` and fused Adam; by hand is plain "
    "JAX. The first step is timed from the call of `fit`."
)
_TENSORFLOW_NOTE = (
    "The program that TensorFlow compiles, run by JAX's client without `fit`; "
    "a model's rows take turns in one process. The memory is the compiler's "
    "plan."
)
_PRODUCTS_NOTE = (
    "Each with both gradients, rounding to float8 included, which in a model "
    "is in part done by kernels that run anyway."
)


class File:
    """Rows in a JSON file, written whenever one is added.

    Args:
        path: The path of the file.
        record: The origin of a new file's rows. Rows of another card are not
            added to a file.
    """

    def __init__(self, path: pathlib.Path, record: dict[str, Any]) -> None:
        self._path = path
        self._lock = threading.Lock()
        parts: dict[str, Any] = {part: [] for part in PARTS}
        self.record = {**parts, **(read(path) or record)}
        # This folder has TensorFlow's programs.
        self.programs = folder_of(path)
        here, there = origin(record), origin(self.record)
        if here != there:
            raise app.UsageError(
                f"{path} has rows of {there}, this is {here}: name another "
                "file by --into"
            )

    def rows(self, part: str, columns: Iterable[str]) -> list[tuple[Any, ...]]:
        """Returns some columns of the rows of a part."""
        return [tuple(map(row.get, columns)) for row in self.record[part]]

    def add(self, part: str, row: dict[str, Any]) -> None:
        """Adds a row and writes the whole file, or nothing."""
        with self._lock:
            self.record[part].append(row)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            written = self._path.with_suffix(".tmp")
            written.write_text(json.dumps(self.record, indent=1) + "\n")
            written.replace(self._path)


def folder_of(path: pathlib.Path) -> str:
    """Returns the folder of TensorFlow's programs for a file of rows."""
    return str(path.parent / "tensorflow-steps")


def origin(record: dict[str, Any]) -> str:
    """Returns the card and the backend of a record."""
    return f"{record['machine']['gpu']} under {record['backend']}"


def read(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns the rows of a file, `None` without a file."""
    return json.loads(path.read_text()) if path.exists() else None


def jobs(
    backend: str, parts: set[str], models: set[str]
) -> list[tuple[str, ...]]:
    """Returns the jobs of the chosen parts and models."""
    alone = {"by hand", "torch"}  # These are the same under any backend.
    if backend == "jax":
        alone -= {"by hand"}
        if importlib.util.find_spec("torch"):
            alone -= {"torch"}
    return [
        job
        for job in JOBS
        if (job[0] if job[0] in PARTS else "models") in parts
        and (job[0] == "products" or models & {*job})
        and not alone & {*job}
        and (job[0] not in PARTS or backend == "jax")
    ]


def answered(
    job: tuple[str, ...], file: File, words: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs a job in a process; yields the part and the row of each answer."""
    if job == ("products",):
        shapes = file.rows("products", ("rows", "k", "n"))
        words = [*words, *(",".join(map(str, shape)) for shape in shapes)]
        for row in answers.answers_of("benchmarks.gpu_products", *words):
            yield "products", row
    elif job[0] == "tensorflow":
        if job[1:] not in file.rows("tensorflow", ("model",)):
            words = ["time", job[1], file.programs, *words]
            for row in answers.answers_of("benchmarks.gpu_tensorflow", *words):
                yield "tensorflow", {"model": job[1], **row}
    elif job not in file.rows("models", _KEY):
        row = answers.answer_of("benchmarks.gpu_worker", *job, *words)
        if row is not None:
            yield "models", dict(zip(_KEY, job, strict=True)) | row


def measure(file: File, wanted: list[tuple[str, ...]]) -> list[str]:
    """Runs the jobs without rows in the file; returns failed ones."""
    until = time.time() + 60 * FLAGS.minutes
    failed = []

    def run(job: tuple[str, ...]) -> None:
        if time.time() > until:
            return
        words = [lock, str(until), "tiny" if FLAGS.dry_run else "full"]
        try:
            for part, row in answered(job, file, words):
                file.add(part, row)
                print(json.dumps(row), file=sys.stderr, flush=True)
        except RuntimeError as error:
            # The process has printed the reason; other jobs still run.
            logging.error("%s", error)
            failed.append(" ".join(job))

    with tempfile.TemporaryDirectory() as folder:
        lock = str(pathlib.Path(folder, "gpu.lock"))
        with concurrent.futures.ThreadPoolExecutor(FLAGS.at_once) as pool:
            list(pool.map(run, wanted))
    return failed


def write_programs(folder: str, wanted: list[tuple[str, ...]]) -> None:
    """Writes TensorFlow's programs of some jobs, if it is installed."""
    if not importlib.util.find_spec("tensorflow"):
        return
    size = "tiny" if FLAGS.dry_run else "full"
    for model in [job[1] for job in wanted if job[0] == "tensorflow"]:
        for row in gpu_tensorflow.STEPS[model]:
            answers.answer_of(
                "benchmarks.gpu_tensorflow",
                *("write", model, folder, *row, size),
                environment={"KERAS_BACKEND": "tensorflow"},
            )


def tables(record: dict[str, Any]) -> list[results.Table]:
    """Returns the tables of a file's rows, in the order of the jobs."""
    models = sorted(
        record["models"],
        key=lambda row: JOBS.index(tuple(map(row.get, _KEY))),
    )
    columns = ("precision", "library", "optimizer", "first step, s")
    columns += ("ms a step", "peak, GB")
    steps = [
        {"model, batch": row["title"], **_cells(row, columns)} for row in models
    ]
    found = [results.Table("Training steps", steps, _MODELS_NOTE)]
    if record.get("tensorflow"):
        columns = ("model", "precision", "library", "compiling, s")
        columns += ("ms a step", "memory, GB")
        steps = [_cells(row, columns) for row in record["tensorflow"]]
        title = "TensorFlow's training steps"
        found.append(results.Table(title, steps, _TENSORFLOW_NOTE))
    products: dict[str, dict[str, Any]] = {}
    for row in sorted(
        record["products"], key=lambda row: (row["k"], row["n"], row["rows"])
    ):
        name = f"{row['k']} x {row['n']}"
        cells = products.setdefault(name, {"weight": name})
        cells[f"{row['rows']} rows"] = row["ratio"]
    if products:
        title = "Single products: how many times as fast float8 is"
        found.append(
            results.Table(title, list(products.values()), _PRODUCTS_NOTE)
        )
    return found


def _cells(row: dict[str, Any], columns: tuple[str, ...]) -> dict[str, Any]:
    low, high = row["least ms"], row["most ms"]
    spread = {"median": row["ms"], "low": low, "high": high, "runs": 5}
    return {name: {"ms a step": spread, **row}[name] for name in columns}


def found_gpu() -> str | None:
    """Returns the GPU's name, from a process that then releases the GPU."""
    return answers.answer_of("benchmarks.gpu_worker", "device")


FLAGS = results.flag_values()
results.add_names(FLAGS, "part", PARTS, PARTS[:2], "which parts")
results.add_names(FLAGS, "models", MODELS, MODELS, "which models")
flags.DEFINE_float("minutes", 8, "after which no row begins", flag_values=FLAGS)
flags.DEFINE_integer(
    "at_once", 4, "processes", lower_bound=1, flag_values=FLAGS
)
flags.DEFINE_string(
    "into",
    None,
    "the JSON file of the rows; out/gpu-BACKEND.json if not given",
    flag_values=FLAGS,
)
flags.DEFINE_bool("dry_run", False, "tiny models, no GPU", flag_values=FLAGS)
flags.register_multi_flags_validator(
    ["dry_run", "save"],
    lambda asked: not (asked["dry_run"] and asked["save"]),
    "--dry_run measures nothing that could be saved",
    flag_values=FLAGS,
)


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints and saves the rows; returns 1 if one failed."""
    words = sys.argv[1:] if arguments is None else arguments
    results.parse(FLAGS, words)
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    with tempfile.TemporaryDirectory() as folder:
        default = folder if FLAGS.dry_run else "out"
        path = FLAGS.into or f"{default}/gpu-{backend}.json"
        return _run(pathlib.Path(path), words, backend)


def _run(path: pathlib.Path, words: list[str], backend: str) -> int:
    wanted = jobs(backend, {*FLAGS.part}, {*FLAGS.models})
    write_programs(folder_of(path), wanted)
    gpu = DRY if FLAGS.dry_run else found_gpu()
    failed = []
    if gpu is None:
        print(f"No GPU under {backend}: nothing is measured.")
        record = read(path)
        if record is None:
            print(f"{path} is not there: the last result is kept.")
            return 0
    else:
        run = results.Run("gpu", words, backend, _HOW)
        made = run.record([])
        made["machine"]["gpu"] = gpu
        file = File(path, made)
        failed = measure(file, wanted)
        record = file.record
    record = {k: v for k, v in record.items() if k not in PARTS} | {
        "tables": [vars(table) for table in tables(record)]
    }
    if FLAGS.save and record["machine"]["gpu"] == DRY:
        raise app.UsageError(f"{path} is of a dry run and is not saved")
    results.publish(record, FLAGS)
    for each in failed:
        logging.error("failed: %s", each)
    return int(bool(failed))


if __name__ == "__main__":
    results.start(main, FLAGS)
