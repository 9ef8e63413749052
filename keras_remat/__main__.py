"""Runs the command line for ``python -m keras_remat``; though short, Python asks for this file."""

import sys

from keras_remat.cli import main

if __name__ == "__main__":
    sys.exit(main())
