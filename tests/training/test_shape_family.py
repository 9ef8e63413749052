"""Batches of many shapes in one fit: few orders serve all, and what fits plainly is not traced."""

import random

import numpy as np
import pytest
from fake_backend import (
    FakeBackend,
    event_kinds,
    note_solves,
    store_all_peak,
    texts_of,
)
from fake_fit import driven

from keras_remat.core.schedule import Schedule
from keras_remat.training.arguments import FitOptions

SAMPLES, LAYERS = 4, 16
LENGTHS = tuple(range(32, 513, 8))
LIMIT = int(0.6 * store_all_peak(SAMPLES * LENGTHS[-1], layers=LAYERS))


@pytest.fixture
def solved(monkeypatch):
    """Returns a list that gets the bytes of the batch of every solve."""
    calls = []
    note_solves(monkeypatch, lambda p, *_, **__: calls.append(p.graph.values[0].nbytes))
    return calls


def trainer_of(limit=LIMIT, **more):
    backend = FakeBackend(layers=LAYERS, **more)
    options = FitOptions(
        memory_limit=limit, solver="greedy_first", margin=0.0, profile_steps=2, seed=0
    )
    trainer, report = driven(backend, options)
    return backend, trainer, report


def train(trainer, lengths):
    for length in lengths:
        trainer.run(texts_of(SAMPLES, length))


def orders(backend):
    return {what for what, _ in backend.ran if isinstance(what, Schedule)}


def final_orders(backend):
    """The orders of the newest step of every length."""
    newest = {len(tokens): what for what, tokens in backend.ran}
    return {what for what in newest.values() if isinstance(what, Schedule)}


@pytest.mark.parametrize("order", ["random", "up", "down"])
def test_ragged_lengths_need_few_orders_and_no_solve_after_the_first_epoch(order, solved):
    backend, trainer, _ = trainer_of()
    lengths = list(LENGTHS)
    random.Random(0).shuffle(lengths)
    lengths.sort(key=lambda length: {"random": 0, "up": length, "down": -length}[order])
    for _ in range(3):
        train(trainer, lengths)
        assert trainer.fit.take_counter().peak_bytes <= LIMIT
    before = len(solved), len(backend.traced)
    train(trainer, lengths)
    assert (len(solved), len(backend.traced)) == before
    assert 1 <= len(final_orders(backend)) <= 4
    assert {"plain", "remat"} == set(backend.kinds)
    assert trainer.plan is not None, "the longest batch is what training is about"


def test_a_length_whose_plain_step_fits_by_two_traces_is_not_traced():
    backend, trainer, _ = trainer_of()
    train(trainer, (512, 480))
    assert backend.traced == [SAMPLES * 512, SAMPLES * 480]
    train(trainer, LENGTHS[: len(LENGTHS) // 2])
    assert len(backend.traced) == 2
    assert set(backend.kinds[2:]) == {"plain"}


def test_a_smaller_last_batch_reuses_the_order(solved):
    backend, trainer, _ = trainer_of()
    train(trainer, [512] * 8)
    before = len(solved)
    for length in (512, 500, 400):
        trainer.run(texts_of(SAMPLES - 1, length))
    assert len(solved) == before
    assert backend.ran[-3][0] == trainer.plan.solution.schedule
    assert backend.ran[-1][0] == "plain"


def test_a_longer_batch_that_no_order_fits_is_an_event_and_is_solved_for_once(solved):
    _, trainer, report = trainer_of()
    train(trainer, [400] * 8)
    assert trainer.settled
    before = len(solved)
    train(trainer, [512])
    assert len(solved) == before + 1
    assert event_kinds(report).count("shape") == 1
    assert "512" in next(event.message for event in report.events if event.kind == "shape")
    train(trainer, [512, 516] * 4)
    assert len(solved) == before + 1, "it was planned with room for a little more"
    assert trainer.fit.take_counter().peak_bytes <= LIMIT
    assert trainer.settled


@pytest.mark.parametrize("more", [2000, -2000])
def test_what_plain_steps_took_more_than_predicted_counts_for_longer_ones(more):
    """Keras's own step runs ops at once that wait for each other in ours. What it took less is no
    promise."""
    backend, trainer, _ = trainer_of(
        surplus_bytes=lambda what, size: more * size if what == "plain" else 0
    )
    fit = [n for n in LENGTHS if store_all_peak(SAMPLES * n, layers=LAYERS) <= LIMIT]
    train(trainer, [64] * 3)
    train(trainer, [fit[-1] if more > 0 else LENGTHS[len(fit)]] * 3)
    assert backend.kinds == ["plain"] * 3 + ["remat"] * 3


def test_a_known_order_is_taken_where_a_measured_step_is_over_the_limit(solved):
    """Another length's order needs less: nothing is solved for."""
    backend, trainer, report = trainer_of()
    train(trainer, [400] * 8)
    train(trainer, [512] * 8)
    long = trainer.plan.solution.schedule
    before = len(solved)
    backend.surplus_bytes = lambda what, size: (
        LIMIT // 4 if size == SAMPLES * 400 and what != long else 0
    )
    train(trainer, [400] * 8)
    assert event_kinds(report).count("tighten") == 1
    assert len(solved) == before
    assert backend.ran[-1] == (long, np.arange(SAMPLES * 400).tolist())


@pytest.mark.parametrize(
    ("samples", "length", "sizes"),
    [(SAMPLES, 256, set()), (SAMPLES // 2, 512, {SAMPLES // 2})],
)
def test_costs_of_another_length_are_not_those_of_another_batch_size(samples, length, sizes):
    backend, trainer, _ = trainer_of(2 * LIMIT // 3)
    for shape in ((samples, length), (SAMPLES, 512)):
        trainer.begin_shape()
        for _ in range(6):
            trainer.run(texts_of(*shape))
    assert set(backend.kinds) == {"remat"}
    _, others = trainer.reference_costs(texts_of(SAMPLES, 512))
    assert set(others) == sizes
