"""Prints what setup.cfg asks for, ready for `pip install -r`.

The Makefile installs from here instead of `pip install -e .[...]` for one
reason: users get `tensorflow`, but a test machine without a GPU is better off
with `tensorflow-cpu` (half the size), which no `tensorflow` requirement
accepts. `make TENSORFLOW="tensorflow[and-cuda]" test` takes the GPU build.

The compilers of accelerators, some gigabytes, are left out unless named.

Usage: python .ci/requirements.py TENSORFLOW [tpu] [nvidia]
"""

import configparser
import pathlib
import re
import sys

COMPILERS = {"tpu", "nvidia"}
SETUP_CFG = pathlib.Path(__file__).parent.parent / "setup.cfg"


def requirements(tensorflow: str, *compilers: str) -> list[str]:
    """Returns the dependencies and extras of setup.cfg, one per line."""
    config = configparser.ConfigParser()
    config.read(SETUP_CFG, encoding="utf-8")
    lines = config["options"]["install_requires"].split()
    for name, extra in config["options.extras_require"].items():
        if name not in COMPILERS.difference(compilers):
            lines += extra.split()
    found = [re.sub(r"^tensorflow\b", tensorflow, line) for line in lines]
    return sorted(set(found))


if __name__ == "__main__":
    print("\n".join(requirements(*sys.argv[1:])))
