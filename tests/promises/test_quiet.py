"""A correct program prints the same as in plain Keras."""

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers

POLICIES = ("mixed_float16", "mixed_bfloat16")


def data(rows=32):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def layers(units=1):
    return [
        keras.layers.Dense(8, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(units, dtype="float32"),
    ]


def fitted(directory):
    model = keras.Sequential([keras.Input((4,)), *layers()])
    model.compile("adam", "mse", metrics=["mae"])
    path = str(directory / "best.keras")
    callbacks = [
        keras.callbacks.ModelCheckpoint(path, save_best_only=True),
        keras.callbacks.EarlyStopping(patience=2),
        keras.callbacks.ReduceLROnPlateau(patience=1),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.CSVLogger(str(directory / "log.csv")),
    ]
    settings = {"validation_split": 0.25, "callbacks": callbacks}
    model.fit(*data(), epochs=3, verbose=0, **settings)
    model.evaluate(*data(), verbose=0)
    return model


def saved(directory):
    model = fitted(directory)
    model.save(directory / "model.keras")
    loaded = keras.saving.load_model(directory / "model.keras")
    loaded.fit(*data(), verbose=0)
    loaded.predict(data()[0], verbose=0)


def sequential_of_ids(directory):
    model = keras.Sequential(
        [
            keras.layers.Embedding(5000, 4),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(3, activation="softmax", dtype="float32"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    ids = np.arange(64).reshape(16, 4) * 70
    model.fit(ids, np.arange(16) % 3, epochs=2, verbose=0)


class Classifier(keras.Model):
    """A subclassed model that adds a loss itself."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = layers()

    def call(self, x, training=False):
        x = self.norm(self.first(x), training=training)
        self.add_loss(1e-4 * keras.ops.mean(x**2))
        return self.last(x)


def subclassed(directory):
    model = Classifier()
    model.compile("sgd", "mse")
    model.fit(*data(), epochs=2, verbose=0)


def free_loop(directory):
    import tensorflow as tf

    model = keras.Sequential([keras.Input((4,)), *layers()])
    optimizer = keras.optimizers.Adam()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        variables = model.trainable_variables
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return loss

    for _ in range(3):
        step(*map(tf.constant, data()))


# A quick run only has the first program, which takes a fifth of the last one's
# time.
PROGRAMS = [subclassed, sequential_of_ids, saved]
ON_TENSORFLOW = [free_loop]


def lines_of(program, directory, policy, said, capfd, recwarn):
    """Runs a program; returns all printed, warned and logged lines."""
    directory.mkdir()
    with tfmix.policy_scope(policy):
        program(directory)
    printed = "".join(capfd.readouterr())
    lines = [
        *printed.splitlines(),
        # Python does not show other warnings of libraries.
        *(
            str(warning.message)
            for warning in recwarn.list
            if not issubclass(warning.category, DeprecationWarning)
        ),
        *said,
    ]
    recwarn.clear()
    return lines


@pytest.mark.costly
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "program",
    [
        *PROGRAMS,
        *(
            pytest.param(one, marks=helpers.requires_backend("tensorflow"))
            for one in ON_TENSORFLOW
        ),
    ],
    ids=lambda program: program.__name__,
)
def test_a_correct_program_prints_nothing_more(
    program, policy, tmp_path, said, capfd, recwarn
):
    plain, ours = (
        lines_of(program, tmp_path / each, each, said, capfd, recwarn)
        for each in ("float32", policy)
    )
    assert not [line for line in ours if "tfmix" in line]
    assert len(ours) <= len(plain)


def test_a_warning_is_found(tmp_path, said, capfd, recwarn):
    def program(directory):
        model = keras.Sequential([keras.Input((4,)), *layers()])
        model.compile("sgd", "mse")
        x, y = data()
        x[3] = np.nan
        model.fit(x, y, verbose=0)

    lines = lines_of(
        program, tmp_path / "bad", "mixed_float16", said, capfd, recwarn
    )
    assert any("NaN" in line for line in lines)
