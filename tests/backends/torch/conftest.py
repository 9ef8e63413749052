"""These tests need Keras on PyTorch, which it decides at its first import:
``tests/backends/test_torch.py`` runs them in a process of their own."""

import os

RUNS_HERE = os.environ.get("KERAS_BACKEND") == "torch"
collect_ignore_glob = [] if RUNS_HERE else ["test_*.py"]


def pytest_terminal_summary(terminalreporter):
    if not RUNS_HERE:
        terminalreporter.write_line(
            "tests/backends/torch: run through tests/backends/test_torch.py, or with "
            "KERAS_BACKEND=torch"
        )
