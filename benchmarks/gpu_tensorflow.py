"""Times TensorFlow's compiled steps where there is JAX and no TensorFlow.

    python -m benchmarks.gpu_tensorflow write MODEL FOLDER LIBRARY PRECISION \
        full|tiny
    python -m benchmarks.gpu_tensorflow time MODEL FOLDER LOCK UNTIL full|tiny

`write` traces `train_step` under TensorFlow, for an NVIDIA GPU, and writes a
StableHLO program of some kilobytes for each of `STEPS`. `time` compiles those
of a model by JAX's client and runs them in turns under the file lock. As under
TensorFlow, a step overwrites the weights. Inputs are zeros, because a step's
time does not depend on them.
"""

import contextlib
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import answers, gpu_worker

_ALL = [
    ("keras", "float32"),
    ("keras", "mixed_bfloat16"),
    ("tfmix", "mixed_bfloat16"),
    ("keras", "mixed_float16"),
    ("tfmix", "mixed_float16"),
]
# The libraries and precisions of each model.
STEPS = {
    "llama": [*_ALL[:3], ("tfmix", "mixed_float8")],
    "transformer": _ALL,
    "resnet50": _ALL,
}
# The names of StableHLO's types without their bits.
_KINDS = {"f": "float", "bf": "bfloat", "i": "int", "ui": "uint"}


def path_of(
    folder: str, size: str, model: str, library: str, precision: str
) -> pathlib.Path:
    """Returns the path of a program."""
    return pathlib.Path(folder, f"{size}-{model}-{library}-{precision}.mlir")


def write(model: str, library: str, precision: str, size: str) -> bytes:
    """Returns the program of a model's training step."""
    import tensorflow as tf

    session = gpu_worker.KerasSession(
        model, library, precision, "adam", size == "tiny"
    )
    trained, batch = session.model, session.batch
    trained.optimizer.build(trained.trainable_variables)
    trained._symbolic_build(data_batch=[leaf[:1] for leaf in batch])
    step = tf.function(
        lambda x, y: trained.train_step((x, y)),
        jit_compile=True,
        autograph=False,
    )
    specs = [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in batch]
    with _for_gpu(library):
        lowered = step.experimental_get_compiler_ir(*specs)
        program: bytes = lowered(stage="stablehlo_serialized")
    return program


def _for_gpu(library: str) -> contextlib.AbstractContextManager[None]:
    """Makes tfmix trace for an NVIDIA GPU, which need not be here."""
    if library != "tfmix":
        return contextlib.nullcontext()
    from tfmix._keras import context

    return context.compiled_for("cuda")


class Program:
    """A program, compiled for JAX's first device."""

    def __init__(self, path: pathlib.Path) -> None:
        import jax
        from jax._src.interpreters import mlir
        from jax._src.lib import xla_client
        from jaxlib.mlir import ir

        from benchmarks import compiled_tensorflow

        # The iterations are a 64-bit integer.
        jax.config.update("jax_enable_x64", True)
        (self._device, *_) = jax.devices()
        with mlir.make_ir_context():
            module = xla_client._xla.mlir.deserialize_portable_artifact(
                path.read_bytes()
            )
            # TensorFlow's translation leaves products that are none.
            module = ir.Module.parse(
                compiled_tensorflow.in_stablehlo(str(module))
            )
            main = next(
                operation
                for operation in module.body.operations
                if "main" in str(operation.attributes["sym_name"])
            )
            self._types = [str(each) for each in main.type.inputs]
            self.aliases = _aliases(module.operation.attributes)
            begun = time.perf_counter()
            self._run = self._device.client.compile_and_load(
                module,
                xla_client.DeviceList((self._device,)),
                xla_client.CompileOptions(),
            )
        self.compiled = time.perf_counter() - begun

    def memory(self) -> int:
        """Returns the bytes that the compiler plans for a step."""
        stats = self._run.get_compiled_memory_stats()
        return int(
            stats.argument_size_in_bytes
            + stats.output_size_in_bytes
            - stats.alias_size_in_bytes
            + stats.temp_size_in_bytes
        )

    def milliseconds(self, steps: int) -> float:
        """Returns the time of a step, the mean of some."""
        # All programs' weights together may exceed the device's memory.
        given = [self._zeros(each) for each in self._types]
        self._steps(given, 2)
        start = time.perf_counter()
        self._steps(given, steps)
        return 1e3 * (time.perf_counter() - start) / steps

    def _steps(self, given: list[Any], steps: int) -> None:
        for _ in range(steps):
            results = self._run.execute_sharded(given)
            arrays = results.disassemble_into_single_device_arrays()
            outputs = [array for (array,) in arrays]
            for parameter, output in self.aliases:
                given[parameter] = outputs[output]
        outputs[0].block_until_ready()

    def _zeros(self, tensor: str) -> Any:
        import jax

        name = tensor.removeprefix("tensor<").removesuffix(">")
        *sizes, dtype = name.split("x")
        kind = dtype.rstrip("0123456789")
        named = _KINDS[kind] + dtype.removeprefix(kind)
        named = "bool" if named == "int1" else named
        zeros = jax.numpy.zeros(list(map(int, sizes)), named)
        return jax.device_put(zeros, self._device)


def _aliases(attributes: Any) -> list[tuple[int, int]]:
    """Returns pairs of a parameter and the output that overwrites it."""
    name = "mhlo.input_output_alias"
    text = str(attributes[name]) if name in attributes else ""
    # An empty array is the index of the only output.
    found = re.findall(
        r"parameter_number = (\d+)[^}]*\}, output_index = "
        r"array<i64(?:: (\d+))?>",
        text,
    )
    return [(int(given), int(made or 0)) for given, made in found]


def measured(
    programs: dict[tuple[str, str], Program], steps: int
) -> Iterator[dict[str, Any]]:
    """Runs programs in turns; yields a row for each."""
    times: dict[tuple[str, str], list[float]] = {row: [] for row in programs}
    for _ in range(gpu_worker.RUNS):
        for row, program in programs.items():
            times[row].append(program.milliseconds(steps))
    for (library, precision), program in programs.items():
        took = times[library, precision]
        yield {
            "library": library,
            "precision": precision,
            "compiling, s": round(program.compiled, 1),
            "ms": round(statistics.median(took), 3),
            "least ms": round(min(took), 3),
            "most ms": round(max(took), 3),
            "memory, GB": round(program.memory() / 1e9, 2),
        }


def main() -> None:
    """Writes a program, or answers with a row for each that was written."""
    command, model, folder, *rest, size = sys.argv[1:]
    if command == "write":
        library, precision = rest
        path = path_of(folder, size, model, library, precision)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(write(model, library, precision, size))
        answers.answer(str(path))
        return
    lock, until = rest
    steps = gpu_worker.TINY_STEPS if size == "tiny" else gpu_worker.STEPS
    with gpu_worker.alone(lock):
        if time.time() > float(until):
            return
        programs = {
            row: Program(path)
            for row in STEPS[model]
            if (path := path_of(folder, size, model, *row)).exists()
        }
        for row in measured(programs, steps):
            answers.answer(row)


if __name__ == "__main__":
    main()
