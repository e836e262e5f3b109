"""Child processes whose output is read line by line."""

import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

# `python -m benchmarks...` only finds the package from this folder.
_REPOSITORY = pathlib.Path(__file__).parents[2]


class Child:
    """Runs one of our modules with this Python and reads its output.

    Args:
        module: String, the name for `python -m`.
        arguments: Strings.
        environment: Variables in addition to this process's own.
        own_group: Bool, whether `kill` also ends the child's processes.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        own_group: bool = False,
    ) -> None:
        self._own_group = own_group
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=_REPOSITORY,
            env={**os.environ, **(environment or {})},
            start_new_session=own_group,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def line(self, seconds: float) -> str | None:
        """Returns the next line, or `None` once the child has ended.

        Raises:
            TimeoutError: If there is no line for that long.
        """
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"silent for {seconds:g} s") from None

    def wait(self) -> int:
        """Returns the exit code; a negative one is the signal that ended it."""
        return self._process.wait()

    def kill(self) -> None:
        """Ends the child, and its processes with `own_group`."""
        if self._process.poll() is None:
            if self._own_group:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()
        # The pipe is closed once the last of its writers has ended.
        self._listener.join(timeout=10)

    def _listen(self) -> None:
        with self._process.stdout as stdout:
            for line in stdout:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)
