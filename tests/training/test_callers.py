"""Who calls the train function: told by the announcement, the iterator and the running fit."""

import weakref
from types import SimpleNamespace

import pytest
from fake_fit import Held

from keras_remat.backends.installed import Caller
from keras_remat.training.callers import (
    Callers,
    RunningFit,
    caller_of,
    in_another_fit,
    running_fit,
)


class Model:
    """Calls what it is given from a ``fit`` with a list of callbacks, as Keras does."""

    def fit(self, listed, call, seen=0, known=None):
        callbacks = SimpleNamespace(callbacks=listed)
        epoch_iterator = Held(_steps_seen=seen, _num_batches=known)
        assert callbacks.callbacks is listed
        assert epoch_iterator._steps_seen == seen
        return call()

    def train_on_batch(self):
        def data():
            yield 1

        return data()


ALONE, LOADERS = Model().train_on_batch(), iter([1])
FIT = RunningFit((), lambda: None)


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize(
    ("iterator", "fit", "caller", "unannounced"),
    [
        (LOADERS, FIT, Caller.FIT, Caller.FIT),
        (ALONE, FIT, Caller.GUEST, Caller.GUEST),
        (LOADERS, None, Caller.FIT, Caller.NOBODY),
        (ALONE, None, Caller.LOOP, Caller.NOBODY),
    ],
)
def test_caller_follows_from_three_facts(iterator, fit, caller, unannounced, announced):
    expected = caller if announced else unannounced
    assert caller_of(iterator, fit, announced=announced) is expected


def test_running_fit_is_the_one_of_this_model_with_this_callback():
    model, ours, other = Model(), object(), object()
    assert running_fit(model, ours) is None
    assert model.fit([other], lambda: running_fit(model, ours)) is None
    assert Model().fit([ours], lambda: running_fit(model, ours)) is None
    found = model.fit([other, ours], lambda: running_fit(model, ours))
    assert found.callbacks == (other, ours)
    nested = model.fit([ours], lambda: Model().fit([other], lambda: running_fit(model, ours)))
    assert nested.callbacks == (ours,)


def test_nothing_of_a_fit_is_kept():
    """A frame keeps the variables that it was asked for: an epoch's iterator, and its threads."""

    class Drops(Model):
        def fit(self, listed):
            callbacks, iterator = SimpleNamespace(callbacks=listed), Model()
            alive = weakref.ref(iterator)
            found = running_fit(self, callbacks.callbacks[0])
            del iterator
            return found, alive()

    found, alive = Drops().fit([ALONE])
    assert found.callbacks == (ALONE,)
    assert alive is None


def test_a_function_called_fit_keeps_what_locals_gave_it():
    """Before Python 3.13 that is the frame's own copy."""

    def fit(callbacks, learning_rate):
        settings = locals()
        assert running_fit(ALONE, None) is None
        return settings

    assert fit(None, 0.5)["learning_rate"] == 0.5


def test_the_data_of_a_fit_that_ended_without_notice_may_go():
    class Ends(Model):
        def fit(self, listed, callers):
            callbacks, epoch_iterator = SimpleNamespace(callbacks=listed), Held()
            callers.announce(0, None)
            assert callers.caller(LOADERS) is Caller.FIT
            assert callers.announced.fit.epoch_iterator is epoch_iterator
            return weakref.ref(epoch_iterator), callbacks.callbacks

    model, callback = Ends(), object()
    model.steps_per_execution = 1
    callers = Callers(model, callback)
    assert model.fit([callback], callers)[0]() is None
    assert callers.announced.fit.epoch_iterator is None


def test_another_fit_is_the_innermost_of_this_model_without_this_callback():
    model, ours, other = Model(), object(), object()
    assert not in_another_fit(model, ours)
    assert model.fit([other], lambda: in_another_fit(model, ours))
    assert not model.fit([ours], lambda: in_another_fit(model, ours))
    assert model.fit([ours], lambda: model.fit([other], lambda: in_another_fit(model, ours)))
    assert not model.fit([other], lambda: model.fit([ours], lambda: in_another_fit(model, ours)))
    assert not Model().fit([other], lambda: in_another_fit(model, ours))


@pytest.mark.parametrize(
    ("seen", "known", "ended"), [(3, None, False), (3, 4, False), (4, 4, True), (0, 0, False)]
)
def test_end_of_the_data_is_known_where_keras_counts(seen, known, ended):
    model, ours = Model(), object()
    found = model.fit([ours], lambda: running_fit(model, ours).has_no_more_data, seen, known)
    assert found is ended


def called_after(*announced, model=None, steps=None, known=None):
    """Who calls after batches were announced in a running fit, and what is known then."""
    model, callback = model or Model(), object()
    model.steps_per_execution = 1
    callers = Callers(model, callback)

    def call():
        for batch in announced:
            callers.announce(batch, steps)
        return callers.caller(LOADERS), callers.announced

    return model.fit([callback], call, seen=len(announced), known=known)


def test_a_call_is_awaited_once():
    model, callback = Model(), object()
    model.steps_per_execution = 1
    callers = Callers(model, callback)
    callers.announce(0, None)
    assert callers.caller(LOADERS) is Caller.FIT
    assert callers.caller(LOADERS) is Caller.NOBODY, "nothing was announced since"


def test_who_announced_is_known_until_the_call_and_its_fit_until_the_end():
    caller, announced = called_after(0)
    assert caller is Caller.FIT
    assert not announced.is_awaited
    assert announced.fit is not None


@pytest.mark.parametrize(
    ("batches", "steps", "known", "is_last"),
    [
        ((0,), 2, None, False),
        ((0, 1), 2, None, True),
        ((0,), None, 2, False),
        ((0, 1), None, 2, True),
    ],
)
def test_the_last_batch_is_known_by_the_steps_or_by_the_data(batches, steps, known, is_last):
    assert called_after(*batches, steps=steps, known=known)[1].is_last is is_last
