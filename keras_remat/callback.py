"""``RematAutotune``: the Keras life cycle around
:class:`~keras_remat.training.step_trainer.StepTrainer`.

Keras makes the train function before ``on_train_begin``, looks it up at every step, and does not
call ``on_train_end`` after an exception. So the replacement happens in ``on_train_begin``; the
original comes back in ``on_train_end``, when a step raises, and, for a ``fit`` that ended without
notice (Ctrl-C, another callback's exception), at the next call that no ``on_train_batch_begin`` of
this callback announced.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from tqdm import tqdm

from keras_remat.backends.base import COMPILATIONS, Backend, load_backends
from keras_remat.core.problem import Problem
from keras_remat.errors import UnsupportedModelError
from keras_remat.planning.fit_plans import TunerOptions
from keras_remat.planning.plan import Plan, load_plan
from keras_remat.reporting.fit_report import AutotuneReport, EpochUsage, Event
from keras_remat.solvers import SOLVERS
from keras_remat.training.backend_race import BackendRace
from keras_remat.training.batch_trainer import BatchTrainer
from keras_remat.units import check_memory_limit

logger = logging.getLogger(__name__)


class RematAutotune(keras.callbacks.Callback):  # type: ignore[misc]
    """Trains within a memory limit by recomputing what is cheap instead of keeping it.

    Args:
        memory_limit: every byte the device's allocator may have in use (weights, slots, data,
            activations, gradients, workspace): an int, ``"8GiB"``, ``"80%"`` of what the device
            has, or ``None`` for all it has.
        batch_size: ``"max"`` joins the batches ``fit`` was given into the largest that fits with at
            most one extra forward pass of recomputation; an int is the most it may become;
            ``"keep"`` trains with the batches as they come. Except with ``"keep"``, a batch that
            fits under no schedule is trained in micro-batches with summed gradients, where the
            backend can, with a warning.
        solver: a name in ``keras_remat.SOLVERS``; ``"auto"`` is ``"greedy"`` for compiled steps on
            TensorFlow.
        solver_time_limit_s: seconds for the solver.
        profile_steps: real training steps that are measured before the final plan is made.
        margin: share of the limit that is kept free.
        learning_rate_scaling: ``None``, ``"linear"`` or ``"sqrt"``: how the learning rate follows a
            changed batch size.
        plan: a :class:`~keras_remat.planning.plan.Plan` or the path of one, to use instead of
            planning.
        cache_dir: where plans are kept and found again by the graph's fingerprint.
        report_path: where the report is written when training ends.
        seed: for the solver.
        compilation: how a rematerialized step runs: ``"compiled"`` as one XLA program,
            ``"ordered"`` op by op by TensorFlow's executor, ``"auto"`` as the model trains: for
            ``jit_compile=True`` on TensorFlow both are measured and the faster one that keeps to
            the limit stays; without it, ordered; on JAX every step is compiled.
        verbose: 0 is silent, 1 prints a closing table and a bar for what takes more than a second,
            ``"auto"`` follows ``fit``.

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
        plan: Plan | str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        report_path: str | os.PathLike[str] | None = None,
        seed: int = 0,
        compilation: str = "auto",
        verbose: int | str = "auto",
    ):
        super().__init__()
        check_memory_limit(memory_limit)
        if not isinstance(solver, str):
            raise TypeError(f"solver must be one of the names {', '.join(SOLVERS)}; got {solver!r}")
        if solver not in SOLVERS:
            raise ValueError(f"unknown solver {solver!r}; there are {', '.join(SOLVERS)}")
        _check_number("solver_time_limit_s", solver_time_limit_s, above=0)
        _check_int("profile_steps", profile_steps, least=1)
        _check_number("margin", margin, least=0, below=1)
        _check_int("seed", seed, least=0)
        if learning_rate_scaling not in (None, "linear", "sqrt"):
            raise ValueError(
                f'learning_rate_scaling must be None, "linear" or "sqrt", got {learning_rate_scaling!r}'
            )
        if compilation not in COMPILATIONS:
            raise ValueError(
                f"compilation must be one of {', '.join(map(repr, COMPILATIONS))}, got {compilation!r}"
            )
        if verbose not in ("auto", 0, 1, 2):
            raise ValueError(f'verbose must be "auto", 0, 1 or 2, got {verbose!r}')
        for name, path in (("plan", plan), ("cache_dir", cache_dir), ("report_path", report_path)):
            if path is not None and not isinstance(path, (str, os.PathLike, Plan)):
                raise TypeError(
                    f"{name} must be a path{' or a Plan' if name == 'plan' else ''}, got {path!r}"
                )
        if plan is not None and not isinstance(plan, Plan):
            plan = load_plan(plan)
        self._options = TunerOptions(
            memory_limit,
            solver,
            float(solver_time_limit_s),
            profile_steps,
            float(margin),
            seed,
            plan,
            cache_dir,
        )
        self._batch_size = _checked_batch_size(batch_size)
        self._learning_rate_scaling, self._report_path = learning_rate_scaling, report_path
        self._verbose, self._compilation = verbose, compilation
        self._tuner: BackendRace | None = None
        self._trainer: BatchTrainer | None = None
        self._learning_rate_factor = 1.0
        self._announced = self._last_call = False
        self._training_s = 0.0  # of this epoch, planning included
        self.report = AutotuneReport()

    @property
    def plan(self) -> Plan | None:
        """The plan in force, or ``None`` while the plain step runs."""
        return self._tuner.trainer.plan if self._tuner is not None else None

    @property
    def problem(self) -> Problem | None:
        """The traced step with its costs, whose op ids the plan speaks of; ``None`` before the
        first batch."""
        return self._tuner.trainer.problem if self._tuner is not None else None

    # ---------------------------------------------------------------- Keras's life cycle

    def on_train_begin(self, logs: Any = None) -> None:
        self._restore()
        self.report = AutotuneReport()
        self._tuner = None
        try:
            backends = load_backends(self._model, self._compilation)
            remark = backends[0].check(self._model)
        except UnsupportedModelError as error:
            self._unmodified(error)
            return
        if remark:
            self.report.events.append(Event(0, "remark", remark))
            logger.warning("keras_remat: %s", remark)
        self._install(backends)

    def _install(self, backends: Sequence[Backend]) -> None:
        self._tuner = BackendRace(
            self._model,
            backends,
            self._options,
            self.report,
            self._progress,
            backends[0].install(self._model, self),
        )
        self._trainer = BatchTrainer(
            self._model,
            self._tuner,
            self.report,
            self._batch_size,
            self._samples_per_epoch,
            self._batch_size_changed,
            self._options.seed,
        )

    def _samples_per_epoch(self, loader_batch_size: int) -> int | None:
        steps = (self.params or {}).get("steps")
        return None if steps is None else steps * loader_batch_size

    def _batch_size_changed(self, old: int, new: int) -> None:
        """Scales the learning rate with the batch, where that was asked for."""
        if self._learning_rate_scaling is None:
            return
        optimizer = self._model.optimizer
        assert self._tuner is not None
        if not isinstance(optimizer.learning_rate, keras.Variable):
            message = "The learning rate follows a schedule and was not scaled with the batch size."
            warnings.warn(f"keras_remat: {message}", stacklevel=2)
            self.report.events.append(Event(0, "learning-rate", message))
            return
        factor = new / old if self._learning_rate_scaling == "linear" else (new / old) ** 0.5
        self._learning_rate_factor *= factor
        with self._tuner.fit.installed.variables():
            optimizer.learning_rate = float(optimizer.learning_rate) * factor

    # ---------------------------------------------------------------- what the installed train
    # function asks

    def run(self, batch: Any) -> Any:
        """Trains one loader batch; see :class:`~keras_remat.backends.base.StepRunner`."""
        tuner = self._tuner
        assert tuner is not None
        assert self._trainer is not None
        try:
            with self._training():
                return self._trainer.run(batch)
        except UnsupportedModelError as error:
            tuner.fit.installed.restore()
            self._unmodified(error)
            return tuner.fit.installed.run_plain(batch)

    def finish(self) -> Any:
        """Trains what was held back of this epoch."""
        with self._training():
            return self._trainer.finish() if self._trainer is not None else None

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Counts what a person with a stopwatch would: batches that are put together and steps that
        are watched take time too."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._training_s += time.perf_counter() - started

    def is_current(self) -> bool:
        """Whether Keras announced this call to this callback."""
        announced, self._announced = self._announced, False
        return announced

    def is_last_call(self) -> bool:
        """Whether the epoch's last step has begun, where Keras knows how many there are."""
        return self._last_call

    def _unmodified(self, error: UnsupportedModelError) -> None:
        warnings.warn(f"keras_remat: training goes on unmodified. {error}", stacklevel=2)
        self.report.events.append(Event(0, "unmodified", str(error)))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._announced = True
        steps = (self.params or {}).get("steps")
        self._last_call = steps is not None and batch + self._model.steps_per_execution >= steps

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._training_s = 0.0
        if self._tuner is not None:
            self._tuner.fit.take_counter()
            self._tuner.trainer.epoch_begins()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._tuner is None:
            usage = EpochUsage(epoch, 0, 0, 0.0, 0.0, 0, 0)
        else:
            counter = self._tuner.fit.take_counter()
            step_time_s = max(counter.step_time_s, self._training_s - counter.planning_time_s)
            usage = EpochUsage(
                epoch,
                counter.samples,
                counter.steps,
                step_time_s,
                counter.planning_time_s,
                counter.peak_bytes,
                self.report.batch_size or 0,
                self.report.baseline_samples_per_s,
            )
        self.report.epochs.append(usage)
        if logs is not None:
            logs.update(self.report.epoch_logs(usage))

    def on_train_end(self, logs: Any = None) -> None:
        self._restore()
        if self._report_path is not None:
            self.report.save(self._report_path)
        if self._shows() and self._tuner is not None:
            print(f"\nkeras_remat\n{self.report}", file=sys.stderr)

    def _restore(self) -> None:
        if self._tuner is not None:
            self._tuner.trainer.close()
            self._tuner.fit.installed.restore()
        if self._learning_rate_factor != 1.0:
            optimizer = self._model.optimizer
            optimizer.learning_rate = float(optimizer.learning_rate) / self._learning_rate_factor
            self._learning_rate_factor = 1.0
        self._announced = False

    # ---------------------------------------------------------------- what a person sees

    def _shows(self) -> bool:
        if self._verbose == "auto":
            return bool((self.params or {}).get("verbose", 0))
        return bool(self._verbose)

    @contextmanager
    def _progress(self, text: str) -> Iterator[None]:
        started = time.perf_counter()
        with tqdm(
            total=1,
            desc=f"keras_remat: {text}",
            leave=False,
            delay=1,
            disable=not self._shows(),
            bar_format="{desc} {elapsed}",
        ) as bar:
            yield
            bar.update()
        logger.info("keras_remat: %s took %.2f s", text, time.perf_counter() - started)


def _checked_batch_size(batch_size: int | str) -> int | str:
    if isinstance(batch_size, str):
        if batch_size not in ("max", "keep"):
            raise ValueError(
                f'batch_size must be "max", "keep" or a positive int, got {batch_size!r}'
            )
        return batch_size
    _check_int("batch_size", batch_size, least=1)
    return int(batch_size)


def _check_int(name: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int of at least {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    ok = (
        (least is None or value >= least)
        and (above is None or value > above)
        and (below is None or value < below)
    )
    if not ok or value != value:
        raise ValueError(f"{name}={value!r} is out of range")
