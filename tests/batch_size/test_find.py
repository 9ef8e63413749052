"""The largest batch of a model, the whole way: traced, searched, and trained where it runs."""

import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from fake_backend import RESIDENT_BYTES, FakeBackend, batch_of, store_all_peak

from keras_remat.backends.batches import batch_size_of
from keras_remat.batch_size import find
from keras_remat.batch_size.find import find_max_batch_size
from keras_remat.batch_size.sizes import RESOLUTION
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.planning.make_plan import make_plan


def found_on(backend, monkeypatch, *, batch=8, limit=None, **options):
    monkeypatch.setattr("keras_remat.planning.make_plan.load_backends", lambda *given: [backend])
    return find_max_batch_size(
        SimpleNamespace(name="fake", compiled=True),
        batch_of(0, batch),
        limit or store_all_peak(40),
        margin=0.0,
        **{"time_limit_s": 0.3} | options,
    )


@pytest.mark.parametrize("batch", [64, 65, 1000])
def test_a_batch_that_does_not_fit_is_halved_until_one_does(monkeypatch, batch):
    found = found_on(FakeBackend(), monkeypatch, batch=batch)
    assert found.max_batch_size > 40
    assert found.plan.measured.peak_bytes <= store_all_peak(40)


def test_what_is_halved_for_a_card_takes_no_memory():
    class TooLarge(SimpleNamespace):
        shape, dtype = (10**12, 4), np.dtype("float32")

    def traced(batch):
        if batch_size_of(batch) > 300:
            raise ScheduleNotFoundError(0, 0)
        return batch

    batch = (TooLarge(), TooLarge())
    found = find._first_that_fits(SimpleNamespace(inputs=None), batch, traced, runs=False)
    assert batch_size_of(found) == 232


def test_not_even_one_sample_fits(monkeypatch):
    with pytest.raises(InfeasibleBudgetError, match="No schedule fits"):
        found_on(FakeBackend(), monkeypatch, batch=8, limit=RESIDENT_BYTES + 2000)


def test_a_batch_that_runs_out_of_memory_does_not_fit(monkeypatch):
    """The device has less than it said: its own error ended the search."""
    steps = []

    class Watching(FakeBackend):
        def lower(self, *given, **options):
            if len(steps) == 1:
                assert steps[0]() is None, "half of the batch gets all of the memory"
            run = super().lower(*given, **options)
            steps.append(weakref.ref(run))
            return run

    backend = Watching()
    backend.has_bytes = store_all_peak(30)
    found = found_on(backend, monkeypatch, batch=64, limit=store_all_peak(100))
    assert found.plan.measured.peak_bytes <= backend.has_bytes


def test_a_second_size_that_runs_out_of_memory_is_not_measured(monkeypatch):
    """There is no half of one sample, so two are measured, from the sixth call of a step on."""
    backend = FakeBackend()
    backend.fails_at = {6}
    found = found_on(backend, monkeypatch, batch=1)
    assert found.fit is None
    assert found.plan.measured is not None


class Grouping(FakeBackend):
    """Its model takes multiples of four samples."""

    def trace(self, model, batch, micro_batches=1):
        if np.size(batch[0]) % 4:
            raise TypeError(f"cannot group {np.size(batch[0])} samples")
        return super().trace(model, batch, micro_batches)


def test_a_model_that_groups_samples_gets_a_size_that_it_takes(monkeypatch):
    backend = Grouping()
    found = found_on(backend, monkeypatch, batch=4)
    assert found.fit.sizes == (4, 8)
    assert found.max_batch_size % 4 == 0
    assert found.plan.measured.peak_bytes <= store_all_peak(40)


def test_out_of_memory_while_a_batch_is_made_is_a_size_that_does_not_fit(monkeypatch):
    made = []

    def repeated(batch, size):
        made.append(size)
        if size > 56:
            raise MemoryError("no room for a batch")
        return batch_of(0, size)

    monkeypatch.setattr("keras_remat.batch_size.trials.repeated_batch", repeated)
    backend = FakeBackend()
    monkeypatch.setattr(backend, "is_out_of_memory", lambda error: isinstance(error, MemoryError))
    found = found_on(backend, monkeypatch)
    assert max(made) > 56
    assert found.plan.measured is not None
    assert found.max_batch_size <= 56


def test_what_came_before_the_search_takes_no_work_of_it(monkeypatch):
    """Where tracing and a first larger batch took a half of the time, a busy machine found less."""
    ended_by_clock, search = [], find.search_batch_size

    def searched(*args, **options):
        found = search(*args, **options)
        ended_by_clock.append(found.ended_by_clock)
        return found

    began_s = time.perf_counter() - 1e3
    monkeypatch.setattr(find, "time", SimpleNamespace(perf_counter=lambda: began_s))
    monkeypatch.setattr(find, "search_batch_size", searched)
    found = found_on(FakeBackend(layers=4), monkeypatch, time_limit_s=60.0)
    assert set(ended_by_clock) == {False}
    assert found.ended_by_clock, "no larger size is trained"


@pytest.mark.parametrize("bound", [True, -1, "none", float("nan"), [1]])
def test_bounds_that_are_none(monkeypatch, bound):
    with pytest.raises(ValueError, match="max_overhead"):
        found_on(FakeBackend(), monkeypatch, max_overhead=bound)


def test_costs_are_measured_at_half_the_batch_too(monkeypatch):
    backend = FakeBackend()
    found = found_on(backend, monkeypatch)
    assert backend.traced[:2] == [8, 4]
    assert found.fit.sizes == (4, 8)
    assert set(found.step_time_errors) == {
        p.batch_size for p in found.probes if p.plan and p.plan.measured
    }
    assert found.max_batch_size in found.step_time_errors
    assert "op times fitted to steps of 4 and 8 samples, residual 0.0%" in str(found)
    assert found.search_time_s > 0
    assert found.verification_time_s > 0
    assert backend.ran == []


def test_twice_the_batch_is_measured_where_there_is_no_half(monkeypatch):
    assert found_on(FakeBackend(), monkeypatch, batch=1).fit.sizes == (1, 2)
    assert found_on(FakeBackend(folds=lambda size: size < 8), monkeypatch).fit.sizes == (8, 16)


@pytest.mark.parametrize(
    ("profiler", "profile", "batch"),
    [("busy", "measured", 8), ("free", "estimated", 8), ("blind", "measured", 1)],
)
def test_one_measured_size_is_said_to_be_one(monkeypatch, profiler, profile, batch):
    found = found_on(FakeBackend(profiler=profiler), monkeypatch, profile=profile, batch=batch)
    assert found.fit is None
    assert "op times in proportion to bytes, from one size" in str(found)


@pytest.mark.parametrize(
    "folds", ["below the batch", "up to the batch", "above twice the batch", "at round sizes"]
)
def test_framework_that_folds_an_op_at_some_sizes_is_no_error(monkeypatch, folds):
    rule = {
        "below the batch": lambda size: size < 8,
        "up to the batch": lambda size: size <= 8,
        "above twice the batch": lambda size: size > 16,
        "at round sizes": lambda size: size > 20 and size % 4 == 0,
    }[folds]
    found = found_on(FakeBackend(folds=rule), monkeypatch)
    assert found.max_batch_size > 40
    assert found.plan.measured.peak_bytes <= store_all_peak(40)
    assert found.plan.problem.profile.resident_bytes == RESIDENT_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_fit_trains_the_size_that_the_search_finds(name):
    """Under the same limit and margin. Two searches of the MLP find other orders, more or less of
    which fits: its sizes are not compared."""
    tf = pytest.importorskip("tensorflow")
    import keras_models

    import keras_remat

    model, batch = (
        keras_models.mlp(256, width=512, blocks=6)
        if name == "mlp"
        else keras_models.convnet(32, size=32, filters=16)
    )
    limit = 60 * 2**20
    found = find_max_batch_size(model, batch, limit, time_limit_s=30.0)
    assert found.plan.measured.peak_bytes <= limit
    loader = len(batch[0])
    data = tf.data.Dataset.from_tensors(batch).repeat(4 * found.max_batch_size // loader)
    remat = keras_remat.RematAutotune(limit, batch_size=10**6, verbose=0)
    model.fit(data, epochs=8, verbose=0, shuffle=False, callbacks=[remat])
    size = remat.report.max_batch_size
    assert remat.report.batch_size == size > loader
    if name == "cnn":
        assert size == pytest.approx(found.max_batch_size, rel=RESOLUTION, abs=1)
    assert remat.plan.measured.peak_bytes <= limit


def test_what_a_loop_keeps_counts_at_a_size_that_is_found_however_small_its_arrays_are_at_first():
    """At 8 samples, TensorFlow's allocator on a CPU counts no array of this loop."""
    pytest.importorskip("tensorflow")
    import keras

    inputs = keras.Input((12, 4))
    outputs = keras.layers.Dense(1)(keras.layers.SimpleRNN(64)(inputs))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse", jit_compile=False)
    small = make_plan(model, 8, "8GiB", profile="estimated", solver="greedy")
    held, room = small.problem.profile.resident_bytes, 24 * 2**20  # other tests hold bytes, too
    asked = {"profile": "estimated", "time_limit_s": 5.0, "max_overhead": 0.0, "margin": 0.0}
    found = find_max_batch_size(model, 8, held + room, **asked)
    needed = make_plan(model, found.max_batch_size, "8GiB", profile="estimated", solver="greedy")
    assert 0.5 * room < needed.store_all.peak_bytes - held <= 1.25 * room
