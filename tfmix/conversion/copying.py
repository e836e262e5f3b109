"""Copies a model: the same weights, and no shared objects."""

import contextlib
import warnings
from collections.abc import Iterator

import keras

from tfmix import _messages
from tfmix._keras import files, layers
from tfmix.autocast import global_policy
from tfmix.autocast import record as mixed_model


def copy_model(model: keras.Model) -> keras.Model:
    """Copies a model through Keras's own saving, optimizer included."""
    # The model's own code may create layers without a dtype. Under the
    # source's policy they get the source's dtype.
    before = mixed_model.policy_of(model) or model.dtype_policy
    try:
        # Keras supports pickle, which saves the model and loads it again.
        load, saved, *_ = model.__reduce__()
        with global_policy.policy_scope(before), _load_trusted(model):
            twin = load(*saved)
        _copy_adapters(twin, model)
        _check_weights(twin, model)
        _copy_unsaved(twin, model)
    except Exception as error:
        raise TypeError(
            "`model` cannot be copied: Keras cannot save and load it. "
            f"Received: model={model!r}. The cause is "
            f"{type(error).__name__}: {error}. Put "
            "`@keras.saving.register_keras_serializable()` on classes and "
            "functions of your own, give a class a `get_config` with all "
            "arguments of the constructor, or convert it in place: "
            "apply_policy(model, policy)."
        ) from error
    return twin


@contextlib.contextmanager
def _load_trusted(model: keras.Model) -> Iterator[None]:
    """Allows Lambda layers to load, and silences warnings about lost state."""
    with contextlib.ExitStack() as quiet:
        quiet.enter_context(files.trusting())
        quiet.enter_context(warnings.catch_warnings())
        if not getattr(getattr(model, "optimizer", None), "built", True):
            # It has taken no step, so it has no state to copy.
            quiet.enter_context(_messages.silenced())
            text = "Skipping variable loading for opt"
            warnings.filterwarnings("ignore", text)
        yield


def _copy_adapters(twin: keras.Model, model: keras.Model) -> None:
    """Copies LoRA weights: Keras only saves the merged kernel.

    For nested layers Keras saves neither LoRA nor which weights are frozen.
    """
    both = layers.flat_layers(twin), layers.flat_layers(model)
    for copy, original in zip(*both, strict=False):
        if copy.trainable != original.trainable:
            copy.trainable = original.trainable
        if getattr(original, "lora_enabled", False):
            if not copy.lora_enabled:
                copy.enable_lora(original.lora_rank, original.lora_alpha)
            copy.set_weights(original.get_weights())


def _check_weights(twin: keras.Model, model: keras.Model) -> None:
    """Raises an error for lost weights, about which Keras only warns."""
    # A quantized layer has its weights in another order once it is loaded.
    copies, originals = (
        sorted(hash(weight.tobytes()) for weight in owner.get_weights())
        for owner in (twin, model)
    )
    if copies != originals:
        raise ValueError("The copy has other weights than the model.")


def _copy_unsaved(twin: keras.Model, model: keras.Model) -> None:
    """Copies the layers' paths, RematScopes and who chose their dtypes.

    Rules and maps use the paths, and Keras builds loaded layers from the
    inside: "encoder/dense" is "dense".
    """
    both = layers.flat_layers(twin), layers.flat_layers(model)
    pairs = list(zip(*both, strict=False))
    # Layers that others create when they are built have new names.
    if all(type(copy) is type(original) for copy, original in pairs):
        for copy, original in pairs:
            layers.mark(copy, origin=layers.dtype_origin(original))
    if all(copy.name == original.name for copy, original in pairs):
        for copy, original in pairs:
            if copy.path and original.path:
                layers.set_path(copy, original.path)
            layers.rematerialize_alike(copy, original)
