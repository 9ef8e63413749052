"""These tests need Keras on JAX, which it decides at its first import:
``tests/backends/test_jax.py`` runs them in a process of their own."""

import os

RUNS_HERE = os.environ.get("KERAS_BACKEND") == "jax"
collect_ignore_glob = [] if RUNS_HERE else ["test_*.py"]


def pytest_terminal_summary(terminalreporter):
    if not RUNS_HERE:
        terminalreporter.write_line(
            "tests/backends/jax: run through tests/backends/test_jax.py, or with KERAS_BACKEND=jax"
        )
