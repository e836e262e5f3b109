"""The `tfmix` script: reads its words before Keras is imported.

`import tfmix` imports Keras, which imports TensorFlow: seconds that a look at
the help need not wait for. So `tfmix/tools/cli.py` is loaded here as a file.
"""

import importlib.util
import pathlib


def main() -> int:
    """Runs `tfmix.tools.cli.main` on the words of the process."""
    package = importlib.util.find_spec("tfmix")
    if package is None or package.origin is None:
        raise ImportError("The package tfmix is not installed. Install it.")
    path = pathlib.Path(package.origin).with_name("tools") / "cli.py"
    spec = importlib.util.spec_from_file_location("tfmix_cli", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is missing. Install tfmix anew.")
    cli = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cli)
    return int(cli.main())
