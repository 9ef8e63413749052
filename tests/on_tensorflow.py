"""Whether Keras runs on TensorFlow here, which it decides at its first import."""

import importlib.util
import os

RUNS_HERE = (
    os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow"
    and importlib.util.find_spec("tensorflow") is not None
)
