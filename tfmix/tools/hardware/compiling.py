"""`compile_for` compiles a training step for an accelerator you do not have."""

import contextlib
from typing import Any

import keras

from tfmix import _arguments, _progress
from tfmix._keras import layers
from tfmix.autocast import global_policy
from tfmix.autocast import record as mixed_model
from tfmix.conversion import convert, copying
from tfmix.tools.hardware import (
    compiled_step,
    compiled_text,
    compilers,
    hlo_products,
    lowering,
)
from tfmix.tools.hardware import target as targets


def compile_for(
    model: keras.Model,
    batch_size: int,
    target: str = "h200",
    policy: str | keras.DTypePolicy | None = None,
) -> compiled_step.CompiledStep:
    """Compiles a model's training step for an accelerator you do not have.

    Use it to see what a policy gains on hardware before you rent it: which
    products run in 16 bit, in which kernels, and whether the memory is enough.
    The accelerator's own compiler compiles the program that `fit` would run
    under JAX, from shapes. Nothing is trained, and the model does not change.
    It takes seconds for a small model, and minutes for a large one.

    Args:
        model: A built `keras.Model`. Its optimizer and loss are those of
            `compile`; Adam and the mean squared error if it is not compiled.
        batch_size: Integer, rows of a training batch. Of several devices that
            share a batch, compile the share of one.
        target: String, the name of one of `targets()`. Defaults to `"h200"`.
        policy: As for `convert_model`; `"auto"` is the policy for the target.
            Defaults to `None`: the model keeps its dtypes.

    Returns:
        A `CompiledStep`, which prints as a table.

    Raises:
        ImportError: If the target's compiler is not installed.
        TypeError: If an argument has the wrong type, or `model` cannot be
            copied.
        ValueError: If the backend is not JAX, the target is unknown or cannot
            run the policy, the model is not built, or Keras cannot compile its
            copy.

    Examples:
        >>> model = keras.Sequential([keras.Input((64,))])
        >>> compile_for(model, 32, target="h20")
        Traceback (most recent call last):
        ValueError: ... Did you mean 'h200'?
    """
    _arguments.model(model)
    rows = _arguments.count("batch_size", batch_size, example=32)
    accelerator = targets.find(target)
    if policy == "auto":
        # That is the policy for the target, not for this machine.
        policy = accelerator.auto()
    _check_policy(policy, model, accelerator)
    if not model.built:
        raise ValueError(
            "`model` must be built: its weights have no shapes yet. Received: "
            f"model={model!r}. Call it once on a batch, or begin it with "
            "keras.Input(shape)."
        )
    device = compilers.device(accelerator)
    if (backend := keras.backend.backend()) != "jax":
        raise ValueError(
            "`compile_for` compiles the step that JAX would run. Received: the "
            f"backend {backend!r}. Set KERAS_BACKEND=jax and load the model "
            "anew; `tfmix compile` does both."
        )
    twin = _compile_copy(model, policy)
    name = _name(policy, twin)
    with _progress.shown(f"Compiling {name} for {accelerator.name}"):
        compiled = lowering.compile_training_step(twin, rows, device)
    return record(compiled, twin, accelerator, rows, name)


def _check_policy(
    policy: Any, model: keras.Model, target: targets.Target
) -> None:
    if policy is None:
        float16 = layers.computes_in(model, "float16")
    else:
        float16 = global_policy.accept(policy).compute_dtype == "float16"
    if float16 and target.kind == "TPU":
        raise ValueError(
            "A TPU has no float16 products: XLA does not compile them. "
            f"Received: policy={policy!r}, target={target.name!r}. Take "
            "policy='mixed_bfloat16'."
        )


def _compile_copy(model: keras.Model, policy: Any) -> keras.Model:
    """Returns a copy of the model, compiled for training."""
    if policy is None:
        twin = copying.copy_model(model)
        policy = mixed_model.policy_of(twin)
    else:
        twin = convert.convert_model(model, policy)
    if getattr(twin, "optimizer", None) is not None:
        return twin
    if getattr(model, "compiled", False):
        raise ValueError(
            "Keras does not call a model's own `compile` on a copy. Received: "
            f"a {type(model).__name__} without `compile_from_config`. Define "
            "that method, or pass a model that is not compiled."
        )
    with contextlib.ExitStack() as scope:
        if policy is not None:
            scope.enter_context(global_policy.policy_scope(policy))
        twin.compile("adam", "mean_squared_error")
    return twin


def _name(policy: Any, model: keras.Model) -> str:
    if policy is None:
        policy = mixed_model.policy_of(model) or model.dtype_policy
    name = getattr(policy, "level", None) or getattr(policy, "name", None)
    return str(name or policy)


def record(
    compiled: compilers.Compiled,
    model: keras.Model,
    target: targets.Target,
    batch_size: int,
    policy: str,
) -> compiled_step.CompiledStep:
    """Turns a compiled program into a record of the model's step."""
    program = compiled_text.read(compiled.text)
    called = layers.called(model)
    rows = [_row(product, called, target) for product in program.products]
    rows.sort(key=lambda row: -row.flops)
    bounds = {
        "compute": sum(row.flops / _rate(row.dtype, target) for row in rows),
        "memory": program.bytes / target.bandwidth,
    }
    bound = max(bounds, key=lambda name: bounds[name])
    return compiled_step.CompiledStep(
        rows=tuple(rows),
        kernels=program.kernels,
        copies=program.copies,
        conditionals=program.conditionals,
        memory=compiled_step.StepMemory(
            compiled.arguments,
            compiled.temporaries,
            compiled.arguments + compiled.extra,
            target.memory,
        ),
        flops=sum(row.flops for row in rows),
        bytes=program.bytes,
        open_loops=program.open_loops,
        seconds=bounds[bound],
        bound=bound,
        model=model.name,
        policy=policy,
        target=target.name,
        batch_size=batch_size,
        backend=keras.backend.backend(),
    )


def _row(
    product: hlo_products.Product,
    of_model: list[keras.Layer],
    target: targets.Target,
) -> compiled_step.CompiledProduct:
    index = lowering.layer_of(product.label)
    # JAX labels transposed ops.
    backward = "transpose(" in product.label
    return compiled_step.CompiledProduct(
        "" if index is None else layers.path_of(of_model[index]),
        "backward" if backward else "forward",
        product.shape,
        product.count,
        product.dtype,
        "MXU" if target.kind == "TPU" else product.kernel,
        product.flops,
    )


def _rate(dtype: str, target: targets.Target) -> float:
    # A dtype without its own units is computed in float32.
    return min(
        target.rates.get(name, target.rates["float32"])
        for name in dtype.split("/")
    )
