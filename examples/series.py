"""Two monthly records of nature, cut into windows to forecast from.

Both come with statsmodels: the temperature of the Pacific off Peru, and the
carbon dioxide in the air over Mauna Loa.
"""

import dataclasses

import numpy as np

# A frame is eight months, a window sixteen frames, each a month after the last.
MONTHS, FRAMES = 8, 16


@dataclasses.dataclass(frozen=True)
class Record:
    """Windows of a series, and its unit: one standard deviation of it."""

    x: np.ndarray  # (windows, FRAMES, MONTHS), in standard deviations
    y: np.ndarray  # (windows, MONTHS), as the series was measured
    unit: float


def pacific() -> Record:
    """Returns the temperatures of the Pacific, 1950 to 2010, in kelvins."""
    from statsmodels import datasets

    table = datasets.elnino.load_pandas().data
    return windows(table.iloc[:, 1:].to_numpy().ravel())


def mauna_loa() -> Record:
    """Returns how much more CO2 there was each month, 1958 to 2001."""
    from statsmodels import datasets

    weeks = datasets.co2.load_pandas().data["co2"].interpolate()
    return windows(np.diff(np.log(weeks.resample("MS").mean().to_numpy())))


def windows(series: np.ndarray) -> Record:
    """Cuts a monthly series into windows, each with the 8 months after it."""
    unit = float(series.std())
    frames = np.lib.stride_tricks.sliding_window_view(series, MONTHS)
    count = len(frames) - FRAMES - MONTHS + 1
    x = np.stack([frames[at : at + FRAMES] for at in range(count)])
    # The last frame of a window ends where the forecast begins.
    y = frames[FRAMES + MONTHS - 1 :][:count]
    x = (x - series.mean()) / unit
    return Record(x.astype("float32"), y.astype("float32"), unit)
