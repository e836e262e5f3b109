"""Cast a trained network to float16, fine-tune it, convert it for inference.

An LSTM learns in float32 to predict temperatures of the Pacific. It is cast to
float16, with float32 masters, and fine-tuned on the growth of carbon dioxide
in the air. That growth is a fraction of 0.003 a month: without the loss scale
of 128, some gradients would be too small for float16. Both data sets come with
statsmodels. It takes half a minute on a CPU.
"""

import keras
import numpy as np
from statsmodels import datasets

import tfmix

POLICY = "float16"  # "float32" to compare with
SCALE = 128.0  # 1.0 is no scale, with which it learns less
SEED = 0
EPOCHS = 50
MONTHS, FRAMES = 8, 16  # a frame is 8 months, a window 16 frames


def windows(series):
    """Returns windows, in standard deviations, and the 8 months after each."""
    frames = np.lib.stride_tricks.sliding_window_view(series, MONTHS)
    count = len(frames) - FRAMES - MONTHS + 1
    x = np.stack([frames[start : start + FRAMES] for start in range(count)])
    x = (x - series.mean()) / series.std()
    y = frames[FRAMES + MONTHS - 1 :][:count]
    return x.astype("float32"), y.astype("float32")


def network(unit):
    """Builds the network; its last layer converts to the series' unit."""
    return keras.Sequential(
        [
            keras.Input((FRAMES, MONTHS)),
            # The orthogonal default needs `qr`, which JAX lacks in float16.
            keras.layers.LSTM(32, recurrent_initializer="glorot_uniform"),
            keras.layers.Dense(MONTHS),
            tfmix.float32_output(),
            keras.layers.Rescaling(unit, dtype="float32"),
        ]
    )


keras.utils.set_random_seed(SEED)
pacific = datasets.elnino.load_pandas().data.iloc[:, 1:].to_numpy().ravel()
trained = network(pacific.std())
trained.compile(keras.optimizers.Adam(0.01), loss="mse")
x, y = windows(pacific)
trained.fit(x, y - y.mean(), batch_size=64, epochs=6, verbose=2)

weeks = datasets.co2.load_pandas().data["co2"].interpolate()
growth = np.diff(np.log(weeks.resample("MS").mean().to_numpy()))
source = network(growth.std())
source.set_weights(trained.get_weights())
model = tfmix.convert_model(source, POLICY)  # a copy with float16 variables

x, y = windows(growth)
x, y, test_x, test_y = x[:384], y[:384], x[-60:], y[-60:]
if keras.backend.backend() == "jax":
    data = {"x": x.astype(POLICY), "y": y.astype(POLICY), "batch_size": 192}
else:
    import tensorflow as tf

    pairs = tf.data.Dataset.from_tensor_slices(
        (x.astype(POLICY), y.astype(POLICY))
    )
    pairs = pairs.shuffle(384, seed=SEED).batch(192)
    data = {"x": pairs, "shuffle": False}
masters = tfmix.optimizers.MasterWeightOptimizer(keras.optimizers.Adam(0.01))
model.compile(tfmix.LossScaleOptimizer(masters, loss_scale=SCALE), loss="mse")
model.fit(**data, epochs=EPOCHS, verbose=2)

served = tfmix.convert_model(model, "float16", inference=True)
error = served.predict(test_x, verbose=0) - test_y
r_squared = 1 - np.sum(error**2) / np.sum((test_y - test_y.mean()) ** 2)
print(f"R2 on the last five years: {r_squared:.1%}")
