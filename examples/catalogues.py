"""Texts in many languages: the translation catalogues that Django ships.

Django translates its messages into some eighty languages; the compiled
catalogues (`.mo` files, read with the standard library's `gettext`) come with
the package.
"""

import gettext
import importlib.util
import pathlib
import re
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

# Shared by all translations of a message, so they tell nothing: placeholders,
# tags and links.
_NOT_TEXT = re.compile(r"%\(\w+\)\w|%\w|\{\w*\}|<[^>]*>|&\w+;|https?://\S+")
_LEAST_BYTES = 12
# One message in five, the same in every language, is for the test.
_PARTS = 5


def texts(language: str) -> Iterator[tuple[str, str]]:
    """Yields each message of Django and its translation, without markup.

    Args:
        language: A folder's name below `locale/`, for instance `"pt_BR"`.

    Raises:
        ModuleNotFoundError: If Django is not installed.
        ValueError: If Django has no such language.
    """
    spec = importlib.util.find_spec("django")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'django': pip install it.")
    root = pathlib.Path(spec.origin).parent
    files = sorted(root.rglob(f"locale/{language}/LC_MESSAGES/*.mo"))
    if not files:
        raise ValueError(
            "`language` must be one that Django is translated into, such as "
            f"'de'. Received: language={language!r}."
        )
    for path in files:
        with path.open("rb") as file:
            # It has no public list of its messages.
            catalogue = gettext.GNUTranslations(file)._catalog
        for message, translation in catalogue.items():
            # A plural's key is a pair; the empty one is the file's header.
            if isinstance(message, str) and message:
                cleaned = " ".join(_NOT_TEXT.sub(" ", translation).split())
                if len(cleaned.encode()) >= _LEAST_BYTES:
                    yield message, cleaned


def encoded(text: str, length: int) -> np.ndarray:
    """Returns the first bytes of a text, plus one; zeros fill it up."""
    found = np.zeros(length, "int32")
    raw = np.frombuffer(text.encode()[:length], "uint8")
    found[: len(raw)] = raw.astype("int32") + 1
    return found


def load(languages: Sequence[str], length: int) -> tuple[np.ndarray, ...]:
    """Reads the texts of some languages, four in five to learn from.

    No message is in both parts, in whatever language, and no text that two of
    the languages share is in either.

    Args:
        languages: As `texts` takes them; a label is the position in here.
        length: Bytes to keep of each text.

    Returns:
        Training bytes `(texts, length)`, test bytes, and the labels of both,
        all int32. A byte is 1 to 256, and 0 is padding.
    """
    found: dict[str, set[tuple[int, str]]] = {}
    for label, language in enumerate(languages):
        for message, text in texts(language):
            found.setdefault(text, set()).add((label, message))
    parts: tuple[list, list] = ([], [])
    for text, sources in sorted(found.items()):
        if len({label for label, _ in sources}) == 1:
            label, message = min(sources)
            tested = zlib.crc32(message.encode()) % _PARTS == 0
            parts[tested].append((encoded(text, length), label))
    train, test = (
        [np.array(column, "int32") for column in zip(*part, strict=True)]
        for part in parts
    )
    return train[0], test[0], train[1], test[1]
