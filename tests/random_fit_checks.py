"""What a random fit with ``RematAutotune`` has in common with the plain one.

With the batches kept, samples, order, losses, ``History``, weights and the number of slots have to
be the plain fit's. With other batch sizes, the samples and their order have to be. In all, the
model comes back as a plain fit leaves it.
"""

from contextlib import nullcontext
from unittest.mock import patch

import keras
import numpy as np
import pytest
from random_fit_models import ON_JAX, ON_TORCH
from random_fits import COPIES, GUEST, Case

import keras_remat
from keras_remat.reporting.fit_report import LOG_KEYS
from keras_remat.training.tools import Tools


class PlainFitFails(Exception):
    """Says that Keras's own fit of a case ends with an error, so that nothing can be compared."""


def check(seed, path):
    """Trains a case plainly and with ``RematAutotune``, and compares both.

    Args:
        seed: of the case.
        path: a folder of its own.

    Returns:
        The case, and the report of the callback.

    Raises:
        AssertionError: what differs.
        PlainFitFails: the plain fit ends with an error.
    """
    case = Case(seed)
    try:
        plain = case.run(path / "plain")
    except Exception as error:
        raise PlainFitFails(f"{type(error).__name__}: {error}") from error
    no_fit = patch.object(Tools, "plain_fits", lambda *_: False) if case.remat else nullcontext()
    with no_fit:
        return case, _compared(case, plain, path)


def _compared(case, plain, path):
    remat = keras_remat.RematAutotune(
        memory_limit="1GiB", batch_size=case.mode, solver="greedy", solver_time_limit_s=1.0,
        profile_steps=1, verbose=0, report_path=path / "report.json",
    )  # fmt: skip
    if case.is_used:
        numbers = np.ones((4, 1), "float32")
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(numbers, numbers, verbose=0, callbacks=[remat])
    remat = COPIES.get(case.copied, lambda one: one)(remat)
    ours = case.run(path / "ours", remat)
    same_batches = case.mode == "keep" or case.is_refused
    check_samples(case, plain, ours, same_batches)
    assert [key for key in ours.history if key not in LOG_KEYS] == list(plain.history), case
    for key in LOG_KEYS if ours.history else ():
        assert all(isinstance(number, float) for number in ours.history[key]), case
    if same_batches:
        check_numbers(case, plain, ours)
    check_model(case, plain.model, ours.model, same_batches)
    kinds = [event.kind for event in remat.report.events]
    assert ("unmodified" in kinds) == case.is_refused, (case, remat.report.events)
    if not ours.interrupted:
        assert (path / "report.json").exists()
        check_counts(case, ours, remat.report)
    return remat.report


def check_samples(case, plain, ours, same_batches):
    trained, expected = _of_fit(ours.diary), _of_fit(plain.diary)
    # other batches, other losses: a fit that ends by them ends elsewhere
    if not same_batches and {"early", "nan"} & set(case.others):
        both = min(one.counts[0] - one.diary.count(GUEST) for one in (plain, ours))
        trained, expected = trained[:both], expected[:both]
    elif not same_batches and case.action == "interrupt":  # what was held back was not trained
        expected = expected[: len(trained)]
    assert trained == expected, case
    assert ours.diary.count(GUEST) == plain.diary.count(GUEST), case


def check_numbers(case, plain, ours):
    """History, weights and checkpoints; JAX's compiler rounds half precision where it likes."""
    rtol, atol = (5e-2, 5e-3) if ON_JAX and "mixed precision" in case.parts else (2e-3, 1e-4)
    guest = case.action == "guest" and not (ON_JAX or ON_TORCH)  # counted by samples, or once
    for key, values in plain.history.items():
        if guest and key in ("a_loss", "b_loss"):
            continue
        expected = pytest.approx(values, rel=rtol, abs=atol / 10, nan_ok=True)  # both may diverge
        assert ours.history[key] == expected, (key, case)
    for a, b in zip(ours.model.get_weights(), plain.model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=repr(case))
    assert list(ours.saved) == list(plain.saved), case
    for name, array in plain.saved.items():
        np.testing.assert_allclose(
            ours.saved[name], array, rtol=rtol, atol=atol, err_msg=f"{name} {case}"
        )
    slots, plain_slots = (len(one.model.optimizer.variables) for one in (ours, plain))
    assert slots == plain_slots, case


def check_model(case, plain, ours, same_batches):
    """The model is as a plain fit leaves it."""
    assert type(ours.train_function) is type(plain.train_function), case
    assert set(vars(ours)) == set(vars(plain)), case
    if case.own_function:
        assert ours.calls == plain.calls, case
    # with other batches losses are others, by which a rate is lowered, or epochs are ended
    by_loss = "plateau" in case.others or {"early", "rate"} <= set(case.others)
    if case.optimizer != "schedule" and (same_batches or not by_loss):
        rate, plain_rate = (float(m.optimizer.learning_rate) for m in (ours, plain))
        assert rate == plain_rate, case


def check_counts(case, ours, report):
    """The report has every sample of the last fit."""
    counted = sum(epoch.samples for epoch in report.epochs)
    trained = ours.counts[-1] - (0 if case.again is None else ours.counts[0])
    # a guest's batch is Keras's own business where nothing is to be done, and what resets
    # Keras's metrics in mid-epoch takes the count of batches whose sizes nobody knows before
    guests = {ours.diary.count(GUEST), 0} if case.action == "guest" else {0}
    is_told = case.source == "arrays" or case.action not in ("guest", "evaluate")
    is_told &= not case.is_refused  # nobody counts then
    if case.updates_a_part and not ON_JAX and case.source != "arrays":  # nor does its own step
        short = (case.size * case.per_call - 1) * len(report.epochs)  # their last calls may be
        guests = range(-short, max(guests) + 1)
    assert not is_told or trained - counted in guests, case


def _of_fit(diary):
    return [number for number in diary if number != GUEST]
