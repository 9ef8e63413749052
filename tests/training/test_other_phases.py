"""What a fit takes beside its steps: validation, and data that is held as a whole."""

import gc
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from fake_backend import RESIDENT_BYTES, SAMPLE_BYTES, chain_problem
from sliced_validation import in_slices

import keras_remat
from keras_remat.backends.base import load_backend
from keras_remat.core.events import EventKind
from keras_remat.core.limit import Limit
from keras_remat.reporting.fit_report import AutotuneReport, load_report
from keras_remat.training import other_phases
from keras_remat.training.other_phases import (
    ValidationNeed,
    even_size,
    forward_bytes,
    whole_data_news,
)
from keras_remat.training.tell import large_validation
from keras_remat.units import MIB

#: On PyTorch's CPU nothing counts bytes but those of a model and its steps: validation is
#: predicted, and what one model's fit leaves is not seen beside another's.
ON_TORCH = keras.backend.backend() == "torch"
COUNTS_ALL = pytest.mark.skipif(ON_TORCH, reason="nothing counts what lies beside a model")


def test_forward_ops_keep_two_values_of_a_chain_at_once():
    assert forward_bytes(chain_problem(8)) == 2 * 8 * SAMPLE_BYTES


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize(("size", "holds"), [(8, True), (16, True), (17, False), (800, False)])
def test_what_validation_needs_and_which_batch_keeps_a_limit(size, holds, factor):
    limit = Limit(RESIDENT_BYTES + 2 * 16 * SAMPLE_BYTES * factor)
    need = ValidationNeed.of(chain_problem(8), 8, size, factor)
    assert limit.holds(need.needed_bytes) == holds
    assert need.fitting_size(limit) == 16


@pytest.mark.parametrize(
    ("samples", "batches"), [(16, 16), (17, 17), (31, 31), (32, 32), (90, 32), (None, 32)]
)
def test_beside_a_validation_batch_lies_the_next_one(samples, batches):
    need = ValidationNeed(RESIDENT_BYTES, 100.0, 16, 10.0, samples)
    assert need.needed_bytes == RESIDENT_BYTES + 16 * 100 + 10 * batches
    size = need.fitting_size(Limit(need.needed_bytes))
    assert 14 <= size <= 16
    assert replace(need, size=size).needed_bytes <= need.needed_bytes


def test_where_no_batch_keeps_the_limit_it_is_to_be_raised():
    limit = Limit(RESIDENT_BYTES)
    need = ValidationNeed.of(chain_problem(8), 8, 8, 1.0)
    assert need.fitting_size(limit) == 0
    assert large_validation(8, need.needed_bytes, limit, 0).message.endswith("raise the limit.")


@pytest.mark.parametrize(
    ("samples", "most", "even"), [(64, 20, 16), (64, 64, 64), (700, 200, 175), (7, 5, 5), (9, 1, 1)]
)
def test_batches_of_one_size_where_that_takes_no_more_than_twice_as_many(samples, most, even):
    assert even_size(samples, most) == even


class Validating:
    """A validation of 720 samples, of which 16 at once keep to the limit."""

    def __init__(self, monkeypatch, *, sample_wise=True, told=False, in_use=RESIDENT_BYTES):
        self.sizes, self.warned, self.peak_bytes = [], [], 0
        answers = {
            "validation_batch_size": 720, "validation_samples": 720, "validation_of_fit": (None,),
            "validates_sample_wise": sample_wise, "validation_batches_are_told": told,
        }  # fmt: skip
        for name, answer in answers.items():
            monkeypatch.setattr(other_phases, name, lambda model, answer=answer: answer)
        monkeypatch.setattr(other_phases, "validate_in", lambda *of: self.sizes.append(of[-1]))
        step = SimpleNamespace(
            problem=chain_problem(8), traced=SimpleNamespace(whole=None), micro_batches=1
        )
        running = SimpleNamespace(costs=step, batch_size=8)
        fit = SimpleNamespace(
            limit=Limit(RESIDENT_BYTES + 2 * 16 * SAMPLE_BYTES),
            record=SimpleNamespace(running=running), note_phase=lambda *numbers: None,
            warn=lambda *news: self.warned.append(news[-1]), event=lambda *news: None,
        )  # fmt: skip
        device = SimpleNamespace(
            in_use_bytes=lambda: in_use, begin_watch=lambda: None,
            phase_peak_bytes=lambda: self.peak_bytes,
        )  # fmt: skip
        self.validation = other_phases.Validation(None, fit, device)

    def run(self, peak_bytes=0):
        self.peak_bytes = peak_bytes
        self.validation.begins()
        self.validation.ends()


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, [16]),
        ({"in_use": RESIDENT_BYTES + 16 * SAMPLE_BYTES}, [8]),
        ({"sample_wise": False}, []),
        ({"told": True}, []),
    ],
)
def test_validation_is_cut_where_that_changes_no_number_and_nobody_said_how(
    monkeypatch, given, sizes
):
    of = Validating(monkeypatch, **given)
    of.run()
    assert of.sizes == sizes
    assert ["validation_batch_size=16" in text for text in of.warned] == [True] * (not sizes)


def test_what_a_validation_takes_above_its_prediction_corrects_the_next(monkeypatch):
    of = Validating(monkeypatch)
    for times in (2, 2, 1):
        of.run(RESIDENT_BYTES + times * 2 * 16 * SAMPLE_BYTES)
    assert of.sizes == [16, 8, 4]


def test_large_data_in_the_memory_that_counts_is_named():
    data = ({"a": np.zeros(MIB, "int8"), "b": [np.zeros(MIB, "int8")]}, None, None)
    assert "2 MiB of arrays" in whole_data_news(data, True, Limit(20 * MIB)).message
    assert not whole_data_news(data, True, Limit(21 * MIB))
    assert not whole_data_news(data, False, Limit(20 * MIB))
    assert not whole_data_news((iter(()), None, None), True, Limit(MIB))


def fitted(tmp_path, size):
    """Fits dense layers under a limit that plain steps of 16 samples keep, beside what other tests
    of this process hold, and twice the 16 MiB that 2,048 samples take forward: a chunk that is free
    is handed out whole where it is less than twice as large."""
    gc.collect()  # else the garbage of other tests is room here
    limit = load_backend().device.in_use_bytes() + 38 * MIB
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


@COUNTS_ALL
def test_validation_that_needs_too_much_is_told_before_it_runs_and_measured(tmp_path):
    report, told, caught = fitted(tmp_path, 8192)
    assert str(EventKind.VALIDATION) in told[0]
    (message,) = [text for text in caught if "Validation of 8192 samples" in text]
    size = int(message.split("validation_batch_size=")[1].rstrip("."))
    assert 2048 <= size < 8192
    report, told, caught = fitted(tmp_path, 2048)
    assert not [text for text in caught if "Validation of" in text]
    if report.peaks_source == "measured":
        assert report.phase_peak_bytes["validation"] <= report.limit_bytes
        assert report.phase_peak_bytes["between steps"] > 0
        assert "validation " in report.verdict()
    read = load_report(tmp_path / "r.json", lambda document, source: None)
    assert read.phase_peak_bytes == report.phase_peak_bytes


@pytest.mark.parametrize(("samples", "every", "sizes"), [(500, 1, {100, 125, 250}), (499, 2, ())])
def test_a_step_in_slices_keeps_a_limit_and_so_does_validation(samples, every, sizes):
    """Keras validates in batches as large as those that train; nothing cuts those. 499 is a prime:
    a smaller batch is left at the end."""
    plain, _ = in_slices(samples, every)
    gc.collect()
    limit = load_backend().device.in_use_bytes() + 20 * MIB
    history, report = in_slices(samples, every, limit)
    (told,) = [e.message for e in report.events if e.kind == EventKind.VALIDATION]
    assert told.startswith(f"Validation of {samples} samples at once would need about ")
    (size,) = re.findall(r"it runs in batches of (\d+), with the same numbers\.$", told)
    assert int(size) < samples
    assert not sizes or int(size) in sizes
    assert len(history["val_loss"]) == 2 // every
    for name, values in plain.items():
        assert history[name] == pytest.approx(values, rel=1e-5)
    assert report.predicted_phases == (["validation"] if ON_TORCH else [])
    if report.peaks_source == "measured":
        assert report.phase_peak_bytes["validation"] <= limit


def test_a_phase_over_the_limit_has_a_row_that_says_so():
    report = AutotuneReport(limit_bytes=MIB, phase_peak_bytes={"validation": 2 * MIB})
    (row,) = [line for line in report.verdict().splitlines() if "validation" in line]
    assert row.split()[1:5] == ["2.0", "MiB", "200", "%"]
    assert row.endswith("limit NOT KEPT")


@COUNTS_ALL
@pytest.mark.parametrize("fits", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_fits_in_a_row_leave_no_more_bytes_than_the_first(fits):
    device = load_backend().device
    layers = [keras.layers.Dense(512, "relu") for _ in range(4)]
    model = keras.Sequential([keras.layers.Input((512,)), *layers])
    model.compile("sgd", "mse")
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
