"""Runs one ``fit`` whose train function was replaced: knows its callers, and counts its epochs.

The callback reports Keras's events (a batch begins, an epoch ends); the installed train function
asks for every batch. Between them this module keeps the promise that every batch is trained exactly
once, whoever calls. Samples that were held back are trained when the epoch's last step begins.
Where Keras ends an epoch without a last step (its data were used up, or training was stopped), they
are trained before validation, or at the epoch's end at the latest.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from keras_remat.backends.base import Backend
from keras_remat.backends.batches import batch_size_of
from keras_remat.backends.installed import Caller, check_train_function
from keras_remat.core.events import EventKind
from keras_remat.core.problem import Problem
from keras_remat.errors import UnsupportedModelError
from keras_remat.planning.plan import Plan
from keras_remat.reporting.fit_report import AutotuneReport
from keras_remat.reporting.records import EpochUsage, Event
from keras_remat.training import batches, driver, modes, sizes, steps, tell
from keras_remat.training.arguments import FitOptions
from keras_remat.training.aside import Aside
from keras_remat.training.callers import Callers, RunningFit, data_of_fit, is_profiled
from keras_remat.training.fit_state import FitState
from keras_remat.training.other_phases import Validation, whole_data_news
from keras_remat.training.tools import running_tools
from keras_remat.training.watch import Pace

#: Most times that the callback stands aside in one fit: it ends each time that a step comes near
#: the limit.
_MOST_ASIDES = 3


@dataclass(frozen=True)
class Epoch:
    """Holds an epoch's number and logs.

    Args:
        number: Keras's number of the epoch.
        rest_logs: logs of the samples that were trained after Keras's last step.
    """

    number: int = 0
    rest_logs: Mapping[str, Any] = field(default_factory=dict)


class FitSession:
    """Trains the batches of one ``fit``.

    Args:
        backends: backends that can train the model; training begins with the first.
        progress: ``progress(text)`` as a context manager around everything that takes long.
        steps_per_epoch, epochs: numbers of each; ``None`` where Keras does not know them.
    """

    def __init__(
        self,
        callback: Any,
        model: Any,
        backends: Sequence[Backend],
        options: FitOptions,
        report: AutotuneReport,
        progress: Callable[[str], Any],
        steps_per_epoch: int | None,
        epochs: int | None = None,
    ):
        self._callback, self._model, self._backends = callback, model, backends
        self._report = report
        self._steps_per_epoch, self._epochs, self._epoch = steps_per_epoch, epochs, Epoch()
        self._callers = Callers(model, callback)
        if model.train_function is None:  # a loop of the user's own has made none so far
            model.make_train_function()
        self._installed = backends[0].install(model, self)
        self._fit = FitState(
            model,
            report,
            options,
            backends,
            progress,
            self._installed,
            most_steps=self._most_steps(0),
            steps_per_epoch=steps_per_epoch,
            is_profiled=lambda: is_profiled(self._callers.running_fit),
        )
        #: The newest batches that Keras has trained; it says so from several threads, in no order.
        self.ended: deque[int] = deque(maxlen=64)
        self._validation = Validation(model, self._fit, backends[0].device)
        self._aside: Aside | None = None  # while nothing is to be done
        self._asides_left = _MOST_ASIDES
        self._is_unmodified = False  # whether Keras's own step runs to the end
        self._between = Pace(options.profile_steps)  # of looks at what is held between steps

    @property
    def plan(self) -> Plan | None:
        """Returns the plan in force; ``None`` while Keras's own step runs."""
        return None if self._is_unmodified else self._fit.record.running.plan

    @property
    def problem(self) -> Problem | None:
        """Returns the traced step with its costs; ``None`` before the first batch."""
        return self._fit.record.running.problem

    def _most_steps(self, epoch: int) -> int | None:
        """Returns how many steps there can be from an epoch on; ``None`` where nobody knows."""
        steps, epochs = self._steps_per_epoch, self._epochs
        return None if steps is None or epochs is None else steps * max(0, epochs - epoch)

    # ---------------------------------------------------------------- what the train function asks

    def caller(self, iterator: Any) -> Caller:
        """Returns who calls the train function."""
        return self._callers.caller(iterator)

    def is_last_call(self) -> bool:
        """Returns whether the epoch's last step has begun, where Keras knows how many there are."""
        return self._callers.announced.is_last

    def run(self, batch: Any) -> Any:
        """Trains one loader batch; see :class:`~keras_remat.backends.installed.StepRunner`."""
        if self._is_unmodified:
            return self._run_unmodified(batch)
        try:
            batch_size_of(batch)
        except ValueError as error:
            return self._go_on_unmodified(UnsupportedModelError(f"{error}."), batch)
        try:
            with self._training():
                return driver.train(self._fit, batch)
        except UnsupportedModelError as error:
            return self._go_on_unmodified(error)

    def run_settled(self, batch: Any) -> Any:
        """Trains one loader batch, where its step is settled; see
        :class:`~keras_remat.backends.installed.StepRunner`."""
        settled = None if self._is_unmodified else modes.settled(self._fit, batch)
        if settled is None:
            return None
        started = time.perf_counter()
        logs = driver.train_settled(*settled, batch)
        self._fit.counter.training_s += time.perf_counter() - started
        return logs

    def _go_on_unmodified(self, error: UnsupportedModelError, *others: Any) -> Any:
        """Trains by Keras's own step from here on, beginning with held batches and ``others``."""
        self._is_unmodified = True
        warn_unmodified(self._report, error, self._fit.steps_run)
        return self._run_unmodified(*others)

    def _run_unmodified(self, *others: Any) -> Any:
        """Trains the held batches, and ``others``, by Keras's own step."""
        left = [*self._fit.record.held.batches, *others]
        driver.note(self._fit, batches.none_held)
        return [self._installed.run_plain(one) for one in left][-1]

    def run_alone(self, batch: Any, caller: Caller) -> Any:
        """Trains a batch of ``train_on_batch`` at once.

        Where another callback trains one before the first batch of ``fit``, Keras's own step trains
        it: plans are made for the batches of ``fit``.
        """
        too_early = caller is Caller.GUEST and not self._fit.record.sizes.loader
        if too_early or self._is_unmodified or batch_size_of(batch) == 0:
            return self._installed.run_plain(batch)
        with self._training():
            try:
                return driver.train_batch(self._fit, batch)
            except UnsupportedModelError as error:
                self._fit.warn(*tell.trained_plainly(error))
                return self._installed.run_plain(batch)

    def begin_anew(self) -> None:
        """Plans anew; see :class:`~keras_remat.backends.installed.StepRunner`."""
        driver.note(self._fit, modes.begun_anew)
        self._fit.begin_epoch(self._most_steps(self._epoch.number))

    def finish(self) -> Any:
        """Trains the samples of this epoch that were held back; returns ``None`` where none
        were."""
        try:
            with self._training():
                return driver.finish(self._fit)
        except UnsupportedModelError as error:
            return self._go_on_unmodified(error)

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Counts training time as a person with a stopwatch would.

        Putting batches together and watching steps take time, too.
        """
        started = time.perf_counter()
        try:
            yield
        finally:
            self._fit.counter.training_s += time.perf_counter() - started

    # ---------------------------------------------------------------- what Keras does

    def epoch_begins(self, epoch: int) -> None:
        """Begins to count an epoch; a ``fit`` need not begin with the first."""
        self._epoch = Epoch(epoch)
        self._fit.begin_epoch(self._most_steps(epoch))
        self._callers.epoch_begins()
        self._fit.take_counter()
        driver.note(self._fit, batches.in_new_epoch)
        if self._aside is not None:
            self._aside.epoch_begins()

    def batch_begins(self, batch: int) -> None:
        """Notes that Keras, or a loop of the user's own, announces a batch.

        Where nothing is to be done, this is all that a step costs: :meth:`passes`.
        """
        if self._installed.is_aside:
            if self._is_unmodified:
                return
            if self._aside is not None and self._aside.stays:
                self._aside.batch_begins(batch)
                if self._aside.stays:
                    return
        elif self._aside is not None:
            self._aside.pauses()
        self._aside = None
        fit = self._callers.announce(batch, self._steps_per_epoch)
        if self._installed.take_place():  # another train function: the model may be another one
            self.begin_anew()
            self._is_unmodified = False
            self._check(lambda: check_train_function(self._model, self._installed.original))
            self._check(lambda: self._backends[0].check(self._model))
        self._check(self._installed.check_runs_as_graph)
        record = self._fit.record
        if self._is_unmodified and not record.held.samples:
            self._installed.stand_aside()
            self._callers.expect_no_call()
        elif self._is_idle(fit):
            self._callers.expect_no_call()
            self._asides_left -= 1
            may_grow = fit is None or fit.may_grow
            size = record.sizes.loader or record.running.batch_size  # of train_on_batch
            self._aside = Aside(self._installed, self._fit, size, self.ended, may_grow)
            self._aside.batch_begins(batch)

    def _check(self, check: Callable[[], object]) -> None:
        """Goes on unmodified from the next batch on, where a check refuses a change."""
        if self._is_unmodified:
            return
        try:
            check()
        except UnsupportedModelError as error:
            self._is_unmodified = True
            warn_unmodified(self._report, error, self._fit.steps_run)

    def _is_idle(self, fit: RunningFit | None) -> bool:
        """Returns whether nothing is to be done but to watch.

        Several processes never stand aside: one that fails has to tell the others.
        """
        return (
            self._asides_left > 0
            and self._backends[0].processes.count == 1
            and self._fit.record.trains_as_given
            and steps.runs_plain(self._fit, may_grow=fit is None or fit.may_grow)
        )

    def passes(self, batch: int) -> bool:
        """Notes the begin of a batch; returns whether nothing else is to be done.

        That is so where the callback stands aside and no look at the step is due. It is also so
        where a step is settled and the record has not changed since the batch before.
        """
        if self._aside is not None:
            return self._aside.passes(batch)
        if not self._fit.settled or self._installed.is_disturbed:
            return False
        self._callers.announce(batch, self._steps_per_epoch)
        return True

    def validation_begins(self) -> None:
        """Trains the samples that Keras ended the epoch without, where this ``fit`` validates."""
        if self._callers.running_fit is not None:
            self._train_rest()
            if self._aside is not None:
                self._aside.pauses()
            self._validation.begins()

    def validation_ends(self) -> None:
        """Notes the most that was in use while the ``fit`` validated."""
        self._validation.ends()

    def _tell_whole_data(self) -> None:
        """Says, in the first epoch, where ``fit`` holds large arrays as a whole."""
        if self._report.epochs or self._report.limit_bytes is None:
            return
        data = data_of_fit(self._model)
        news = whole_data_news(data, not running_tools(self._fit).on_gpu, self._fit.limit)
        if news is not None:
            self._fit.event(*news)

    def _train_rest(self) -> None:
        logs = self.finish()
        if logs is not None:
            metrics = self._callback.model.get_metrics_result()
            rest_logs = metrics if set(metrics) == set(logs) else logs
            self._epoch = replace(self._epoch, rest_logs=rest_logs)

    def epoch_ends(self, epoch: int) -> dict[str, Any]:
        """Ends the count of an epoch, and returns the new entries of its logs."""
        self._train_rest()
        if self._aside is not None:
            fit = self._callers.announced.fit
            self._aside.epoch_ends(None if fit is None else fit.epoch_iterator)
        elif self._callers.announced.is_endless and self._installed.counts_no_empty_step:
            news = tell.other_updates()
            if not self._fit.was_reported(news.message):
                self._fit.event(*news)
        driver.note(self._fit, sizes.after_epoch)
        self._tell_whole_data()
        self._note_what_is_held()
        counter = self._fit.take_counter()
        usage = EpochUsage(
            epoch,
            counter.samples,
            counter.steps,
            max(counter.step_time_s, counter.training_s - counter.planning_time_s),
            counter.planning_time_s,
            # Keras's own step may have taken more since
            0 if self._is_unmodified else counter.peak_bytes or self._predicted_peak_bytes(),
            self._report.batch_size or 0,
            self._report.baseline_samples_per_s,
        )
        if not self._fit.record.sizes.has_changed:  # this epoch's steps are the plain ones
            usage = replace(usage, plain_samples_per_s=usage.samples_per_s)
        self._report.epochs.append(usage)
        rest = {name: _as_number(value) for name, value in self._epoch.rest_logs.items()}
        return rest | self._report.epoch_logs(usage)

    def _note_what_is_held(self) -> None:
        """Notes the bytes in use between steps, so seldom that it takes little time."""
        if self._between.is_due():
            started = time.perf_counter()
            self._fit.note_phase("between steps", self._backends[0].device.in_use_bytes())
            self._between.looked(time.perf_counter() - started)

    def _predicted_peak_bytes(self) -> int:
        """Returns the predicted peak where the allocator keeps no statistics, else 0."""
        plan, costs, tools = self.plan, self._fit.record.running.costs, running_tools(self._fit)
        if tools.backend.device.has_statistics or costs is None:
            return 0
        return tools.costs.plain_peak_bytes(costs) if plan is None else plan.predicted.peak_bytes

    def stop(self) -> None:
        """Ends recordings and solvers, and drops the ``fit``, which has ended, and its data; see
        :class:`~keras_remat.backends.installed.StepRunner`."""
        self._callers.forget()
        driver.note(self._fit, modes.stopped)
        driver.note(self._fit, batches.none_held)

    def close(self) -> None:
        """Gives the train function back; a second time, it does nothing."""
        self._callers.forget()
        self._installed.give_back()
        self._fit.handles.clear()
        self._backends[0].processes.end()


def _as_number(value: Any) -> Any:
    """Returns a metric's result as Keras's logs have it: a float, where it is one number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def warn_unmodified(report: AutotuneReport, error: UnsupportedModelError, step: int = 0) -> None:
    """Says, once, that training goes on as without the callback."""
    warnings.warn(f"keras_remat: training goes on unmodified. {error}", stacklevel=2)
    report.events.append(Event(step, EventKind.UNMODIFIED, str(error)))
