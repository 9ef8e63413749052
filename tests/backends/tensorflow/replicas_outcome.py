"""Runs cases of ``replicas_case.py`` in processes of their own, each once."""

import functools
from pathlib import Path

import pytest
from own_process import came_of

from keras_remat.backends.versions import OLDEST_FOR_REPLICAS, sentence_for

TOO_OLD = sentence_for("MirroredStrategy", OLDEST_FOR_REPLICAS)
needs_mirrored = pytest.mark.skipif(bool(TOO_OLD), reason=TOO_OLD)

#: Cases that are run together, those of one test file: starting a process takes longer than each of
#: them.
TOGETHER = (
    ("embedding", "refusals"),
    ("resident", "memory", "undone", "models", "without_strategy"),
)


def outcome(case):
    """Returns what came of a case; skips where Keras is too old for several devices."""
    if TOO_OLD:
        pytest.skip(TOO_OLD)
    return _run(next((cases for cases in TOGETHER if case in cases), (case,)))[case]


@functools.cache
def _run(cases):
    return came_of(Path(__file__).parent / "replicas_case.py", *cases)
