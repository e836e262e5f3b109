"""The `tfmix` script: reads its words before Keras is imported.

`import tfmix` imports Keras, which imports TensorFlow: seconds that a look at
the help need not wait for. So the command line runs as a file, without its
package.
"""

import pathlib
import runpy

_CLI = pathlib.Path(__file__).with_name("tfmix") / "tools" / "cli.py"


def main() -> int:
    """Runs `tfmix.tools.cli.main` on the words of the process."""
    return int(runpy.run_path(str(_CLI))["main"]())
