"""Keras's `compile`, and what tfmix lets it do for every 16-bit model.

From the first 16-bit policy of a process on: copies and loaded models come
about where no policy is active. From the first file of a guarded model on it
looks at optimizers of such files alone.
"""

from collections.abc import Callable

from tfmix._keras import replacements, training

PLACE: replacements.Place = (training.TRAINER, "compile")
_Compile = Callable[..., None]
_replacements = replacements.Replacements()
_makers: list[Callable[[_Compile], _Compile]] = []
_sees_all = False


def use(make: Callable[[_Compile], _Compile]) -> None:
    """Sets what makes the stand-in out of Keras's own method."""
    _makers[:] = [make]


def stand_by(*, for_files: bool = False) -> None:
    """Puts the stand-in in its place, until `stand_down`."""
    global _sees_all
    _sees_all = _sees_all or not for_files
    _replacements.set(dict.fromkeys([PLACE], *_makers))


def sees_all() -> bool:
    """Says whether it looks at every model, not only at those of files."""
    return _sees_all


def stand_down() -> None:
    """Gives Keras its own method back."""
    global _sees_all
    _sees_all = False
    _replacements.set({})
