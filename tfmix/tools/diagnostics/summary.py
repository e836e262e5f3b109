"""`summary`: a table of the dtypes of each layer of a model."""

import dataclasses

import keras

from tfmix import _arguments, _formats, _tables
from tfmix._keras import graphs, layers
from tfmix.autocast import layer_calls
from tfmix.conversion import planned_policies
from tfmix.tools.diagnostics import dtype_notes


@dataclasses.dataclass(frozen=True)
class LayerDtypes:
    """The dtypes of one layer.

    Attributes:
        layer: The layer's path, or its name where it has none.
        layer_class: The name of its class.
        policy: The name of its dtype policy.
        compute: The dtype it computes in.
        variables: The dtype of the variables it creates.
        output: The dtype of its outputs; empty if that is only known once
            the layer is called, as inside a subclassed model.
    """

    layer: str
    layer_class: str
    policy: str
    compute: str
    variables: str
    output: str


@dataclasses.dataclass
class ModelSummary(_tables.Printed):
    """The dtypes of a model's layers; prints as a table.

    Attributes:
        rows: Tuple of `LayerDtypes`, in the model's order.
        notes: Tuple of sentences: which layers fell back to float32, and why;
            which last layer rounds its probabilities to 16 bit.
    """

    rows: tuple[LayerDtypes, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<ModelSummary {self._title()}>"

    def tables(self) -> list[_tables.Table]:
        """Returns what to print."""
        heads = ("layer", "class", "policy", "compute", "variables", "output")
        rows = [dataclasses.astuple(row) for row in self.rows]
        return [_tables.Table(heads, rows, self._title(), self.notes)]

    def _title(self) -> str:
        narrow = sum(row.compute in _formats.SIXTEEN_BIT for row in self.rows)
        return f"{narrow} of {len(self.rows)} layers compute in 16 bit"


def summary(model: keras.Model) -> ModelSummary:
    """Lists the compute, variable and output dtypes of a model's layers.

    `model.summary()` does not show dtypes, so print this table as well.

    Args:
        model: A `keras.Model` under any policy; it is not changed.

    Returns:
        A `ModelSummary`: one row per layer, nested ones included. Models and
        inputs, which compute nothing themselves, have no row.

    Raises:
        TypeError: If `model` is not a Keras 3 model.

    Examples:
        >>> model = keras.Sequential(
        ...     [keras.Input((4,)),
        ...      keras.layers.Dense(2, dtype="mixed_float16")]
        ... )
        >>> row = summary(model).rows[0]
        >>> row.policy, row.compute, row.variables, row.output
        ('mixed_float16', 'float16', 'float32', 'float16')
    """
    _arguments.model(model)
    computing = {*map(id, layers.that_compute(model))}
    every = layers.flat_layers(model)
    listed = [layer for layer in every if id(layer) in computing]
    notes = (*layer_calls.reasons(model), *dtype_notes.last_activations(model))
    return ModelSummary(tuple(map(_row, listed)), notes)


def _row(layer: keras.Layer) -> LayerDtypes:
    policy = planned_policies.entry(layer.dtype_policy, layer)
    returned = {
        keras.backend.standardize_dtype(tensor.dtype)
        for _, tensor in graphs.noted_results(layer)
    }
    return LayerDtypes(
        layers.path_of(layer),
        type(layer).__name__,
        policy.name,
        policy.compute_dtype,
        policy.variable_dtype,
        ", ".join(sorted(returned)),
    )
