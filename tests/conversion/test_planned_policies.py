"""A float32 model meets a policy: which layers a conversion reaches."""

import keras
import numpy as np
import pytest

import tfmix
from tfmix._keras import layers

F16, BF16 = "mixed_float16", "mixed_bfloat16"
X = np.random.default_rng(7).normal(size=(8, 6)).astype("float32")
Y = X[:, :2]


def base():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation="relu", name="first")(inputs)
    x = keras.layers.BatchNormalization(name="normal")(x)
    outputs = keras.layers.Dense(8, name="second")(x)
    return keras.Model(inputs, outputs, name="base")


@keras.saving.register_keras_serializable("tests")
class Block(keras.layers.Layer):
    """A layer that hands its policy on when it is built, as KerasHub's."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    def build(self, shape):
        self.inner = keras.layers.Dense(
            8, dtype=self.dtype_policy, name="inner"
        )
        self.inner.build(shape)

    def call(self, x):
        return x + self.inner(x)


@keras.saving.register_keras_serializable("tests")
class Backbone(keras.Model):
    """A Functional model with a constructor of its own, as KerasHub's."""

    def __init__(self, width=8, dtype=None, **kwargs):
        inputs = keras.Input((6,))
        x = keras.layers.Dense(width, dtype=dtype, name="first")(inputs)
        x = Block(dtype=dtype, name="block")(x)
        super().__init__(inputs=inputs, outputs=x, **kwargs)
        self.dtype_policy = keras.dtype_policies.get(dtype)
        self.width = width

    def get_config(self):
        config = {"name": self.name, "trainable": self.trainable}
        policy = keras.dtype_policies.serialize(self.dtype_policy)
        return {**config, "dtype": policy, "width": self.width}

    @classmethod
    def from_config(cls, config):
        if isinstance(config["dtype"], dict):
            policy = keras.dtype_policies.deserialize(config["dtype"])
            config = {**config, "dtype": policy}
        return cls(**config)


@keras.saving.register_keras_serializable("tests")
class OnTop(keras.Model):
    """A user's model around another."""

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner
        self.head = keras.layers.Dense(2, name="head")

    def build(self, shape):
        self.head.build((None, 8))

    def call(self, x):
        return self.head(self.inner(x))

    def get_config(self):
        inner = keras.saving.serialize_keras_object(self.inner)
        return {**super().get_config(), "inner": inner}

    @classmethod
    def from_config(cls, config):
        inner = keras.saving.deserialize_keras_object(config.pop("inner"))
        return cls(inner, **config)


def through_file(model, tmp_path):
    model.save(tmp_path / "model.keras")
    return keras.saving.load_model(tmp_path / "model.keras")


def with_head(inner):
    """Adds a head to the graph of a model, as transfer learning does."""
    head = keras.layers.Dense(2, name="head")
    return keras.Model(inner.inputs, head(inner.outputs[0]))


def around(inner):
    inputs = keras.Input((6,))
    return keras.Model(inputs, inner(inputs))


def called(model):
    model(X)
    return model


def frozen(inner):
    inner.trainable = False
    inner.layers[-1].trainable = True
    return with_head(inner)


# Makes the float32 part; then, under the policy, the model.
WAYS = {
    "load_model": (base, lambda inner, path: through_file(inner, path)),
    "a backbone": (Backbone, lambda inner, path: through_file(inner, path)),
    "a backbone in memory": (Backbone, lambda inner, path: inner),
    "a clone": (base, lambda inner, path: keras.models.clone_model(inner)),
    "a cloned backbone": (
        Backbone,
        lambda inner, path: keras.models.clone_model(around(inner)),
    ),
    "in a Sequential": (base, lambda inner, path: inner),
    "frozen": (base, lambda inner, path: inner),
}
HEADS = {
    "a backbone": lambda inner: called(OnTop(inner)),
    "a backbone in memory": lambda inner: called(OnTop(inner)),
    "in a Sequential": lambda inner: keras.Sequential(
        [keras.Input((6,)), inner, keras.layers.Dense(2, name="head")]
    ),
    "frozen": frozen,
}


def state(model):
    """Returns the dtypes of all layers, and which are frozen."""
    return [
        (x.name, x.compute_dtype, x.variable_dtype, x.trainable)
        for x in layers.that_compute(model)
    ]


def in_float32(model):
    found = layers.that_compute(model)
    return [x.name for x in found if x.compute_dtype == "float32"]


@pytest.mark.parametrize("way", WAYS)
def test_a_float32_model_with_a_new_head_is_converted(way, tmp_path, said):
    make, take = WAYS[way]
    inner = make()
    before = {x.name for x in layers.that_compute(inner)}
    tfmix.set_global_policy(F16)
    model = HEADS.get(way, with_head)(take(inner, tmp_path))
    untouched = state(model)
    assert before <= {*in_float32(model)}, "the base is float32"
    model.compile("sgd", "mse")
    (advice,) = said
    assert "layers that gain from 'mixed_float16' compute in float32" in advice
    assert "Write tfmix.apply_policy(model, 'mixed_float16')." in advice
    report = tfmix.apply_policy(model, F16)
    # The last layer of a subclassed model is not known.
    kept = {"head"} if layers.is_structure(model) else {"on_top"}
    assert {*in_float32(model)} <= kept
    converted = state(model)
    assert [x[3] for x in converted] == [x[3] for x in untouched]
    model.fit(X, Y, verbose=0)
    loaded = through_file(model, tmp_path)
    assert state(loaded) == converted
    tfmix.apply_policy(loaded, F16)
    assert state(loaded) == converted
    report.undo()
    assert state(model) == untouched
    assert state(through_file(model, tmp_path)) == untouched
    said.clear()
    model.compile("sgd", "mse")
    assert not said, "it is said once"


def regularized(**settings):
    # Keras keeps the arguments of a layer only if all are plain values.
    regularizer = keras.regularizers.L2(1e-4)
    return keras.layers.Dense(
        8, kernel_regularizer=regularizer, name="mine", **settings
    )


def mine(**settings):
    return keras.layers.Dense(8, name="mine", **settings)


@keras.saving.register_keras_serializable("tests")
class Normalizes(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = keras.layers.Dense(8, name="other")
        self.norm = keras.layers.LayerNormalization(
            dtype="float32", name="mine"
        )

    def build(self, shape):
        self.inner.build(shape)
        self.norm.build((None, 8))

    def call(self, x):
        return self.norm(self.inner(x))


def model_with(layer, way):
    """Puts a layer between two that have no dtype of their own."""
    first = keras.layers.Dense(8, name="first")
    parts = [keras.Input((6,)), first, layer, keras.layers.Dense(8)]
    model = keras.Sequential(parts)
    return with_head(model) if way == "under a policy" else model


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (mine, "before a policy"),
        (Normalizes, "before a policy"),
        (Block, "before a policy"),
        (mine, "under a policy"),
        (regularized, "under a policy"),
        (Normalizes, "under a policy"),
        (Block, "under a policy"),
        (mine, "under Keras's policy"),
        (regularized, "under Keras's policy"),
        (Block, "under Keras's policy"),
    ],
)
def test_a_dtype_that_code_gives_stays(make, way, tmp_path):
    if way == "under a policy":
        tfmix.set_global_policy(F16)
    elif way == "under Keras's policy":
        keras.config.set_dtype_policy(F16)
    settings = {} if make is Normalizes else {"dtype": "float32"}
    layer = make(**settings)
    model = model_with(layer, way)
    for policy in (BF16, F16, "float32", F16):
        tfmix.apply_policy(model, policy)
        assert layer.compute_dtype == "float32" or make is Normalizes
        for inner in layers.flat_layers(layer):
            chosen = inner.name != "other" and inner is not layer
            assert not chosen or inner.compute_dtype == "float32"
        first = model.get_layer("first")
        assert first.compute_dtype == policy.removeprefix("mixed_")
    # The copy knows who chose, and so does a file that has both dtypes.
    for other in (
        tfmix.convert_model(model, BF16),
        through_file(model, tmp_path),
    ):
        tfmix.apply_policy(other, BF16)
        assert other.get_layer("first").compute_dtype == "bfloat16"
        twin = other.get_layer(layer.name)
        dtypes = [x.compute_dtype for x in layers.flat_layers(twin)]
        assert dtypes.count("float32") >= 1, dtypes


def test_a_16_bit_file_keeps_its_float32_layers_beside_a_new_head(tmp_path):
    with tfmix.policy_scope(BF16):
        inner = model_with(mine(dtype="float32"), "before a policy")
    loaded = through_file(inner, tmp_path)
    tfmix.set_global_policy(F16)
    model = with_head(loaded)
    report = tfmix.apply_policy(model, F16)
    assert in_float32(model) == ["mine", "head"]
    assert [row.why for row in report.kept][0] == "has its own dtype"
    # The next conversion knows it, though the file's other layers are new.
    tfmix.apply_policy(model, BF16)
    assert in_float32(model) == ["mine", "head"]
