"""Reports calls of step functions, which `tfmix run` counts and times.

They are those of `tf.function`, of `jax.jit` and of `fit`, compiled or not.
Only outermost calls count, and only of functions that call `note` while they
run or are traced.
"""

import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import context, replacing

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
else:
    import jax

# A listener gets the function, the notes of its trace, the time at which the
# call began, and what it returned.
Listener = Callable[[Any, list[Any], float, Any], None]
_listeners: list[Listener] = []
_replacements = replacing.Replacements()
# The notes of the outermost functions that run now, by thread. A strategy
# runs each replica in a thread of its own.
_running: dict[int, list[Any]] = {}
# The notes of each function.
_notes: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def listen(listener: Listener) -> None:
    """Calls a function after each call of a step function, from now on."""
    _listeners[:] = [listener]
    name = "make_train_function"
    owner = next(c for c in keras.Model.__mro__[1:] if name in vars(c))
    places: dict[replacing.Place, Callable] = {
        (owner, name): _make_train_function
    }
    if keras.backend.backend() == "tensorflow":
        function = type(tf.function(lambda: None))
        places[function, "__call__"] = _tensorflows_call
    else:
        places |= dict.fromkeys(context.JIT, _jit)
    _replacements.set(places)


def is_compiling() -> bool:
    """Returns whether the running code is traced rather than computed."""
    return bool(context.trace() != context.EAGER)


def is_in_step() -> bool:
    """Returns whether the running code is inside a step function."""
    return bool(_running) or is_compiling()


def note(what: Any) -> None:
    """Adds a note to the step functions that run or are traced."""
    for notes in list(_running.values()):
        if what not in notes:
            notes.append(what)


def _called(function: Any, original: Callable, args: Any, kwargs: Any) -> Any:
    thread = threading.get_ident()
    # A function inside another one does not count as a call.
    if thread in _running:
        return original(*args, **kwargs)
    began = time.perf_counter()
    notes = _running[thread] = _notes.setdefault(function, [])
    try:
        outputs = original(*args, **kwargs)
    finally:
        del _running[thread]
    if notes and not is_compiling():
        for listener in _listeners:
            listener(function, notes, began, outputs)
    return outputs


def _make_train_function(original: Callable) -> Callable:
    """Makes the function of `fit` report its calls where it is eager, too."""

    @functools.wraps(original)
    def make_train_function(
        model: keras.Model, *args: Any, **kwargs: Any
    ) -> Any:
        before = model.train_function
        original(model, *args, **kwargs)
        function = model.train_function
        if function is before or _is_compiled(model, function):
            return function

        @functools.wraps(function)
        def train_function(*args: Any) -> Any:
            return _called(train_function, function, args, {})

        model.train_function = train_function
        return train_function

    return make_train_function


def _is_compiled(model: keras.Model, function: Any) -> bool:
    """Returns whether the steps of a function of `fit` report their calls."""
    if keras.backend.backend() == "tensorflow":
        return hasattr(function, "get_concrete_function")
    return bool(model.jit_compile) and not model.run_eagerly


def _tensorflows_call(original: Callable) -> Callable:
    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original, self)
        return _called(self, call, args, kwargs)

    return __call__


def _jit(original: Callable) -> Callable:
    @functools.wraps(original)
    def jit(*functions: Any, **settings: Any) -> Any:
        if not functions:
            # This is the decorator form, `@jax.jit(**settings)`.
            return functools.partial(jit, **settings)
        jitted = original(*functions, **settings)

        @functools.wraps(jitted)
        def call(*args: Any, **kwargs: Any) -> Any:
            return _called(call, jitted, args, kwargs)

        # `jax.export` recognizes a jitted function by the first two.
        for name in ("trace", "lower", "eval_shape", "clear_cache"):
            vars(call)[name] = getattr(jitted, name)
        return call

    return jit


def wait(outputs: Any) -> None:
    """Waits until the outputs of a call are computed, which JAX does later."""
    if keras.backend.backend() == "jax":
        jax.block_until_ready(outputs)
