"""These tests need Keras on TensorFlow, which it decides at its first import."""

import importlib.util
import os

RUNS_HERE = (
    os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow"
    and importlib.util.find_spec("tensorflow") is not None
)
collect_ignore_glob = [] if RUNS_HERE else ["test_*.py"]
