"""What runs for batches of several shapes, on a backend without a framework."""

from dataclasses import replace

import numpy as np
import pytest
from fake_backend import (
    RESIDENT_BYTES,
    FakeBackend,
    batch_of,
    chain_problem,
    event_kinds,
    store_all_peak,
    texts_of,
)
from fake_fit import PLAIN, SIZE, TIGHT, driven, options, train

from keras_remat.core.schedule import Usage
from keras_remat.errors import UnsupportedBatchError, UnsupportedModelError
from keras_remat.training import driver


def test_smaller_batch_runs_plainly_when_it_fits():
    backend = FakeBackend()
    trainer, _ = driven(backend, options())
    train(trainer, 3)
    trainer.run(batch_of(0, SIZE // 4))
    assert backend.ran[-1] == ("plain", list(range(SIZE // 4)))
    assert backend.traced == [SIZE, SIZE // 4]


def test_smaller_batch_of_a_plain_step_that_fits_is_not_traced():
    backend = FakeBackend()
    trainer, _ = driven(backend, options(limit=PLAIN))
    train(trainer, 3)
    trainer.run(batch_of(0, SIZE // 4))
    assert backend.kinds == ["plain"] * 4
    assert backend.traced == [SIZE]


def test_bytes_that_do_not_shrink_with_the_batch_are_counted_for_a_smaller_one():
    """Weight gradients take what they take: in proportion to the batch the plain step would fit."""
    backend = FakeBackend(fixed_bytes=100_000)
    plain, smaller = (store_all_peak(size, fixed_bytes=100_000) for size in (SIZE, SIZE // 4))
    limit = smaller - 1
    assert RESIDENT_BYTES + (plain - RESIDENT_BYTES) // 4 < limit
    trainer, _ = driven(backend, options(limit=limit))
    for _ in range(8):
        train(trainer, 1)
        trainer.run(batch_of(0, SIZE // 4))
    assert "plain" not in backend.kinds
    assert trainer.fit.take_counter().peak_bytes <= limit


def test_final_plain_step_that_comes_to_take_more_than_the_limit_is_planned():
    """Also that of a smaller batch, which was never traced."""
    for size in (SIZE, SIZE // 2):
        backend = FakeBackend()
        backend.surplus_bytes = lambda what, size, b=backend: (
            SIZE * 1024 * (1 + 7 * (size < SIZE)) if b.calls > 8 and what == "plain" else 0
        )
        trainer, report = driven(backend, options(limit=PLAIN))
        train(trainer, 5)
        assert trainer.settled
        train(trainer, 4, size)
        assert event_kinds(report) == ["fits", "exceeded"]
        assert report.events[-1].step == 9
        assert size in backend.traced
        train(trainer, 9, size)
        assert backend.kinds[9:] == ["remat"] * 9


def test_smaller_batch_that_does_not_fit_gets_a_plan_of_its_own():
    backend = FakeBackend()
    trainer, _ = driven(backend, options())
    train(trainer, 10)
    main = trainer.plan
    for _ in range(10):
        trainer.run(batch_of(0, SIZE - 5))
    assert backend.traced == [SIZE, SIZE - 5]
    assert backend.kinds == ["remat"] * 20
    assert trainer.plan is main, "the plan that is shown stays the main shape's"
    assert trainer.settled


def test_signature_is_shape_and_dtype():
    backend = FakeBackend()
    trainer, _ = driven(backend, options(limit=PLAIN))
    trainer.run((np.zeros(SIZE, "int64"), None))
    trainer.run((np.zeros(SIZE, "int64"), None))
    assert backend.traced == [SIZE]
    trainer.run((np.zeros(SIZE, "int32"), None))
    assert [len(numbers) for _, numbers in backend.ran] == [SIZE] * 3
    assert len(trainer.record.shapes) == 2


def test_after_forgetting_the_main_shape_the_next_batch_is_it_even_when_it_was_seen():
    backend = FakeBackend()
    trainer, _ = driven(backend, options())
    train(trainer, 10)
    trainer.begin_shape()
    assert not trainer.settled
    trainer.run(batch_of(0, SIZE))
    assert trainer.settled
    assert trainer.settled_peak_bytes <= TIGHT
    assert backend.traced == [SIZE]


def test_a_new_main_shape_is_planned_from_the_costs_known_for_it():
    """Workspace does not follow from shapes: without it the first plan of a larger batch would be
    over the limit."""
    backend = FakeBackend()
    trainer, _ = driven(backend, options())
    train(trainer, 10)
    costs = chain_problem(SIZE // 2)
    costs = replace(
        costs, profile=replace(costs.profile, op_workspace_bytes=(7,) * len(costs.graph.ops))
    )
    trainer.begin_shape(costs)
    trainer.run(batch_of(0, SIZE // 2))
    assert trainer.problem.profile.op_workspace_bytes == costs.profile.op_workspace_bytes


@pytest.mark.parametrize(("guesses", "expected"), [(False, 20), (True, 7)])
def test_what_shapes_tell_of_an_op_does_not_shrink_with_the_batch(guesses, expected):
    """The patches of a convolution's gradient, for instance, in TensorFlow's own kernel."""

    class Backend(FakeBackend):
        guesses_workspaces = guesses

        def estimated_profile(self, traced, resident_bytes=None):
            profile = super().estimated_profile(traced, resident_bytes)
            return replace(profile, op_workspace_bytes=(20,) * len(traced.graph.ops))

    trainer, _ = driven(Backend(), options())
    costs = chain_problem(SIZE)
    asked = (14,) * len(costs.graph.ops)
    costs = replace(costs, profile=replace(costs.profile, op_workspace_bytes=asked))
    trainer.begin_shape(costs)
    trainer.run(batch_of(0, SIZE // 2))
    assert set(trainer.problem.profile.op_workspace_bytes) == {expected}


def test_nor_does_it_where_the_ops_were_measured_at_a_larger_batch():
    """Else the plain step of the smaller one was taken to fit, and took 61 MiB under 45."""

    class Backend(FakeBackend):
        def estimated_profile(self, traced, resident_bytes=None):
            profile = super().estimated_profile(traced, resident_bytes)
            return replace(profile, op_workspace_bytes=(20,) * len(traced.graph.ops))

        def _stop_recording(self, lowered, resident_bytes):
            profile = super()._stop_recording(lowered, resident_bytes)
            return replace(profile, op_workspace_bytes=(20,) * len(lowered.problem.graph.ops))

    trainer, _ = driven(Backend(), options())
    for _ in range(5):  # epochs
        train(trainer, 2)
        train(trainer, 1, SIZE - 5)
    profiles = [shape.costs.problem.profile for shape in trainer.record.shapes.values()]
    assert [profile.source for profile in profiles] == ["measured"] * 2
    assert [set(profile.op_workspace_bytes) for profile in profiles] == [{20}] * 2


def test_measured_main_scales_estimated_times_to_the_measured_step():
    backend = FakeBackend()
    trainer, _ = driven(backend, options(limit=PLAIN))
    train(trainer, 4)
    record = trainer.fit.record
    baseline = replace(record.baseline, usage=Usage(4.0, 0))
    trainer.fit.record = replace(record, baseline=baseline)
    problem, _ = trainer.reference_costs(batch_of(0, SIZE))
    assert problem.store_all_time_s == pytest.approx(4.0)
    assert problem.profile.op_workspace_bytes == trainer.problem.profile.op_workspace_bytes


def test_where_the_rest_before_a_batch_cannot_be_trained_the_batch_is_not_lost(monkeypatch):
    """Texts of another length came, and cannot be joined with the rest."""

    def fails(*arguments):
        raise UnsupportedModelError("cannot be traced")

    fit, _ = driven(FakeBackend(), options(batch_size="max"))
    rest, longer = texts_of(4, 8), texts_of(8, 9)
    sizes = replace(fit.sizes, loader=8, chosen=8)
    held = fit.fit.record.held.adding(rest)
    fit.fit.record = replace(fit.fit.record, sizes=sizes, held=held)
    monkeypatch.setattr(driver, "train_batch", fails)
    with pytest.raises(UnsupportedModelError, match="cannot be traced"):
        fit.train(longer)
    assert [batch[0].shape for batch in fit.fit.record.held.batches] == [(4, 8), (8, 9)]
    assert fit.fit.record.held.samples == 12


def test_a_shape_that_cannot_be_traced_stays_plain_and_the_others_are_planned():
    """Also over the limit: nothing can be planned for it."""

    class Backend(FakeBackend):
        def trace(self, model, batch, micro_batches=1):
            if len(batch[0]) % 2:
                raise UnsupportedBatchError("an odd batch")
            return super().trace(model, batch, micro_batches)

    backend = Backend()
    trainer, report = driven(backend, options())
    train(trainer, 8)
    assert trainer.settled
    with pytest.warns(UserWarning, match="an odd batch"):
        trainer.run(batch_of(0, SIZE - 1))
    train(trainer, 3, SIZE - 1)
    train(trainer, 1)
    assert backend.kinds[8:] == ["plain"] * 4 + [backend.kinds[7]]
    assert trainer.plan is not None
    assert event_kinds(report).count("remark") == 1
