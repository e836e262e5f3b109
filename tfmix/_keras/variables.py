"""Reads and changes private parts of Keras's variables.

Under TensorFlow the optimizers unwrap `variable.value`, assign to it, and find
slots by `_unique_id`.
"""

import contextlib
import functools
import numbers
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.backend.common import stateless_scope
from keras.src.backend.common import variables as backend_variables

from tfmix import _formats
from tfmix._keras import context, optimizers, replacing, version

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    # `tfmix` replaces it in that module.
    _where = tf.where
else:
    import jax

    _where = jax.numpy.where

Variables = Sequence[keras.Variable]
# It casts each variable that a layer reads.
AUTOCAST = (backend_variables.AutocastScope, "maybe_cast")
# Layers write to their variables with this method.
ASSIGN = (backend_variables.Variable, "assign")
# These operations take a variable's handle and do not change the variable.
_READS = frozenset(
    "ReadVariableOp ResourceGather VarIsInitializedOp VariableShape".split()
)
# Methods of `tf.Variable`, with what they assign.
_ASSIGNMENTS: dict[str, Callable[[Any, Any], Any]] = {
    "assign": lambda old, new: new,
    "assign_add": operator.add,
    "assign_sub": operator.sub,
}


def is_narrow(tensor: Any) -> bool:
    """Returns whether a tensor or variable is float16 or bfloat16."""
    dtype = getattr(tensor, "dtype", None)
    return getattr(dtype, "name", dtype) in _formats.SIXTEEN_BIT


def is_overwritten(variable: Any) -> bool:
    """Returns whether a variable's gradient is its next value (float8)."""
    return getattr(variable, "overwrite_with_gradient", False)


def is_sixteen_bit(variable: keras.Variable) -> bool:
    """Returns whether a variable is 16-bit and updated by gradients."""
    return is_narrow(variable) and not is_overwritten(variable)


def is_state(variable: Any) -> bool:
    """Returns whether a skipped step has to restore a variable's value."""
    # Seeds keep their new values. The user's own are unsigned, as JAX's are.
    if variable.name.startswith("seed_generator_state"):
        return False
    dtype: str = keras.backend.standardize_dtype(variable.dtype)
    return dtype.startswith(("float", "bfloat", "int", "bool"))


def placement(variable: keras.Variable) -> dict:
    """Returns the `add_variable` arguments that place it beside another."""
    layout = getattr(variable, "_layout", None)
    return {"layout": layout, "aggregation": variable.aggregation}


def on_each_device(variable: keras.Variable) -> dict:
    """Returns arguments that copy a variable to each device of another's."""
    layout = getattr(variable, "_layout", None)
    if layout is None:
        return {}
    import jax

    # A user's map of layouts by path does not apply to the new variable.
    mesh = getattr(layout, "backend_layout", layout).mesh
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return {"layout": whole}


def adopt(target: keras.Variable, variable: keras.Variable) -> keras.Variable:
    """Gives a replacement the identity of the model's variable; returns it."""
    # Settings by path (`MultiOptimizer`, weight decay) then match it, too.
    target._path = variable.path
    for name in ("trainable", "constraint", "regularizer"):
        setattr(target, name, getattr(variable, name))
    return target


def store_apart(
    undo: contextlib.ExitStack, variable: keras.Variable, dtype: str
) -> None:
    """Gives a variable separate storage of a dtype until a stack unwinds."""
    other = keras.Variable("zeros", variable.shape, dtype, trainable=False)
    other.assign(variable.value)
    replacing.swap(undo, variable, "_value", other._value)
    replacing.swap(undo, variable, "_dtype", dtype)


@contextlib.contextmanager
def local_copies(these: Iterable[keras.Variable]) -> Iterator[None]:
    """Makes each variable use this replica's copy of it (TensorFlow)."""
    with contextlib.ExitStack() as undo:
        for variable in these:
            copy = local(variable._value)
            if copy is not variable._value:
                replacing.swap(undo, variable, "_value", copy)
        yield


def local(variable: Any) -> Any:
    """Returns this replica's copy of a `tf.Variable`, or the variable."""
    if keras.backend.backend() != "tensorflow":
        return variable
    import tensorflow as tf

    distributed = isinstance(variable, tf.distribute.DistributedValues)
    return variable._get() if distributed else variable


def is_known(value: Any) -> bool:
    """Returns whether a value is known now, rather than a tensor."""
    return isinstance(value, numbers.Number | np.generic | np.ndarray)


def select(condition: Any, new: Any, old: Any) -> Any:
    """Returns one of two values, by a bool or a boolean tensor.

    Args:
        condition: Where it is true, `new` is returned.
        new: A number, a tensor or a named tuple of them.
        old: The same. Both may be anything if the condition is known.
    """
    if is_known(condition):
        return new if condition else old
    return keras.tree.map_structure(
        functools.partial(_select, condition), new, old
    )


def _select(condition: Any, new: Any, old: Any) -> Any:
    if new is old:
        return old
    if keras.backend.backend() == "tensorflow":
        return _where(condition, new, old)
    if not condition.shape and _is_alike(new, old):
        # `where` compiles a program of its own at each place, with broadcasts.
        return jax.lax.select(condition, new, old)
    return _where(condition, new, old)


def _is_alike(*arrays: Any) -> bool:
    one, other = ((np.shape(x), getattr(x, "dtype", None)) for x in arrays)
    return one == other and None not in one


@contextlib.contextmanager
def selecting(condition: Any, variables: Sequence) -> Iterator[None]:
    """Makes assignments to variables depend on a condition (XLA, JAX).

    Args:
        condition: Boolean scalar tensor.
        variables: The variables that keep their values if it is false; under
            JAX all in a `keras.StatelessScope` around the block.
    """
    if keras.backend.backend() == "jax":
        outer: Any = context.open_scope()
        with _Selecting(condition, variables, outer) as scope:
            yield
        outer.state_mapping.update(scope.state_mapping)
        return
    before = [(variable, read(variable)) for variable in variables]
    watched = not tf.distribute.has_strategy() and _has_captures()
    with contextlib.ExitStack() as undo:
        selections = [
            _Selection(condition, backend_variable(variable), undo)
            for variable in (variables if watched else [])
        ]
        yield
    complete = {id(s.variable) for s in selections if s.is_complete()}
    for variable, old in before:
        is_done = id(backend_variable(variable)) in complete
        if not is_done and may_differ(variable, old):
            variable.assign(select(condition, read(variable), old))


class _Selecting(keras.StatelessScope):
    """Selects the old or the new value in each assignment.

    Later assignments of the block then read the selected value. If only its end
    selected, XLA would need a second copy of optimizer state on a CPU, because
    the weights' update reads the new state.
    """

    def __init__(self, condition: Any, variables: Iterable, outer: Any) -> None:
        super().__init__(initialize_variables=False)
        self.condition = condition
        self.chosen = set(map(id, variables))
        self.state_mapping = dict(outer.state_mapping)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Receives what `keras.Variable.assign` was given."""
        variable, new = update
        old = read(variable)
        if id(variable) in self.chosen and new is not old:
            new = select(self.condition, new, old)
        super().add_update((variable, new))


class _Selection:
    """Selects the old or the new value in assignments to a `tf.Variable`.

    It does not in assignments of rows, nor in a branch or a loop.
    """

    def __init__(
        self, condition: Any, variable: Any, undo: contextlib.ExitStack
    ) -> None:
        self.condition, self.variable = condition, variable
        self.graph = tf.compat.v1.get_default_graph()
        self.writes = _count_writes(variable)
        self.original = variable.assign
        for name, operation in _ASSIGNMENTS.items():
            original = getattr(variable, name)
            assign = functools.partial(self._assign, original, operation)
            replacing.swap(undo, variable, name, assign)

    def is_complete(self) -> bool:
        """Returns whether all assignments were selected."""
        return self.writes == _count_writes(self.variable)

    def _assign(
        self,
        original: Callable,
        operation: Callable,
        value: Any,
        *args: Any,
        **settings: Any,
    ) -> Any:
        if tf.compat.v1.get_default_graph() is not self.graph:
            return original(value, *args, **settings)
        old = self.variable.value()
        new = operation(old, tf.convert_to_tensor(value, old.dtype))
        self.writes += 1
        new = select(self.condition, new, old)
        return self.original(new, *args, **settings)


def assign_all(variables: Variables, values: Sequence) -> None:
    """Assigns every array, or none (`ValueError`) if one does not fit."""
    if len(values) != len(variables):
        raise ValueError(
            "There must be one array for each of `optimizer.variables`. "
            f"Received: {len(values)} arrays for {len(variables)} variables."
        )
    arrays = [np.asarray(value) for value in values]
    for variable, array in zip(variables, arrays, strict=True):
        shape = tuple(variable.shape)
        if array.shape != shape or array.dtype.kind in "OSU":
            raise ValueError(
                f"Variable {variable.path!r} has shape {shape}. Received: an "
                f"array of shape {array.shape} and dtype {array.dtype}. Build "
                "the optimizer on the variables that the arrays belong to."
            )
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)


def own_trainable(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the variables a layer itself created as trainable."""
    return list(layer._trainable_variables)


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Returns a layer's own variables, not those of its inner layers."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def own_state(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the variables in which a layer itself keeps its state."""
    metrics = [v for metric in layer._metrics for v in metric.variables]
    return list(layer._non_trainable_variables) + metrics


def cast_in_place(variable: keras.Variable, dtype: str) -> None:
    """Gives a variable another dtype, and rounds its value to that."""
    # TensorFlow then stores it where the strategy in scope puts it.
    if not all(hasattr(variable, name) for name in ("_dtype", "_initialize")):
        raise version.misfit("its variables cannot be cast in place")
    value = ops.cast(variable.value, dtype)
    before, trainable = variable._dtype, variable._trainable
    variable._dtype = dtype
    # A frozen variable may be unfrozen, so its gradients must be recorded.
    variable._trainable = getattr(variable.value, "trainable", trainable)
    try:
        variable._initialize(value)
    except Exception:
        variable._dtype = before
        raise
    finally:
        variable._trainable = trainable


class Float32View(keras.Variable):
    """A float32 variable that stores nothing but a model's 16-bit variable.

    Reads and assignments go through `load` and `store`, so it works inside
    `tf.cond`, `jax.jit` and stateless scopes alike.
    """

    # True while slots are created: TensorFlow then places them beside the
    # model's variable.
    colocating = False

    def __init__(self, variable: keras.Variable) -> None:
        # TensorFlow's notes on the variable, for checkpoints, are not copied.
        for name, value in vars(variable).items():
            if not name.startswith("_self_"):
                self.__dict__[name] = value
        self.stored, self._dtype, self._value = variable, "float32", None

    def load(self) -> Any:
        """Returns the float32 value as a tensor."""
        raise NotImplementedError

    def store(self, value: Any) -> None:
        """Keeps a float32 tensor."""
        raise NotImplementedError

    @property
    def value(self) -> Any:
        """The float32 tensor; under TensorFlow the view, for assignments."""
        if keras.backend.backend() != "tensorflow":
            return self.load()
        return self.stored.value if self.colocating else self

    def assign(self, value: Any, **kwargs: Any) -> Any:
        """Stores a value; ignores `kwargs` of `tf.Variable.assign`."""
        value = ops.cast(value, "float32")
        self.store(value)
        return value

    def assign_add(self, value: Any, **kwargs: Any) -> Any:
        """Adds a value; see `assign`."""
        return self.assign(ops.add(self.load(), value))

    def assign_sub(self, value: Any, **kwargs: Any) -> Any:
        """Subtracts a value; see `assign`."""
        return self.assign(ops.subtract(self.load(), value))

    # Keras calls these for `tf.IndexedSlices`.
    scatter_add = assign_add
    scatter_sub = assign_sub

    def numpy(self) -> np.ndarray:
        """Copies the float32 value to the host."""
        return ops.convert_to_numpy(self.load())

    def __truediv__(self, other: Any) -> Any:
        # `tf.divide` delegates to its argument, and `value` is the view.
        return ops.divide(self.load(), other)

    # Keras also uses these operators on `value`.
    def __neg__(self) -> Any:
        return ops.negative(self.load())

    def __abs__(self) -> Any:
        return ops.absolute(self.load())

    def __getitem__(self, index: Any) -> Any:
        return self.load()[index]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any:
        value = self.load()
        return value if dtype is None else ops.cast(value, dtype)

    def __jax_array__(self) -> Any:
        return self.load()

    def _serialize_to_tensors(self) -> dict:
        # A checkpoint needs nothing of the view: the model saves its variable,
        # and the wrapper saves the rest.
        return {}

    def _restore_from_tensors(self, restored_tensors: dict) -> None:
        pass

    # In a SavedModel, too, the view is the model's variable.
    @property
    def handle(self) -> Any:
        """The handle of the model's variable (TensorFlow)."""
        return self.stored.handle

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> list:
        return []

    def _write_object_proto(self, proto: Any, options: Any) -> None:
        self.stored._write_object_proto(proto, options)

    @property
    def _unique_id(self) -> str:
        # Optimizers find a variable's slots under this key. They also pass one
        # replica's copy, or ask while slots are created.
        return optimizers.key(self.stored)


# Whether a type derives from another one. TensorFlow's tensors and variables
# take long to check.
derives: Callable[[Any, Any], bool] = functools.cache(issubclass)


def backend_variable(variable: Any) -> Any:
    """Returns what stores a Keras variable here, such as its `tf.Variable`.

    Its `value` may be a 16-bit copy for a layer. Another argument is returned
    unchanged.
    """
    kind: Any = type(variable)
    if not derives(kind, keras.Variable):
        return variable
    scope = stateless_scope.get_stateless_scope()
    if scope is not None:
        value = scope.get_current_value(variable)
        if value is not None:
            return value
    # A view stores nothing, and a variable without a value has a placeholder.
    return variable.value if variable._value is None else variable._value


def stored(variable: Any) -> Any:
    """Returns the `tf.Variable` of a variable; under JAX the one given."""
    on_jax = keras.backend.backend() == "jax"
    return variable if on_jax else backend_variable(variable)


def read(variable: Any) -> Any:
    """Returns a variable's current value, as a tensor that does not change.

    Anything else is returned unchanged.
    """
    value = backend_variable(variable)
    kind: Any = type(value)
    if keras.backend.backend() == "jax" or derives(kind, tf.Tensor):
        return value
    if isinstance(value, Float32View):
        return value.load()
    # `tf.convert_to_tensor` takes twice as long in eager mode.
    return value.value() if hasattr(value, "read_value") else value


def read_by_layer(variable: Any) -> Any:
    """Returns what a layer reads, which may be a 16-bit copy, as a tensor.

    Anything else is returned unchanged.
    """
    is_variable = isinstance(variable, keras.Variable)
    value = variable.value if is_variable else variable
    kind: Any = type(value)
    is_tensor = keras.backend.backend() == "jax" or derives(kind, tf.Tensor)
    return value if is_tensor else read(value)


def host_value(variable: Any) -> Any:
    """Returns the NumPy value of a variable or tensor.

    It is `None` in a function that is being compiled.
    """
    value = backend_variable(variable)
    if keras.backend.backend() == "jax":
        is_traced = isinstance(value, jax.core.Tracer)
        if is_traced or becomes_constant(variable):
            return None
    elif not tf.executing_eagerly():
        return None
    # NumPy 2 warns about the conversion that TensorFlow's variables offer.
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def reader() -> Callable[[keras.Variable], Any]:
    """Returns what reads a variable, as a number in TensorFlow's eager steps.

    Each operation on a scalar would take longer than its copy to the host.
    """
    on_tensorflow = keras.backend.backend() == "tensorflow"
    is_eager = on_tensorflow and tf.executing_eagerly()
    if is_eager and not tf.distribute.has_strategy():
        if context.open_scope() is None:
            # Its own `numpy` is an operation more.
            return lambda variable: variable._value.value().numpy()
    return operator.attrgetter("value")


def assign_new(variables: Any, old: Any, new: Any) -> None:
    """Assigns the values of a nest, except those that are the old ones."""
    every = map(keras.tree.flatten, (variables, old, new))
    changed = [
        (variable, value)
        for variable, before, value in zip(*every, strict=True)
        if not (is_known(value) and np.array_equal(before, value))
    ]
    for variable, value in changed:
        variable.assign(value)


def value_outside(variable: keras.Variable) -> np.ndarray | None:
    """Returns a variable's value outside any trace, None if it has none."""
    if keras.backend.backend() == "jax":
        return None if _is_gone(variable) else np.asarray(variable._value)
    with tf.init_scope():
        inner = backend_variable(variable)
        if not (tf.executing_eagerly() and inner.is_initialized()):
            return None
        return np.asarray(inner.numpy())


def _is_gone(variable: keras.Variable) -> bool:
    """Returns whether a variable has no value outside a step (JAX)."""
    # A step of `fit` takes the values out, or lets XLA overwrite them.
    value = variable._value
    return value is None or bool(getattr(value, "is_deleted", bool)())


def becomes_constant(variable: keras.Variable) -> bool:
    """Returns whether JAX is compiling and would fix the variable's value."""
    if keras.backend.backend() != "jax":
        return False
    scope = context.open_scope()
    if scope is not None and scope.get_current_value(variable) is not None:
        return False
    # JAX makes a tracer out of a constant only while it compiles.
    return isinstance(jax.numpy.zeros(()), jax.core.Tracer) and not isinstance(
        variable.value, jax.core.Tracer
    )


def value_in_scopes(variable: keras.Variable) -> Any:
    """Returns a variable's value here, `None` if JAX would make it a constant.

    Under JAX that is the value of the nearest `keras.StatelessScope` around
    that has one, also if others are inside.
    """
    if keras.backend.backend() != "jax":
        return variable.value
    for scope in context.open_scopes():
        value = scope.get_current_value(variable)
        if value is not None:
            return value
    is_unknown = _is_gone(variable) or becomes_constant(variable)
    return None if is_unknown else variable.value


def may_be_written(variable: Any) -> bool:
    """Returns whether the code traced so far may change a variable."""
    return not _has_captures() or _count_writes(backend_variable(variable)) > 0


def _has_captures() -> bool:
    """Returns whether a function of TensorFlow is traced."""
    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and hasattr(graph, "capture")


def _count_writes(variable: Any) -> int:
    """Returns how many operations so far may change a `tf.Variable`."""
    graph = tf.compat.v1.get_default_graph()
    users = graph.capture(variable.handle).consumers()
    return sum(user.type not in _READS for user in users)


def may_differ(variable: Any, old: Any) -> bool:
    """Returns whether a variable may have another value than an old one."""
    value = backend_variable(variable)
    if hasattr(value, "handle"):
        return may_be_written(value)
    # The value is JAX's, or belongs to a scope that holds variables' values.
    return value is not old


def can_be_made() -> bool:
    """Returns whether a variable that is made here has a value at once."""
    # In a plain `tf.Graph` it would wait for a session.
    has_value = bool(tf.executing_eagerly() or tf.inside_function())
    return has_value and context.open_scope() is None


def outside_of_tracing(
    variables: Sequence,
) -> contextlib.AbstractContextManager:
    """Creates variables outside the function that TensorFlow traces."""
    # A first value that is read from the model would become part of the step,
    # which XLA refuses.
    if keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    if not tf.inside_function() or tf.distribute.has_strategy():
        return contextlib.nullcontext()
    with tf.init_scope():
        ready = tf.executing_eagerly() and all(
            bool(backend_variable(variable).is_initialized())
            for variable in variables
        )
    return _lifted() if ready else contextlib.nullcontext()


def noting_new(
    values: dict[int, Any],
) -> contextlib.AbstractContextManager[None]:
    """Notes the first values of variables that a block makes (TensorFlow).

    Args:
        values: Gets the value of each that is not trained, by the `id` of the
            `tf.Variable`.
    """

    def note(create: Callable, **kwargs: Any) -> Any:
        variable = create(**kwargs)
        if not kwargs.get("trainable"):
            values[id(variable)] = variable.value()
        return variable

    scope: contextlib.AbstractContextManager[None] = tf.variable_creator_scope(
        note
    )
    return scope


@contextlib.contextmanager
def _lifted() -> Iterator[None]:
    """Creates variables as eager code does, within a traced function."""

    def create(following: Callable, **kwargs: Any) -> Any:
        # A function that lifts variables itself is traced a second time.
        kwargs["experimental_enable_variable_lifting"] = False
        return following(**kwargs)

    with tf.init_scope(), tf.variable_creator_scope(create):
        yield


def autocast(dtype: str | None) -> Any:
    """Returns a scope in which variables are read in a dtype."""
    return backend_variables.AutocastScope(dtype)


def is_float32(variable: keras.Variable) -> bool:
    """Returns whether a variable, not what a layer reads of it, is float32."""
    return bool(variable._dtype == "float32")


def dtype_read(variable: keras.Variable) -> str:
    """Returns the dtype in which a layer reads a variable."""
    # Keras's property normalizes names, which takes long for each op.
    own, scope = str(variable._dtype), backend_variables.get_autocast_scope()
    if scope is None or not variable._autocast or "float" not in own:
        return own
    return scope.dtype or own


def place_of_value(variable: keras.Variable) -> tuple[dict, str, Any]:
    """Returns where a variable keeps its value, and the value."""
    return vars(variable), "_value", variable._value


def has_value(variable: keras.Variable) -> bool:
    """Returns whether a variable has its first value."""
    return variable._value is not None
