"""A second model like the first: same weights, nothing shared."""

import collections
import contextlib
import warnings
from collections.abc import Iterator

import keras

from tfmix import _messages
from tfmix._keras import layer_policies, layers, loading
from tfmix.autocast import global_policy
from tfmix.autocast import model as mixed_model

# Of Keras's message: enough for its first sentence and a path.
_LONGEST = 300


def copied(model: keras.Model) -> keras.Model:
    """Copies a model through Keras's own saving, optimizer included."""
    # What the model's own code makes without a dtype gets the source's.
    before = mixed_model.policy_of(model) or model.dtype_policy
    try:
        # As pickle does it, which Keras supports: save, then load.
        load, saved, *_ = model.__reduce__()
        with global_policy.policy_scope(before), _unwarned(model):
            twin = load(*saved)
        _copy_adapters(twin, model)
        _check_weights(twin, model)
        _copy_unsaved(twin, model)
    except Exception as error:
        raise TypeError(
            "`model` cannot be copied: Keras cannot save and load it. "
            f"Received: model={model!r}. The cause is {_first_cause(error)} "
            f"{_advice(model)}convert it in place: "
            "apply_policy(model, policy)."
        ) from error
    return twin


@contextlib.contextmanager
def _unwarned(model: keras.Model) -> Iterator[None]:
    """Lets load what the caller has, Lambda layers and no state included."""
    with contextlib.ExitStack() as quiet:
        quiet.enter_context(loading.trusting())
        quiet.enter_context(warnings.catch_warnings())
        if not getattr(getattr(model, "optimizer", None), "built", True):
            # It has taken no step and has no state to carry over.
            quiet.enter_context(_messages.silenced())
            said = "Skipping variable loading for opt"
            warnings.filterwarnings("ignore", said)
        yield


def _copy_adapters(twin: keras.Model, model: keras.Model) -> None:
    """Copies what `enable_lora` added: Keras saves the merged kernel alone.

    Of a layer inside another one it saves neither that nor what is frozen.
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
    """Keras only warns of some layers that it could not load."""
    # A quantized layer that was loaded has them in another order.
    copies, originals = (
        collections.Counter(
            hash(weight.tobytes()) for weight in owner.get_weights()
        )
        for owner in (twin, model)
    )
    if copies != originals:
        raise ValueError("The copy has other weights than the model.")


def _copy_unsaved(twin: keras.Model, model: keras.Model) -> None:
    """Gives layers paths, which rules and maps name them by, and RematScopes.

    Keras builds what it loads from the inside: "encoder/dense" is "dense".
    """
    both = layers.flat_layers(twin), layers.flat_layers(model)
    pairs = list(zip(*both, strict=False))
    if all(copy.name == original.name for copy, original in pairs):
        for copy, original in pairs:
            if copy.path and original.path:
                layer_policies.set_path(copy, original.path)
            layers.rematerialize_alike(copy, original)


def _first_cause(error: BaseException) -> str:
    """Says what went wrong first; what Keras adds to it is about files."""
    before: BaseException | None = error
    while before is not None:
        error, before = before, before.__cause__ or before.__context__
    text = " ".join(str(error).split())
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}..."
    return f"{type(error).__name__}: {text or 'no message'}"


def _advice(model: keras.Model) -> str:
    """Says what to write, by what Keras can find again and what not."""
    own = {
        type(layer)
        for layer in layers.flat_layers(model)
        if not layers.is_builtin(layer)
    }
    registered = keras.saving.get_registered_name
    unknown = {
        kind
        for kind in own
        if keras.saving.get_registered_object(registered(kind)) is None
    }
    advice = []
    if unknown or not own:
        names = _names(unknown) or "each class and function of your own in it"
        advice.append(
            f"put `@keras.saving.register_keras_serializable()` on {names}"
        )
    if own:
        advice.append(
            f"give {_names(own)} a `get_config` with all arguments of the "
            "constructor"
        )
    text = " and ".join(advice)
    return f"{text[0].upper()}{text[1:]}, or "


def _names(classes: set[type]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in classes))
