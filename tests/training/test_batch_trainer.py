"""Which batch size a fit trains with: every sample once, whatever fits and whatever fails."""

from types import SimpleNamespace

import pytest
from fake_backend import FakeBackend, batch_of, event_kinds, race_on, store_all_peak

from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.planning.fit_plans import TunerOptions
from keras_remat.training.batch_trainer import BatchTrainer

LOADER = 10


class FakeSteps:
    """What :class:`BatchTrainer` asks of a tuner; steps of more than ``fits`` samples are refused.

    Args:
        fits: the largest batch that a schedule is found for.
        settle_after: steps of one shape until its step is final.
        peak_bytes: batch size → measured peak of a settled step, or ``None`` for a plain one.
    """

    limit_bytes, usable_bytes = 1000, 900

    def __init__(self, fits=10**9, settle_after=2, peak_bytes=lambda size: None):
        self.fits, self.settle_after, self.peak_bytes = fits, settle_after, peak_bytes
        self.trained, self.events, self.forgotten = [], [], 0
        self._of_shape = 0
        self.trainer = self.fit = self

    micro_batches, plan = 1, None

    def run(self, batch, *, may_split=False):
        size = len(batch[0])
        if size > self.fits:
            raise ScheduleNotFoundError(self.limit_bytes, 1)
        self.trained.append([int(number) for number in batch[0]])
        self._of_shape += 1
        return len(self.trained)

    @property
    def settled(self):
        return self._of_shape >= self.settle_after

    @property
    def settled_peak_bytes(self):
        return self.peak_bytes(len(self.trained[-1])) if self.settled else None

    def begin_shape(self, expected=None, costs=None):
        self.forgotten, self._of_shape = self.forgotten + 1, 0

    def event(self, kind, message):
        self.events.append(kind)


class Fixed(BatchTrainer):
    """A batch trainer whose search finds ``found``."""

    def __init__(self, steps, batch_size, found=None, samples=None):
        self.changes = []
        report = SimpleNamespace(max_batch_size=None, batch_size=None)
        super().__init__(
            None,
            steps,
            report,
            batch_size,
            lambda loader: samples,
            lambda old, new: self.changes.append((old, new)),
        )
        self.report, self.found = report, found

    def _search(self, batch):
        if self.found is None:
            super()._search(batch)
        else:
            self._change(LOADER, self.found)


def epoch(trainer, batches=12, size=LOADER, last=None):
    """Trains one epoch of numbered samples and returns how many there were."""
    first = 0
    for at in range(batches):
        count = last if last is not None and at == batches - 1 else size
        trainer.run(batch_of(first, count))
        first += count
    trainer.finish()
    return first


def assert_all_once(trained, total, epochs=1):
    assert [number for numbers in trained for number in numbers] == list(range(total)) * epochs


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


def test_logs_are_the_newest_step_s():
    trainer = Fixed(FakeSteps(), "max", found=30)
    assert [trainer.run(batch_of(0, LOADER)) for _ in range(6)] == [1, 2, 2, 2, 3, 3]
    assert trainer.finish() == 4


def test_size_below_the_loaders_cuts_its_batches():
    steps = FakeSteps()
    trainer = Fixed(steps, 4)
    total = epoch(trainer, batches=5, last=7)
    assert [len(numbers) for numbers in steps.trained] == [10, 10, *[4] * 6, 3]
    assert_all_once(steps.trained, total)
    assert trainer.changes == [(10, 4)]


def test_size_of_the_loader_changes_nothing():
    steps = FakeSteps()
    trainer = Fixed(steps, LOADER)
    total = epoch(trainer, last=4)
    assert_all_once(steps.trained, total)
    assert trainer.changes == []
    assert steps.forgotten == 0


def test_infeasible_group_is_stepped_down_before_anything_of_it_was_trained():
    steps = FakeSteps(fits=25)
    trainer = Fixed(steps, "max", found=40)
    total = epoch(trainer)
    assert_all_once(steps.trained, total)
    assert max(map(len, steps.trained)) <= 25
    assert trainer.changes == [(10, 40), (40, 36), (36, 32), (32, 28), (28, 25)]
    assert steps.events.count("step-down") == 4


def test_group_of_one_sample_that_does_not_fit_is_an_error():
    trainer = Fixed(FakeSteps(fits=0, settle_after=0), "keep")
    trainer._size = 3
    with pytest.raises(ScheduleNotFoundError):
        epoch(trainer)
    assert trainer.changes == [(3, 2), (2, 1)]


def test_measured_peak_over_the_limit_steps_down_by_what_is_too_much():
    steps = FakeSteps(settle_after=1, peak_bytes=lambda size: 40 * size)
    trainer = Fixed(steps, "max", found=30)
    total = epoch(trainer)
    assert_all_once(steps.trained, total)
    assert trainer.changes == [(10, 30), (30, 22)]
    assert steps.usable_bytes >= 40 * 22


def test_one_sample_over_the_limit_is_not_stepped_down_for_ever():
    steps = FakeSteps(settle_after=1, peak_bytes=lambda size: 2000)
    trainer = Fixed(steps, "max", found=2)
    total = epoch(trainer, batches=4)
    assert_all_once(steps.trained, total)
    assert trainer.changes == [(10, 2), (2, 1)]


# ------------------------------------------------------------------ with a tuner and a search


def on_tuner(backend, batch_size, limit, *, samples=None):
    options = TunerOptions(limit, "greedy", 5.0, 2, 0.0)
    race, report = race_on(backend, options=options)
    changes = []
    trainer = BatchTrainer(
        None,
        race,
        report,
        batch_size,
        lambda loader: samples,
        lambda old, new: changes.append((old, new)),
    )
    return trainer, report, changes


def test_max_finds_more_than_fits_plainly_and_trains_with_it():
    backend = FakeBackend()
    trainer, report, changes = on_tuner(backend, "max", store_all_peak(4 * LOADER))
    total = epoch(trainer, batches=60)
    assert backend.samples == list(range(total))
    found = trainer.search.max_batch_size
    assert found == report.max_batch_size == report.batch_size > 4 * LOADER
    assert trainer.search.plain_batch_size == 4 * LOADER
    assert changes == [(LOADER, found)]
    assert report.baseline_source == "measured"
    assert {"fits", "search", "batch", "risk"} <= set(event_kinds(report))


@pytest.mark.parametrize(
    "rule", [lambda size: size <= LOADER, lambda size: size > 40, lambda size: size % 4 == 0]
)
def test_framework_that_folds_an_op_at_some_sizes_is_no_error(rule):
    backend = FakeBackend(folds=rule)
    trainer, report, _ = on_tuner(backend, "max", store_all_peak(4 * LOADER))
    total = epoch(trainer, batches=60)
    assert backend.samples == list(range(total))
    assert report.batch_size > LOADER


def test_int_above_the_loaders_is_the_most_it_becomes():
    backend = FakeBackend()
    trainer, report, changes = on_tuner(backend, 24, 2**40)
    total = epoch(trainer, batches=30)
    assert backend.samples == list(range(total))
    assert changes == [(LOADER, 24)]
    assert report.max_batch_size == 24
    assert len(backend.ran[-2][1]) == 24


def test_no_batch_is_larger_than_the_epoch():
    backend = FakeBackend()
    trainer, report, _ = on_tuner(backend, "max", 2**40, samples=8 * LOADER)
    total = epoch(trainer, batches=8)
    assert backend.samples == list(range(total))
    assert report.max_batch_size == total


def test_measured_plain_peak_that_no_schedule_meets_trains_no_sample_twice():
    """Batches above the loader's take far more than predicted: found out only after the first steps
    of them were trained."""
    backend = FakeBackend(surplus_bytes=lambda what, size: 0 if size <= LOADER else 2**40)
    trainer, _, changes = on_tuner(backend, 40, store_all_peak(64))
    total = epoch(trainer, batches=40)
    assert backend.samples == list(range(total))
    assert changes[0] == (LOADER, 40)
    assert changes[-1][1] < 40


def sizes_of(backend):
    """The batch sizes that were trained, each once, in the order of their first step."""
    return list(dict.fromkeys(len(numbers) for _, numbers in backend.ran))


def test_measured_peak_that_leaves_room_is_stepped_up_to():
    """Steps above the loader's batch take a quarter less than predicted: found out only while they
    are trained."""
    limit = store_all_peak(4 * LOADER)
    backend = FakeBackend(surplus_bytes=lambda what, size: 0 if size <= LOADER else -limit // 4)
    trainer, report, changes = on_tuner(backend, "max", limit)
    total = epoch(trainer, batches=400)
    assert backend.samples == list(range(total))
    found = trainer.search.max_batch_size
    assert changes[0] == (LOADER, found)
    assert report.batch_size == changes[-1][1] > 1.1 * found
    assert 1 <= event_kinds(report).count("step-up") == len(changes) - 1 <= 3
    assert [new for _, new in changes] == sorted(new for _, new in changes)
    assert f"a batch of {found} measured" in next(
        event.message for event in report.events if event.kind == "step-up"
    )


def test_step_up_that_measures_over_the_limit_goes_back_to_the_size_before_and_stays():
    limit = store_all_peak(4 * LOADER)
    found = []

    def surplus(what, size):
        if size <= LOADER:
            return 0
        found.append(size)
        return -limit // 4 if size <= found[0] else limit

    backend = FakeBackend(surplus_bytes=surplus)
    trainer, report, changes = on_tuner(backend, "max", limit)
    total = epoch(trainer, batches=400)
    assert backend.samples == list(range(total))
    up, down = changes[1:]
    assert up[0] == down[1] == report.batch_size == trainer.search.max_batch_size
    assert up[1] == down[0] > up[0]
    assert event_kinds(report).count("step-up") == event_kinds(report).count("step-down") == 1


def test_after_a_step_down_there_is_a_way_up_again_below_the_size_that_failed():
    limit = store_all_peak(4 * LOADER)
    found = []

    def surplus(what, size):
        if size <= LOADER:
            return 0
        found.append(size)
        return limit // 4 if size >= found[0] else -limit // 4

    backend = FakeBackend(surplus_bytes=surplus)
    trainer, report, changes = on_tuner(backend, "max", limit)
    total = epoch(trainer, batches=400)
    assert backend.samples == list(range(total))
    kinds = [kind for kind in event_kinds(report) if kind.startswith("step-")]
    assert kinds[0] == "step-down"
    assert "step-up" in kinds
    assert changes[1][1] < report.batch_size < found[0] == changes[0][1]


def test_no_step_up_is_above_what_was_asked_for_or_the_epoch():
    limit = store_all_peak(4 * LOADER)
    for batch_size, samples in ((50, None), ("max", 5 * LOADER)):
        backend = FakeBackend(surplus_bytes=lambda what, size: 0 if size <= LOADER else -limit // 4)
        trainer, _, _ = on_tuner(backend, batch_size, limit, samples=samples)
        total = epoch(trainer, batches=100)
        assert backend.samples == list(range(total))
        assert max(sizes_of(backend)) == 50


def test_steps_up_begin_with_an_order_that_is_known(monkeypatch):
    """The found size trains by the search's order at once; nothing is solved before its first
    step."""
    import keras_remat.planning.fit_plans as module

    backend, solved = FakeBackend(), []
    real = module.plan_problem

    def plan_problem(problem, *args, **options):
        solved.append(len(backend.ran))
        return real(problem, *args, **options)

    monkeypatch.setattr(module, "plan_problem", plan_problem)
    trainer, _, _ = on_tuner(backend, "max", store_all_peak(4 * LOADER))
    epoch(trainer, batches=60)
    first = next(at for at, (_, numbers) in enumerate(backend.ran) if len(numbers) > LOADER)
    assert solved
    assert min(solved) > first


def test_search_that_fails_keeps_the_loaders_batch(monkeypatch):
    def fail(*args, **options):
        raise InfeasibleBudgetError(1, 2)

    monkeypatch.setattr("keras_remat.training.batch_trainer.search_batch_size", fail)
    backend = FakeBackend()
    trainer, report, changes = on_tuner(backend, "max", 2**40)
    total = epoch(trainer)
    assert backend.samples == list(range(total))
    assert changes == []
    assert report.max_batch_size == LOADER
    assert "No larger batch" in report.events[-1].message
