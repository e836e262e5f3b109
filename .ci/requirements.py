"""Prints what setup.cfg asks for, ready for `pip install -r`.

The Makefile installs from here instead of `pip install -e .[...]` for one
reason: users get `tensorflow`, but a test machine without a GPU is better off
with `tensorflow-cpu` (half the size), which no `tensorflow` requirement
accepts. `make TENSORFLOW="tensorflow[and-cuda]" test` takes the GPU build.

With the word `demo` it prints the library's own dependencies and the demo's
data. Without it, it prints all extras, but only if they are named those that no
test needs: the compilers of accelerators, some gigabytes, what builds the
guide, and the data of a benchmark.

Usage: python .ci/requirements.py TENSORFLOW [demo | EXTRA...]
"""

import configparser
import pathlib
import re
import sys

IF_NAMED = {"docs", "nvidia", "real-data", "tpu"}
# What `make demo` takes of the extra `examples`.
DEMO = ["scikit-learn"]
SETUP_CFG = pathlib.Path(__file__).parent.parent / "setup.cfg"


def requirements(tensorflow: str, *words: str) -> list[str]:
    """Returns the dependencies and the chosen extras, one per line."""
    config = configparser.ConfigParser()
    config.read(SETUP_CFG, encoding="utf-8")
    lines = config["options"]["install_requires"].split()
    if "demo" in words:
        lines += DEMO
    else:
        for name, extra in config["options.extras_require"].items():
            if name not in IF_NAMED.difference(words):
                lines += extra.split()
    found = [re.sub(r"^tensorflow\b", tensorflow, line) for line in lines]
    return sorted(set(found))


if __name__ == "__main__":
    print("\n".join(requirements(*sys.argv[1:])))
