"""The faults, and a method that puts one into a source tree."""

import dataclasses
import pathlib
import tomllib

FILE = pathlib.Path(__file__).parent / "faults.toml"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One entry of `faults.toml`."""

    name: str
    why: str
    folder: str
    old: str
    new: str
    backend: str
    tests: list[str]

    def apply(self, root: pathlib.Path) -> pathlib.Path:
        """Puts the fault into the tree at `root`; returns the changed file."""
        files = sorted((root / self.folder).rglob("*.py"))
        texts = {path: path.read_text(encoding="utf-8") for path in files}
        found = {path: text.count(self.old) for path, text in texts.items()}
        if sum(found.values()) != 1:
            raise ValueError(
                f"The text of the fault {self.name!r} must occur exactly once "
                f"below {self.folder}. Received: old={self.old!r}, which "
                f"occurs {sum(found.values())} times. Change faults.toml."
            )
        (path,) = (path for path, count in found.items() if count)
        changed = texts[path].replace(self.old, self.new)
        path.write_text(changed, encoding="utf-8")
        return path


def faults() -> list[Fault]:
    """Returns all faults."""
    text = FILE.read_text(encoding="utf-8")
    return [Fault(**entry) for entry in tomllib.loads(text)["fault"]]
