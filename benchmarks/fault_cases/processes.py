"""Child processes that are listened to line by line, and end with us."""

import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

# `python -m benchmarks...` finds the package from here only.
_REPOSITORY = pathlib.Path(__file__).parents[2]


class Child:
    """Runs one of our modules with this Python and reads what it prints.

    Args:
        module: String, as `python -m` takes it.
        arguments: Strings.
        environment: Variables on top of this process's own.
        own_group: Bool, whether `kill` also ends what the child started.
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
            TimeoutError: If nothing comes for so long.
        """
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"silent for {seconds:g} s") from None

    def wait(self) -> int:
        """Returns the exit code; negative is the signal that ended it."""
        return self._process.wait()

    def kill(self) -> None:
        """Ends the child, and with `own_group` what it started."""
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
