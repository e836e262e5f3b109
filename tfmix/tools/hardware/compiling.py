"""`compile_for` compiles a training step for an accelerator you do not have."""

import collections
import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfmix import _arguments, _progress
from tfmix._keras import (
    layers,
    optimizers,
    training,
)
from tfmix.autocast import compile as compiling
from tfmix.autocast import global_policy
from tfmix.autocast import record as mixed_model
from tfmix.conversion import convert, copying
from tfmix.policy import policy as policies
from tfmix.tools.hardware import (
    compiled_step,
    compiled_text,
    compilers,
    hlo_products,
    lowering,
    training_memory,
)
from tfmix.tools.hardware import target as targets


def compile_for(
    model: keras.Model,
    batch_size: int,
    target: str = "h200",
    devices: int = 1,
    optimizer: Any = None,
    loss: Any = None,
    policy: str | keras.DTypePolicy | Sequence[Any] | None = None,
) -> compiled_step.CompiledStep | compiled_step.CompiledSteps:
    """Compiles a model's training step for an accelerator you do not have.

    Use it to see what a policy gains on hardware before you rent it: which
    products run in 16 bit, in which kernels, and whether the memory is enough.
    The accelerator's own compiler compiles the program that `fit` would run,
    from shapes. Nothing is trained, and the model does not change. It takes
    seconds for a small model, and minutes for a large one.

    Args:
        model: A built `keras.Model`, compiled or not.
        batch_size: Integer, rows of a training batch, of all devices together.
        target: String, the name of one of `targets()`. Defaults to `"h200"`.
        devices: Integer, how many devices share the batch, each with all
            weights. Defaults to `1`; only JAX supports more.
        optimizer: A Keras optimizer or its name, or a list of them to compare.
            It is copied. Defaults to `None`: the model's own, or Adam.
        loss: A Keras loss or its name. Defaults to `None`: the model's own,
            or the mean squared error.
        policy: As for `convert_model`, or a list of policies to compare;
            `"auto"` is the policy for the target. Defaults to `None`: the
            model keeps its dtypes.

    Returns:
        A `CompiledStep`. For a list of policies or optimizers,
        `CompiledSteps`: a mapping with the policy as its key, or
        `"policy, Adam"` for several optimizers.

    Raises:
        ImportError: If the target's compiler is not installed.
        TypeError: If an argument has the wrong type, or `model` cannot be
            copied.
        ValueError: If the target is unknown or cannot run the policy, the
            model is not built, the batch cannot be shared, or `optimizer` or
            `loss` is missing for a model with its own `compile`.

    Examples:
        >>> model = keras.Sequential([keras.Input((64,))])
        >>> compile_for(model, 32, target="h20")
        Traceback (most recent call last):
        ValueError: ... Did you mean 'h200'?
    """
    _arguments.model(model)
    rows = _arguments.count("batch_size", batch_size, example=32)
    count = _arguments.count("devices", devices)
    accelerator = targets.find(target)
    if rows % count:
        raise ValueError(
            "`batch_size` must be a multiple of `devices`. "
            f"Received: batch_size={rows}, devices={count}."
        )
    chosen_policies = [
        # "auto" is the policy for the target, not for this machine.
        accelerator.auto() if isinstance(item, str) and item == "auto" else item
        for item in _as_list("policy", policy)
    ]
    chosen_optimizers = _as_list("optimizer", optimizer)
    _as_list("loss", loss)
    for chosen in chosen_policies:
        _check_policy(chosen, model, accelerator)
    if not model.built:
        raise ValueError(
            "`model` must be built: its weights have no shapes yet. Received: "
            f"model={model!r}. Call it once on a batch, or begin it with "
            "keras.Input(shape)."
        )
    records = compilers.devices(accelerator, count)
    steps = {}
    for chosen, inner in itertools.product(chosen_policies, chosen_optimizers):
        twin = _compile_copy(model, chosen, inner, loss)
        name = title = _name(chosen, twin)
        if len(chosen_optimizers) > 1:
            title += f", {_optimizer_name(inner, model)}"
        if title in steps:
            raise ValueError(
                "The steps to compare must differ in policy or in the classes "
                f"of optimizers. Received: {title!r} twice. Compile for one of "
                "them at a time."
            )
        with _progress.shown(f"Compiling {title} for {accelerator.name}"):
            compiled = lowering.compile_training_step(twin, rows, records)
        steps[title] = record(compiled, twin, accelerator, count, rows, name)
    if isinstance(policy, list | tuple) or isinstance(optimizer, list | tuple):
        return compiled_step.CompiledSteps(steps)
    (only,) = steps.values()
    return only


def _as_list(name: str, value: Any) -> list[Any]:
    if isinstance(value, list | tuple | dict) and not value:
        raise ValueError(
            f"`{name}` must not be empty. Received: {name}={value!r}. Leave it "
            "out to use the model's own."
        )
    return list(value) if isinstance(value, list | tuple) else [value]


def _optimizer_name(optimizer: Any, model: keras.Model) -> str:
    """Returns the class names of an optimizer and its inner optimizers."""
    optimizer = optimizer or getattr(model, "optimizer", None) or "adam"
    chain = optimizers.chain(keras.optimizers.get(optimizer))
    names = [type(part).__name__ for part in chain]
    return "(".join(names) + ")" * (len(names) - 1)


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


@contextlib.contextmanager
def _keep_random_state() -> Iterator[None]:
    """Restores Python's generator, from which Keras draws seeds."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@_keep_random_state()
def _compile_copy(
    model: keras.Model, policy: Any, optimizer: Any, loss: Any
) -> keras.Model:
    """Returns a copy of the model, compiled for training."""
    if policy is None:
        twin = copying.copy_model(model)
        policy = mixed_model.policy_of(twin)
    else:
        twin = convert.convert_model(model, policy)
    own = getattr(twin, "optimizer", None)
    if own is None and getattr(model, "compiled", False):
        _check_both_given(model, optimizer, loss)
    if optimizer is not None:
        original = keras.optimizers.get(optimizer)
        optimizer = type(original).from_config(original.get_config())
    accepted = policy and global_policy.accept(policy)
    if own is None or loss is not None:
        with (
            global_policy.policy_scope(accepted)
            if accepted
            else contextlib.nullcontext()
        ):
            twin.compile(
                optimizer=optimizer or own or keras.optimizers.Adam(),
                loss=loss or "mean_squared_error",
            )
    elif optimizer is not None:
        level = accepted and policies.with_rules(accepted).level
        wrapped = compiling.choose(optimizer, twin, level)
        training.adopt_optimizer(twin, wrapped, wrapped)
    return twin


def _check_both_given(model: keras.Model, optimizer: Any, loss: Any) -> None:
    if optimizer is None or loss is None:
        raise ValueError(
            "A model with its own `compile` needs `optimizer` and `loss` here: "
            "Keras does not call its `compile` on a copy. "
            f"Received: optimizer={optimizer!r}, loss={loss!r} and a "
            f"{type(model).__name__} without `compile_from_config`. Pass both, "
            "or define that method."
        )


def _name(policy: Any, model: keras.Model) -> str:
    if policy is not None:
        name = getattr(policy, "level", None) or getattr(policy, "name", None)
        return str(name or policy)
    names = [layer.dtype_policy.name for layer in layers.that_compute(model)]
    # A few layers stay in float32 under every policy.
    narrow = [name for name in names if name != "float32"]
    counted = collections.Counter(narrow or ["float32"])
    return str(counted.most_common(1)[0][0])


def record(
    compiled: compilers.Compiled,
    model: keras.Model,
    target: targets.Target,
    devices: int,
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
            training_memory.of_step(model, compiled.temporaries),
        ),
        exchanges=program.exchanges,
        exchanged=program.exchanged,
        flops=sum(row.flops for row in rows),
        bytes=program.bytes,
        open_loops=program.open_loops,
        seconds=bounds[bound],
        bound=bound,
        model=model.name,
        policy=policy,
        target=target.name,
        devices=devices,
        batch_size=batch_size,
        backend=keras.backend.backend(),
    )


def _row(
    product: hlo_products.Product,
    of_model: list[keras.Layer],
    target: targets.Target,
) -> compiled_step.CompiledProduct:
    index = lowering.layer_of(product.label)
    # JAX labels transposed ops, and TensorFlow the ops of its tape.
    backward = "transpose(" in product.label or "gradient_tape" in product.label
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
