"""Defines ``RematAutotune``, which handles Keras's life cycle and nothing else.

Keras makes the train function before ``on_train_begin``, looks it up at every step, and does not
call ``on_train_end`` after an exception. So the replacement happens in ``on_train_begin``; the
original comes back in ``on_train_end``, when a step raises, and, for a ``fit`` that ended without
notice (Ctrl-C, another callback's exception), at the next call from outside this ``fit``. What
happens in between is in :mod:`keras_remat.training.fit_session`.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras

from keras_remat.backends.base import load_backends
from keras_remat.checks import check_among
from keras_remat.core.events import EventKind
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.errors import UnsupportedModelError, without_inner_frames
from keras_remat.planning.plan import Plan
from keras_remat.reporting.console import Console
from keras_remat.reporting.fit_report import AutotuneReport
from keras_remat.reporting.records import EpochUsage, Event
from keras_remat.training.arguments import check_path, checked_options
from keras_remat.training.callers import running_fit
from keras_remat.training.fit_session import FitSession, warn_unmodified
from keras_remat.training.progress_bar import shorten_bars

logger = logging.getLogger(__name__)

#: Callbacks that write logs as they get them, so keys that are added later are missing.
_LOGGERS = ("CSVLogger", "TensorBoard")


class RematAutotune(keras.callbacks.Callback):  # type: ignore[misc]
    """Trains within a memory limit by recomputing what is cheap instead of keeping it.

    Args:
        memory_limit: every byte the device's allocator may have in use (weights, slots, data,
            activations, gradients, workspace): an int, ``"8GiB"``, ``"80%"`` of what the device
            has, or ``None`` for all it has. A CPU has what other programs and the data leave.
        batch_size: ``"max"`` joins the batches ``fit`` was given into the largest that fits with at
            most one extra forward pass of recomputation, but keeps ten updates in an epoch whose
            length is known; ``"fastest"`` joins them as long as that trains more samples per
            second, by measurement; an int is the most it may become; ``"keep"`` trains with the
            batches as they come. Except with ``"keep"``, a batch that fits under no schedule is
            trained in micro-batches with summed gradients, where the backend can, with a warning.
        solver: a name in ``keras_remat.SOLVERS``; ``"auto"`` is ``"greedy"`` for compiled steps on
            TensorFlow.
        solver_time_limit_s: most seconds for the solver. It gets fewer where the steps that are
            left cannot save as much (unless ``cache_dir`` keeps the plan for other fits), and where
            set-up has taken 20 s, or 20 plain steps if that is longer, before the first plan
            trains.
        profile_steps: number of real training steps that are measured before the final plan is
            made.
        margin: share of the limit that is kept free. Plans for a batch that has been enlarged keep
            0.05 at least, where such plans are found.
        learning_rate_scaling: ``None``, ``"linear"`` or ``"sqrt"``: how the learning rate follows a
            changed batch size. It is scaled while a step runs; callbacks see the user's own.
        micro_batches: ``None`` splits a batch into micro-batches only where nothing else fits; an
            int splits every batch into this many; the batch is then not made larger, whatever
            ``batch_size`` is. ``"auto"``: where the plain step does not fit, the whole batch and 2,
            4, 8 … micro-batches are trained in turn, each under a schedule of its own, and the
            fastest within the limit stays; the batch is kept (``batch_size="keep"`` is implied,
            unless it is an int). On one device they are slices of the batch, with its numbers.
            Where an event says that gradients are summed, losses have to be means over the batch,
            ``add_loss`` too, and batch normalization sees one micro-batch at a time.
        plan: a :class:`~keras_remat.planning.plan.Plan` or the path of one, to use instead of
            planning.
        cache_dir: where plans are kept and found again by the graph's fingerprint.
        report_path: where the report is written when training ends.
        seed: seed of the solver's random choices.
        compilation: how a rematerialized step runs: ``"compiled"`` as one XLA program,
            ``"ordered"`` op by op by TensorFlow's executor, ``"auto"`` as the model trains: for
            ``jit_compile=True`` on TensorFlow both are measured and the faster one that keeps to
            the limit stays; without it, ordered; on JAX every step is compiled.
        verbose: 0 is silent, 1 shows what takes long, the swap and a closing verdict, 2 every
            event; ``"auto"`` is 1 unless ``fit`` is silent.

    Attributes:
        plan: the :class:`~keras_remat.planning.plan.Plan` in force, or ``None``.
        problem: the traced step with its costs, or ``None``.
        report: the :class:`~keras_remat.reporting.fit_report.AutotuneReport`.

    Raises:
        ValueError, TypeError: a wrong argument; the message has the accepted forms.
        InfeasibleBudgetError: from ``fit``, at the first batch, before anything was trained: no
            schedule can meet the limit.
        ScheduleNotFoundError: from ``fit``, before the batch in question was trained: no schedule
            was found under the limit, or under what the device had left when it ran out of memory.

    Example:
        ``model.fit(x, y, callbacks=[RematAutotune(memory_limit="2GiB", batch_size="keep")])``
    """

    #: Keras may call ``on_train_batch_end`` from another thread, and does not wait for a step's
    #: logs because of this callback.
    async_safe = True

    def __init__(
        self,
        memory_limit: int | str | None = None,
        batch_size: int | str = "max",
        *,
        solver: str = "auto",
        solver_time_limit_s: float = 30.0,
        profile_steps: int = 3,
        margin: float = 0.05,
        learning_rate_scaling: str | None = None,
        micro_batches: int | str | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        report_path: str | os.PathLike[str] | None = None,
        seed: int = 0,
        compilation: str = "auto",
        verbose: int | str = "auto",
    ):
        super().__init__()
        check_among("verbose", verbose, ("auto", 0, 1, 2))
        check_path("report_path", report_path)
        self._options = checked_options(
            memory_limit=memory_limit,
            batch_size=batch_size,
            solver=solver,
            solver_time_limit_s=solver_time_limit_s,
            profile_steps=profile_steps,
            margin=margin,
            learning_rate_scaling=learning_rate_scaling,
            micro_batches=micro_batches,
            plan=plan,
            cache_dir=cache_dir,
            seed=seed,
            compilation=compilation,
        )
        self._report_path, self._verbose = report_path, verbose
        self._session: FitSession | None = None  # while a fit runs that can be modified
        self._last: tuple[Plan | None, Problem | None] = (None, None)  # of the fit before
        self._console = Console(verbose=0)
        self._told_events = 0
        self._told_plan: Schedule | None = None
        self._undo_bars: Callable[[], None] = _nothing
        self.report = AutotuneReport()

    @property
    def plan(self) -> Plan | None:
        """Returns the plan in force, or ``None`` while the plain step runs."""
        return self._last[0] if self._session is None else self._session.plan

    @property
    def problem(self) -> Problem | None:
        """Returns the traced step with its costs, whose op ids the plan speaks of; ``None`` before
        the first batch."""
        return self._last[1] if self._session is None else self._session.problem

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy: the arguments and the results of the last ``fit``.

        Tuners and launchers copy callbacks. A copy belongs to no ``fit`` and no model.
        """
        of_no_fit = {"_session": None, "_model": None, "_undo_bars": _nothing}
        told = {"_last": (self.plan, self.problem), "_console": Console(verbose=0)}
        return vars(self) | of_no_fit | told

    # ---------------------------------------------------------------- Keras's life cycle

    @without_inner_frames
    def on_train_begin(self, logs: Any = None) -> None:
        self._end()
        self._check_neighbours()
        self.report, self._last = AutotuneReport(), (None, None)
        self._console = Console(verbose=self._verbosity())
        self._told_events, self._told_plan = 0, None
        try:
            backends = load_backends(self._model, self._options.compilation)
            remark = backends[0].check(self._model)
            backends[0].processes.begin(self._options.shared)
        except UnsupportedModelError as error:
            warn_unmodified(self.report, error)
            return
        if remark:
            self.report.events.append(Event(0, EventKind.REMARK, remark))
            logger.warning("keras_remat: %s", remark)
        params = self.params or {}
        self._session = FitSession(
            self, self._model, backends, self._options, self.report, self._progress,
            params.get("steps"), params.get("epochs"),
        )  # fmt: skip

    def _check_neighbours(self) -> None:
        """Refuses a second callback of this kind, and warns of loggers that see no ``remat_`` keys.

        Raises:
            ValueError: the ``fit`` has another one.
        """
        fit = running_fit(self._model, self)
        callbacks = () if fit is None else fit.callbacks
        if any(isinstance(one, RematAutotune) and one is not self for one in callbacks):
            raise ValueError(
                "There are two RematAutotune callbacks in one fit. Each would replace the train "
                "step of the other: give fit one of them."
            )
        self._undo_bars = shorten_bars(callbacks)
        for other in callbacks:
            if other is self:
                return
            name = type(other).__name__
            if name in _LOGGERS:
                warnings.warn(
                    f"keras_remat: {name} is listed before RematAutotune and does not see its keys "
                    f"in the logs: list RematAutotune before {name}.",
                    stacklevel=2,
                )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._session is not None and not self._session.passes(batch):
            self._session.batch_begins(batch)
            self._console.bar_is_open = batch > 0 and self._has_bar
            self._tell_news()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        session = self._session  # another thread may end the session
        if session is not None:
            session.ended.append(batch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._session is not None:
            self._session.epoch_begins(epoch)

    def on_test_begin(self, logs: Any = None) -> None:
        if self._session is not None:
            self._session.validation_begins()

    def on_test_end(self, logs: Any = None) -> None:
        if self._session is not None:
            self._session.validation_ends()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._session is not None:
            news = self._session.epoch_ends(epoch)
            self._console.bar_is_open = self._has_bar
            self._tell_news()
            self.report.plan = self.plan  # whoever reads the report now, or after Ctrl-C
        else:
            self.report.epochs.append(EpochUsage(epoch, 0, 0, 0.0, 0.0, 0, 0))
            news = self.report.epoch_logs(self.report.epochs[-1])
        if logs is not None:
            logs.update(news)

    def on_train_end(self, logs: Any = None) -> None:
        self.report.plan = self.plan
        if self._session is not None:
            self._tell_news()
            if self.report.epochs:
                self._console.verdict(self.report)
        self._end()
        if self._report_path is not None:
            self._save_report(Path(self._report_path))

    def _save_report(self, path: Path) -> None:
        """Saves the report; a file that cannot be written must not cost the user the training."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.report.save(path)
        except OSError as error:
            warnings.warn(f"keras_remat: the report is not saved: {error}", stacklevel=2)

    def _end(self) -> None:
        """Gives the train function back, and frees the steps that were made for it."""
        self._undo_bars()
        if self._session is not None:
            self._last = self.plan, self.problem
            self._session.close()
            self._session = None

    # ---------------------------------------------------------------- what a person sees

    def _verbosity(self) -> int:
        if self._verbose == "auto":  # a bar or a line an epoch: both show what takes long
            return 1 if (self.params or {}).get("verbose", 0) else 0
        return int(self._verbose)

    @property
    def _has_bar(self) -> bool:
        return (self.params or {}).get("verbose", 0) in (1, "auto")

    def _tell_news(self) -> None:
        """Shows the events since the last time, and a plan that was swapped in."""
        events = self.report.events
        for event in events[self._told_events :]:
            self._console.event(event.step, event.kind, event.message)
        self._told_events = len(events)
        plan = self.plan
        if plan is None or plan.solution.schedule == self._told_plan:
            return
        self._told_plan = plan.solution.schedule
        self._console.swap_line(plan, self.report.limit_bytes or plan.budget_bytes)

    @contextmanager
    def _progress(self, text: str) -> Iterator[None]:
        started = time.perf_counter()
        with self._console.task(text):
            yield
        logger.info("keras_remat: %s took %.2f s", text, time.perf_counter() - started)


def _nothing() -> None:
    """Undoes nothing."""
