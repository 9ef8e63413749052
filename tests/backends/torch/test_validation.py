"""Validation inside ``fit`` on PyTorch keeps the limit, with plain ``fit``'s numbers."""

import re

import pytest
from sliced_validation import in_slices

from keras_remat.core.events import EventKind
from keras_remat.units import MIB


def test_batches_of_a_validation_are_cut_and_a_smaller_one_is_left():
    plain, _ = in_slices(499, 2)  # 499 is a prime: a smaller batch is left at the end
    history, report = in_slices(499, 2, 20 * MIB)
    (told,) = [event.message for event in report.events if event.kind == EventKind.VALIDATION]
    (size,) = re.findall(r"it runs in batches of (\d+), with the same numbers\.$", told)
    assert int(size) < 499
    assert len(history["val_loss"]) == 1
    for name, values in plain.items():
        assert history[name] == pytest.approx(values, rel=1e-5)
    assert report.predicted_phases == ["validation"]
    assert report.phase_peak_bytes["validation"] <= 20 * MIB
