"""Runs the command line as `python -m tfmix`."""

import sys

from tfmix.tools import cli

if __name__ == "__main__":
    sys.exit(cli.main())
