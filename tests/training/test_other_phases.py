"""What a fit takes beside its steps: validation, and data that is held as a whole."""

import gc
import warnings

import keras
import numpy as np
import pytest
from fake_backend import RESIDENT_BYTES, SAMPLE_BYTES, chain_problem

import keras_remat
from keras_remat.backends.base import load_backend
from keras_remat.core.events import EventKind
from keras_remat.core.limit import Limit
from keras_remat.reporting.fit_report import AutotuneReport, load_report
from keras_remat.training.other_phases import (
    forward_bytes,
    validation_news,
    whole_data_news,
)
from keras_remat.units import MIB


def test_forward_ops_keep_two_values_of_a_chain_at_once():
    assert forward_bytes(chain_problem(8)) == 2 * 8 * SAMPLE_BYTES


@pytest.mark.parametrize(("size", "told"), [(8, ""), (16, ""), (17, "=16"), (800, "=16")])
def test_validation_over_the_limit_is_told_with_a_batch_that_keeps_it(size, told):
    limit = Limit(RESIDENT_BYTES + 2 * 16 * SAMPLE_BYTES)
    news = validation_news(chain_problem(8), 8, size, limit)
    assert (news is None) == (not told)
    assert news is None or f"validation_batch_size{told}." in news.message


def test_where_no_batch_keeps_the_limit_it_is_to_be_raised():
    news = validation_news(chain_problem(8), 8, 8, Limit(RESIDENT_BYTES))
    assert news.message.endswith("raise the limit.")


def test_large_data_in_the_memory_that_counts_is_named():
    data = ({"a": np.zeros(MIB, "int8"), "b": [np.zeros(MIB, "int8")]}, None, None)
    assert "2 MiB of arrays" in whole_data_news(data, True, Limit(20 * MIB)).message
    assert not whole_data_news(data, True, Limit(21 * MIB))
    assert not whole_data_news(data, False, Limit(20 * MIB))
    assert not whole_data_news((iter(()), None, None), True, Limit(MIB))


def fitted(tmp_path, size):
    """Fits dense layers under a limit that plain steps of 16 samples keep, beside what other tests
    of this process hold."""
    limit = load_backend().device.in_use_bytes() + 23 * MIB
    layers = [keras.layers.Dense(2048, "relu"), keras.layers.Dense(8)]
    model = keras.Sequential([keras.layers.Input((64,)), *layers])
    model.compile("sgd", "mse")
    x, y = np.zeros((64, 64), "float32"), np.zeros((64, 8), "float32")
    more = np.zeros((size, 64), "float32"), np.zeros((size, 8), "float32")
    told = []

    class Order(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            told.append([str(event.kind) for event in tuner.report.events])

    tuner = keras_remat.RematAutotune(
        limit, batch_size="keep", margin=0.0, report_path=tmp_path / "r.json", verbose=0
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(
            x, y, batch_size=16, epochs=2, verbose=0, shuffle=False, callbacks=[tuner, Order()],
            validation_data=more, validation_batch_size=size,
        )  # fmt: skip
    return tuner.report, told, [str(one.message) for one in caught]


def test_validation_that_needs_too_much_is_told_before_it_runs_and_measured(tmp_path):
    report, told, caught = fitted(tmp_path, 4096)
    assert str(EventKind.VALIDATION) in told[0]
    (message,) = [text for text in caught if "Validation of 4096 samples" in text]
    size = int(message.split("validation_batch_size=")[1].rstrip("."))
    assert 2048 <= size < 4096
    gc.collect()
    report, told, caught = fitted(tmp_path, 2048)
    assert not [text for text in caught if "Validation of" in text]
    if report.peaks_source == "measured":
        assert report.phase_peak_bytes["validation"] <= report.limit_bytes
        assert report.phase_peak_bytes["between steps"] > 0
        assert "validation " in report.verdict()
    read = load_report(tmp_path / "r.json", lambda document, source: None)
    assert read.phase_peak_bytes == report.phase_peak_bytes


def test_a_phase_over_the_limit_has_a_row_that_says_so():
    report = AutotuneReport(limit_bytes=MIB, phase_peak_bytes={"validation": 2 * MIB})
    (row,) = [line for line in report.verdict().splitlines() if "validation" in line]
    assert row.split()[1:5] == ["2.0", "MiB", "200", "%"]
    assert row.endswith("limit NOT KEPT")


@pytest.mark.parametrize("fits", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_fits_in_a_row_leave_no_more_bytes_than_the_first(fits):
    device = load_backend().device
    layers = [keras.layers.Dense(512, "relu") for _ in range(4)]
    model = keras.Sequential([keras.layers.Input((512,)), *layers])
    model.compile("adam", "mse")
    x = np.zeros((256, 512), "float32")

    def held_after(*callbacks):
        model.fit(x, x, batch_size=64, verbose=0, callbacks=list(callbacks), validation_data=(x, x))
        gc.collect()
        return device.in_use_bytes()

    plain = held_after()
    limit = plain + 6 * MIB if device.has_statistics else "16MiB"
    held = [
        held_after(keras_remat.RematAutotune(limit, batch_size="keep", margin=0.0, verbose=0))
        for _ in range(fits)
    ]
    # batches wait in the input pipeline, and chunks are larger than what was asked for
    assert max(held) <= plain + 3 * MIB
