"""Compares the memory of the recipe for 16 GB with Keras's, on a T4.

    KERAS_BACKEND=jax .venv-targets/bin/python -m \\
        tests.ecosystem.sixteen_gigabytes

It needs JAX, XLA's compiler for NVIDIA (`make targets`) and KerasHub. Keras's
program may need more memory than this machine has, so it only uses shapes, and
no variable gets a value.
"""

import dataclasses

import keras

import tfmix
from tests.project import test_docs
from tfmix.tools.hardware import compiled_step, compilers, compiling, lowering
from tfmix.tools.hardware import target as targets

PAGE = test_docs.DOCS / "recipes" / "sixteen-gigabytes.md"
# These are the sizes of KerasHub's preset `gemma_2b_en`.
GEMMA_2B = {
    "vocabulary_size": 256000,
    "num_layers": 18,
    "num_query_heads": 8,
    "num_key_value_heads": 1,
    "hidden_dim": 2048,
    "intermediate_dim": 32768,
    "head_dim": 256,
}
ROWS, LENGTH = 8, 512


def recipe():
    """Runs the page; returns its names."""
    text = PAGE.read_text(encoding="utf-8").replace("```py\n", "```python\n")
    return test_docs.run_page(text, str(PAGE))


def kerass(sizes, length):
    """Returns the same network for Keras, which trains all of it in float32."""
    import keras_hub

    backbone = keras_hub.models.GemmaBackbone(**sizes)
    inputs = {
        name: keras.Input((length,), dtype="int32", name=name)
        for name in backbone.input
    }
    x = keras.layers.GlobalAveragePooling1D()(backbone(inputs))
    return keras.Model(inputs, keras.layers.Dense(2)(x))


def counted(
    make, optimizer, loss, target="t4", rows=ROWS
) -> compiled_step.CompiledStep:
    """Compiles the training step of a model whose variables have no values."""
    with keras.StatelessScope(initialize_variables=False):
        model = make()
    model.compile(optimizer, loss=loss)
    accelerator = targets.find(target)
    device = compilers.device(accelerator)
    with keras.StatelessScope(initialize_variables=False):
        compiled = lowering.compile_training_step(model, rows, device)
        return compiling.record(compiled, model, accelerator, rows, "step")


def both(sizes, rows=ROWS, length=LENGTH):
    """Returns the steps of Keras and of the recipe on a T4."""
    names = recipe()
    return {
        "Keras": counted(
            lambda: kerass(sizes, length),
            keras.optimizers.Adam(1e-4),
            names["loss"],
            rows=rows,
        ),
        "recipe": counted(
            lambda: names["classifier"](sizes, length=length),
            names["adam"](1e-4),
            names["loss"],
            rows=rows,
        ),
    }


if __name__ == "__main__":
    for name, step in both(GEMMA_2B).items():
        held = dataclasses.asdict(step.memory)
        sizes = (f"{kind} {size / 1e6:,.0f}" for kind, size in held.items())
        fits = step.memory.peak <= targets.find("t4").memory
        print(f"{name}, MB: {', '.join(sizes)}; on a T4: {fits}", flush=True)
    print(f"tfmix {tfmix.__version__}, Keras {keras.__version__}")
