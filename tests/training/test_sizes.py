"""Which batch size a fit trains with: every sample once, whatever fits and whatever fails."""

import gc
import itertools
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from fake_backend import (
    FakeBackend,
    batch_of,
    elements_of,
    event_kinds,
    store_all_peak,
)
from sized_fits import (
    LOADER,
    OPTIONS,
    FakeSteps,
    Fixed,
    assert_all_once,
    epoch,
    on_devices,
    on_tuner,
    stand_ins,  # noqa: F401 - a fixture that all tests use
    trained_on,
    trainer_at,
)

from keras_remat.errors import ScheduleNotFoundError, UnsupportedModelError
from keras_remat.training import driver, size_costs, sizes
from keras_remat.training.record import StepsRecord


def test_keep_trains_the_batches_as_they_come():
    steps = FakeSteps()
    trainer = Fixed(steps, "keep")
    total = epoch(trainer, last=3)
    assert_all_once(steps.trained, total)
    assert [len(numbers) for numbers in steps.trained] == [10] * 11 + [3]
    assert trainer.changes == []
    assert trainer.finish() is None


def test_joined_batches_train_every_sample_once_and_the_rest_at_the_epochs_end():
    steps = FakeSteps()
    trainer = Fixed(steps, "max", found=35)
    total = epoch(trainer)
    assert [len(numbers) for numbers in steps.trained] == [10, 10, 35, 35, 30]
    assert_all_once(steps.trained, total)
    assert epoch(trainer) == total
    assert [len(numbers) for numbers in steps.trained[5:]] == [35, 35, 35, 15]
    assert_all_once(steps.trained, total, epochs=2)
    assert trainer.changes == [(10, 35)]
    assert (trainer.report.batch_size, steps.forgotten) == (35, 1)
    assert trainer.finish() is None


def test_a_rest_right_after_batches_have_grown_is_not_told_as_their_size():
    trainer = Fixed(FakeSteps(), "max", found=35)
    epoch(trainer, batches=3, last=3)
    assert (trainer.changes, trainer.report.batch_size) == ([(10, 35)], 10)
    epoch(trainer, batches=3, last=3)
    assert trainer.report.batch_size == 23


def test_batches_that_are_held_are_not_what_the_data_write_next():
    """A generator may fill the same arrays again and again."""
    steps, array = FakeSteps(), np.zeros(LOADER, int)
    trainer = Fixed(steps, "max", found=35)
    for first in range(0, 12 * LOADER, LOADER):
        array[:] = range(first, first + LOADER)
        trainer.train((array, None))
    trainer.finish()
    assert_all_once(steps.trained, 12 * LOADER)


def test_logs_are_the_newest_step_s():
    trainer = Fixed(FakeSteps(), "max", found=30)
    assert [trainer.train(batch_of(0, LOADER)) for _ in range(6)] == [1, 2, 2, 2, 3, 3]
    assert trainer.finish() == 4


def test_a_batch_without_samples_is_kerass_own_step_and_joined_with_others_nothing():
    steps = FakeSteps()
    trainer, ran = Fixed(steps, "max", found=35), steps.backend.ran
    trainer.train(batch_of(0, 0))
    assert ran == [("plain", [])]
    epoch(trainer, batches=3)
    assert trainer.changes == [(10, 35)]
    assert trainer.train(batch_of(0, 0)) == len(steps.trained), "logs of the newest step"
    assert ran == [("plain", [])]


def test_size_below_the_loaders_cuts_its_batches():
    steps = FakeSteps()
    trainer = Fixed(steps, 4)
    total = epoch(trainer, batches=5, last=7)
    assert [len(numbers) for numbers in steps.trained] == [10, 10, *[4] * 6, 3]
    assert_all_once(steps.trained, total)
    assert trainer.changes == [(10, 4)]


@pytest.mark.parametrize("wanted", ["max", 35])
def test_a_fit_in_micro_batches_says_that_no_larger_batch_is_looked_for(wanted, monkeypatch):
    monkeypatch.setattr(StepsRecord, "costs", SimpleNamespace(micro_batches=2, problem=None))
    steps = FakeSteps()
    trainer = Fixed(steps, wanted, found=35)
    total = epoch(trainer)
    assert_all_once(steps.trained, total)
    assert trainer.changes == []
    assert [event.message for event in trainer.report.events] == [
        "No larger batch: it is trained in micro-batches."
    ]


def test_size_below_the_loaders_is_left_where_batches_cannot_be_cut():
    class Divided(FakeBackend):
        def resized_spec(self, batch, size):
            raise UnsupportedModelError("the batch stays as it is")

    steps = FakeSteps()
    steps.backend = Divided()
    trainer = Fixed(steps, 4)
    total = epoch(trainer, batches=5, last=7)
    assert_all_once(steps.trained, total)
    assert trainer.changes == []
    assert event_kinds(trainer.report) == ["search"]


@pytest.mark.parametrize(("wanted", "trained"), [(7, 6), (4, 3), (2, 3)])
def test_a_smaller_size_is_one_that_the_devices_divide(wanted, trained):
    steps = on_devices(3)
    total = epoch(Fixed(steps, wanted), batches=5, last=7)
    sizes = [len(numbers) for numbers in steps.trained]
    assert set(sizes[2:-1]) == {trained}
    assert_all_once(steps.trained, total)


@pytest.mark.parametrize(("last", "rest"), [(7, [10, 7]), (6, [16])])
def test_a_rest_that_the_devices_do_not_divide_is_trained_in_the_loaders_batches(last, rest):
    """Such a batch is trained by the plain step: a joined one might need more than there is."""
    steps = on_devices(2)
    total = epoch(Fixed(steps, "max", found=40), batches=8, last=last)
    assert [len(numbers) for numbers in steps.trained] == [10, 10, 40, *rest]
    assert_all_once(steps.trained, total)


@pytest.mark.parametrize(
    ("found", "batches", "last", "sizes"), [(40, 8, 1, [40, 8, 3]), (12, 6, 7, [12, 12, 10, 3])]
)
def test_no_step_of_joined_batches_leaves_a_device_without_samples(found, batches, last, sizes):
    """Batch normalization over no samples is not a number."""
    steps = on_devices(2)
    total = epoch(Fixed(steps, "max", found=found), batches=batches, last=last)
    assert [len(numbers) for numbers in steps.trained] == [10, 10, *sizes]
    assert_all_once(steps.trained, total)


@pytest.mark.parametrize(("left", "seconds"), [(None, 60), (10_000, 60), (300, 30), (0, 3)])
def test_a_search_takes_no_longer_than_the_steps_that_are_left_are_worth(
    monkeypatch, left, seconds
):
    """Steps are estimated to take half a second here, whatever the clock says."""
    monkeypatch.setattr(sizes, "OPTIONS", OPTIONS)
    limits, ticks = [], itertools.count(0.0, 7.5)

    def search(*arguments, time_limit_s, late_time_limit_s, **options):
        limits.append(time_limit_s + late_time_limit_s)
        raise ScheduleNotFoundError(1, 1)

    monkeypatch.setattr(sizes, "search_batch_size", search)
    monkeypatch.setattr(size_costs, "scaling_of", lambda *arguments: None)
    monkeypatch.setattr(driver, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(size_costs, "estimated_step_s", lambda *arguments: 0.5)
    steps = FakeSteps()
    steps.most_steps = left
    epoch(Fixed(steps, "max"))
    assert limits == [pytest.approx(0.7 * seconds)]  # the rest is for sizes that run


def test_an_epoch_keeps_its_updates_by_a_size_that_the_devices_divide():
    steps = on_devices(4)
    trainer = Fixed(steps, "max", found=80)
    trainer.epoch_begins()
    epoch(trainer, batches=23)
    trainer.epoch_ends()
    assert trainer.changes == [(10, 80), (80, 20)]  # of 230 samples, 23 would be a tenth


def test_size_of_the_loader_changes_nothing():
    steps = FakeSteps()
    trainer = Fixed(steps, LOADER)
    total = epoch(trainer, last=4)
    assert_all_once(steps.trained, total)
    assert trainer.changes == []
    assert steps.forgotten == 0


def test_infeasible_group_is_stepped_down_before_anything_of_it_was_trained():
    steps = FakeSteps(fits=25)
    trainer = trainer_at(steps, 40)
    total = epoch(trainer)
    assert_all_once(steps.trained, total)
    assert max(map(len, steps.trained)) <= 25
    assert trainer.changes == [(10, 40), (40, 30), (30, 20)]
    assert event_kinds(trainer.report).count("step-down") == 2


def test_a_batch_that_is_given_up_is_not_held_by_its_error():
    """Errors hold frames, and solvers keep errors: such cycles would hold it for long."""
    given_up = []

    class Kept(FakeSteps):
        def __call__(self, fit, mode, batch, *others):
            try:
                return super().__call__(fit, mode, batch, *others)
            except ScheduleNotFoundError as error:
                given_up.append(weakref.ref(batch[0]))
                error.itself = error
                raise

    trainer = trainer_at(Kept(fits=25), 40)
    gc.disable()
    try:
        epoch(trainer)
        assert [one() for one in given_up] == [None, None]
    finally:
        gc.enable()


def test_what_a_search_leaves_in_cycles_is_freed():
    fit = Fixed(FakeSteps(), "max").fit
    gc.disable()
    try:
        with fit.long_task("search"):
            array = np.zeros(3)
            cycle = [weakref.ref(array), array]
            cycle.append(cycle)
            watch = cycle[0]
            del array, cycle
            assert watch() is not None
        assert watch() is None
    finally:
        gc.enable()


def test_what_cannot_be_stepped_down_is_an_error_and_nothing_of_it_was_trained():
    steps = FakeSteps(fits=0, settle_after=0)
    trainer = Fixed(steps, "keep")
    with pytest.raises(ScheduleNotFoundError):
        epoch(trainer)
    assert steps.trained == []


def test_rest_that_fits_under_no_schedule_is_trained_in_the_loaders_batches():
    steps = FakeSteps(fits=10**9)
    trainer = Fixed(steps, "max", found=40)
    for first in range(0, 90, LOADER):
        trainer.train(batch_of(first, LOADER))
        steps.fits = LOADER if first == 80 else steps.fits
    trainer.finish()
    assert_all_once(steps.trained, 90)
    assert [len(numbers) for numbers in steps.trained] == [10, 10, 40, 10, 10, 10]


def test_a_rest_runs_in_order_where_the_plain_step_would_fit():
    """It would move variables, and what larger batches need depends on where those are."""
    backend, limit = FakeBackend(), store_all_peak(4 * LOADER)
    backend.memory.order_matters = True
    trainer, _ = trained_on(backend, "max", limit, batches=60)
    assert 0 < len(backend.ran[-1][1]) < trainer.sizes.search.max_batch_size
    assert backend.kinds[-1] == "remat"


def test_a_rest_for_which_nothing_can_be_planned_is_trained_as_it_would_be_without():
    class Stubborn(FakeBackend):
        def trace(self, model, batch, micro_batches=1):
            if elements_of(batch) < LOADER:
                raise UnsupportedModelError("too small")
            return super().trace(model, batch, micro_batches)

    backend, limit = Stubborn(), store_all_peak(4 * LOADER)
    backend.memory.order_matters = True
    trainer, _ = on_tuner(backend, "max", limit)
    epoch(trainer, batches=61)
    size = trainer.sizes.search.max_batch_size
    rest = 3 if (size + 3) % LOADER else 4
    batches, last = divmod(size + rest, LOADER)
    epoch(trainer, batches=batches + 1, last=last)
    assert len(backend.ran[-1][1]) == rest
    assert backend.kinds[-1] == "plain"


def test_measured_peak_over_the_limit_steps_down():
    steps = FakeSteps(settle_after=1, peak_bytes=lambda size: 40 * size)
    trainer = trainer_at(steps, 40)
    total = epoch(trainer)
    assert_all_once(steps.trained, total)
    assert trainer.changes == [(10, 40), (40, 30), (30, 20)]


def test_no_size_but_the_loaders_trains_goes_back_to_it():
    steps = FakeSteps(settle_after=1, peak_bytes=lambda size: 2000 if size > LOADER else 0)
    trainer = trainer_at(steps, 30)
    total = epoch(trainer, batches=14)
    assert_all_once(steps.trained, total)
    assert trainer.changes == [(10, 30), (30, 20), (20, 10)]
    assert [len(numbers) for numbers in steps.trained[-5:]] == [LOADER] * 5


def test_batches_that_cannot_be_joined_train_as_they_come():
    steps = FakeSteps()
    trainer = Fixed(steps, "max", found=35)
    for first in (0, 10, 20, 30):
        trainer.train(batch_of(first, LOADER))
    trainer.train((batch_of(40, LOADER)[0], np.zeros((LOADER, 3))))
    trainer.train(batch_of(50, LOADER))
    trainer.finish()
    assert_all_once(steps.trained, 60)
    assert [len(numbers) for numbers in steps.trained] == [LOADER] * 6
    assert trainer.changes == [(10, 35), (35, 10)]


def test_learning_rate_follows_the_samples_of_every_step_down_to_the_loaders():
    trainer = Fixed(FakeSteps(), "max", found=35)
    epoch(trainer, last=1)
    assert trainer.fit.learning_rate.factors == [1.0, 1.0, 3.5, 3.5, 2.1]
    trainer = Fixed(FakeSteps(), "max", found=35)
    epoch(trainer, batches=6, last=1)
    assert trainer.fit.learning_rate.factors == [1.0, 1.0, 3.1]
    trainer = Fixed(FakeSteps(), 4)
    epoch(trainer, batches=4, last=1)
    assert trainer.fit.learning_rate.factors == [1.0, 1.0, 0.4, 0.4, 0.4]


def test_length_that_becomes_known_keeps_ten_updates():
    steps = FakeSteps()
    trainer = Fixed(steps, "max", found=80)
    for _ in range(3):
        trainer.epoch_begins()
        epoch(trainer, batches=40)
        trainer.epoch_ends()
    assert trainer.changes == [(10, 80), (80, 40)]
    assert [len(numbers) for numbers in steps.trained[-10:]] == [40] * 10


def test_rests_of_several_epochs_are_not_taken_for_most_of_one():
    """A step that does not settle has the search wait for many."""
    trainer = Fixed(FakeSteps(settle_after=10**6), "max", found=35)
    for _ in range(6):
        trainer.epoch_begins()
        epoch(trainer, batches=4, last=4)
        trainer.epoch_ends()
    assert trainer.report.events == []
    assert trainer.sizes.is_searching


def test_larger_batches_are_told_of_once_with_what_they_mean():
    with pytest.warns(UserWarning, match="keras_remat") as caught:
        epoch(Fixed(FakeSteps(), "max", found=30, steps_per_epoch=60), batches=30)
    assert len(caught) == 1
    message = str(caught[0].message)
    for told in ("batches of 10", "batches of 30", "20 updates", "60", "multiplied by 3"):
        assert told in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epoch(Fixed(FakeSteps(), 30, found=30), batches=30)
