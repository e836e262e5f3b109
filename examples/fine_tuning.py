"""Cast a trained network to float16, fine-tune it, convert it for inference.

An LSTM learns in float32 to continue the monthly temperatures of the Pacific
(statsmodels' El Nino record). Cast to float16, with float32 masters behind its
variables, it is then fine-tuned on how fast the carbon dioxide in the air
grows (statsmodels' Mauna Loa record), from an input pipeline that delivers
float16. That growth is a fraction of 0.003 a month, and the loss a mean over
1,536 such numbers: its gradients lie below what float16 can hold. A constant
loss scale of 128 brings them back; without it the LSTM stays as it was.
(MXNet's float16 tutorial fine-tunes so.)

    python examples/fine_tuning.py --epochs=50 --seeds=3

takes about a minute on two cores, under TensorFlow or KERAS_BACKEND=jax.
"""

import dataclasses
import functools
import sys
from typing import Any

import keras
import numpy as np

import tfmix
from tfmix.examples import common, recipe, series

# Every size that a matrix product sees is a multiple of 8, as Tensor Cores
# want it: 8 months a frame, 8 months forecast, 32 units, batches of 192.
MONTHS, FRAMES = series.MONTHS, series.FRAMES
UNITS, BATCH_SIZE = 32, 192
TRAINED, TESTED = 2 * BATCH_SIZE, 60  # windows
PRETRAINING_EPOCHS, EPOCHS = 6, 50
RATE = 0.01
SCALE = 128.0
# Of what fine-tuning in float32 gains, the share that is no learning.
LITTLE = 0.5
SERVED_GAP = 0.5  # points


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to fine-tune."""

    policy: str
    rule: tfmix.LossScale


VARIANTS = {
    "float32": Variant("float32", tfmix.NoLossScale()),
    "float16, scale 128": Variant("float16", tfmix.FixedLossScale(SCALE)),
    "float16, no scale": Variant("float16", tfmix.NoLossScale()),
}
SCALED, UNSCALED = list(VARIANTS)[1:]


def build_model(unit: float) -> keras.Model:
    """Builds the network; its last layer speaks the unit of the series."""
    return keras.Sequential(
        [
            keras.Input((FRAMES, MONTHS)),
            # The orthogonal default needs a QR that JAX has not in float16.
            keras.layers.LSTM(UNITS, recurrent_initializer="glorot_uniform"),
            keras.layers.Dense(MONTHS),
            tfmix.float32_output(),
            keras.layers.Rescaling(unit, dtype="float32"),
        ]
    )


@functools.cache
def pretrained(seed: int) -> list[np.ndarray]:
    """Trains in float32 on the Pacific; returns the weights."""
    keras.utils.set_random_seed(seed)
    record = series.pacific()
    # Of the mean, the model's own bias takes care.
    model = build_model(record.unit)
    model.compile(keras.optimizers.Adam(RATE), loss="mse")
    target = record.y - record.y.mean()
    model.fit(record.x, target, 64, PRETRAINING_EPOCHS, verbose=0)
    return model.get_weights()


def delivered(x: np.ndarray, y: np.ndarray, dtype: str) -> dict[str, Any]:
    """Returns what `fit` takes: an input pipeline that delivers a dtype."""
    if keras.backend.backend() == "jax":
        arrays = {"x": x.astype(dtype), "y": y.astype(dtype)}
        return {**arrays, "batch_size": BATCH_SIZE, "shuffle": True}
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    dataset = dataset.shuffle(len(x)).batch(BATCH_SIZE, drop_remainder=True)
    dataset = tfmix.data.cast(dataset, dtype).prefetch(2)
    return {"x": dataset, "shuffle": False}  # That is done already.


def train(name: str, seed: int, epochs: int, tick: recipe.Ticker) -> common.Run:
    """Casts the network of a seed, fine-tunes it, converts it for inference."""
    variant, record = VARIANTS[name], series.mauna_loa()
    source = build_model(record.unit)
    source.set_weights(pretrained(seed))
    before = r_squared(source, record)
    keras.utils.set_random_seed(seed)
    model = source
    if variant.policy != "float32":
        model = tfmix.convert_model(source, variant.policy)
    cast = model.get_weights()
    # float32 variables pass the masters by.
    masters = tfmix.MasterWeightOptimizer(keras.optimizers.Adam(RATE))
    model.compile(
        tfmix.LossScaleOptimizer(masters, loss_scale=variant.rule), loss="mse"
    )
    data = delivered(record.x[:TRAINED], record.y[:TRAINED], variant.policy)
    history = model.fit(
        **data, epochs=epochs, verbose=0, callbacks=[recipe.Tick(tick)]
    )
    served = tfmix.convert_model(model, "float16", inference=True)
    return common.Run(
        variant=name,
        seed=seed,
        score=r_squared(model, record),
        # In variances of the series, which the picture is easier to read in.
        losses=tuple(
            float(loss) / record.unit**2 for loss in history.history["loss"]
        ),
        columns={
            "before": f"{before:.2%}",
            "LSTM\nmoved": f"{moved(cast, model):.0%}",
            "served": f"{r_squared(served, record):.2%}",
            "bytes\n(served)": f"{weight_bytes(model)}\n"
            f"({weight_bytes(served)})",
        },
    )


def r_squared(model: keras.Model, record: series.Record) -> float:
    """Returns the share of the last years' variance that is forecast."""
    x, y = record.x[-TESTED:], record.y[-TESTED:]
    errors = keras.ops.convert_to_numpy(model(x)).astype("float64") - y
    return float(1 - np.sum(errors**2) / np.sum((y - y.mean()) ** 2))


def moved(before: list[np.ndarray], model: keras.Model) -> float:
    """Returns the share of the LSTM's weights that training changed."""
    # Kernel, recurrent kernel, bias: the first three.
    pairs = list(zip(before, model.get_weights(), strict=True))[:3]
    changed = sum(int(np.sum(old != new)) for old, new in pairs)
    return changed / sum(old.size for old, _ in pairs)


def weight_bytes(model: keras.Model) -> int:
    """Returns what the variables of a model occupy."""
    return sum(weights.nbytes for weights in model.get_weights())


def aligned() -> bool:
    """Says whether all products of the network fit Tensor Cores."""
    advice = tfmix.advise(build_model(1.0), BATCH_SIZE)
    return all(row.aligned for row in advice.rows)


def claims(runs: tuple[common.Run, ...]) -> dict[str, bool]:
    """Returns what the example says, and whether it came true."""

    def mean(name: str) -> float:
        return float(np.mean([r.score for r in runs if r.variant == name]))

    before = np.mean([percent(run, "before") for run in runs]) / 100
    gain = mean("float32") - before
    return {
        "every product's sizes are multiples of 8": aligned(),
        f"float16 with a scale of {SCALE:g} forecasts as well as float32, "
        "within the noise of the seeds or a point": common.close(runs, SCALED),
        "without a scale, fine-tuning gains less than half of that": bool(
            mean(UNSCALED) - before < LITTLE * gain
        ),
        "converted to float16 for inference, each forecasts as before": all(
            abs(percent(run, "served") - 100 * run.score) <= SERVED_GAP
            for run in runs
        ),
    }


def percent(run: common.Run, column: str) -> float:
    """Returns the number of a column."""
    return float(run.columns[column].strip("%"))


RECIPE = recipe.Recipe(
    __doc__,
    list(VARIANTS),
    train,
    claims,
    length=("epochs", EPOCHS, "Passes over the data."),
    picture=("fine_tuning", "CO2 growth: squared error in variances"),
    unit="test R2",
)


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; returns 1 if a claim is false."""
    code = RECIPE.main(argv)
    cast = tfmix.convert_model(build_model(1.0), "float16")
    print(f"\nthe cast network:\n{tfmix.advise(cast, BATCH_SIZE)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
