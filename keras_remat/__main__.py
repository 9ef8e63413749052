"""``python -m keras_remat`` is the command line."""

import sys

from keras_remat.cli import main

if __name__ == "__main__":
    sys.exit(main())
