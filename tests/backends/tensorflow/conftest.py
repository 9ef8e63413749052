"""These tests need Keras on TensorFlow."""

import on_tensorflow

collect_ignore_glob = [] if on_tensorflow.RUNS_HERE else ["test_*.py"]
