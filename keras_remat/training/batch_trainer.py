"""Which batch size a running ``fit`` trains with: the loader's, or larger ones made of the loader's
batches.

With ``batch_size="keep"`` every loader batch is one step. Otherwise the first steps train loader
batches as they come; once their costs are known, the largest batch that fits is searched
(:mod:`keras_remat.batch_size.search`), and from then on samples are held back until a batch of that
size is full. Samples keep their order and each is trained exactly once per epoch: what is left when
the epoch's data ends is one smaller step, before validation.

The search only predicts; the steps that train tell. A size that turns out not to fit after all is
stepped down before anything of it was trained; one is stepped up where a known order, or a new one,
reaches 3 % further by the error that was measured, a few times at most. A size that was stepped up
to and measures over the limit is given up for the one before, whose step is there already.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from keras_remat.backends.batches import batch_size_of
from keras_remat.batch_size.scaling import BatchScaling, batch_scaling
from keras_remat.batch_size.search import BatchSearch, SizeSearch, search_batch_size
from keras_remat.core.events import EventKind
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError, UnsupportedModelError
from keras_remat.planning.plan import Plan
from keras_remat.reporting.fit_report import AutotuneReport
from keras_remat.training.backend_race import BackendRace
from keras_remat.training.grouping import BatchGrouper
from keras_remat.units import format_bytes

#: The search may take as long as this many steps of training, but at least and at most so many
#: seconds; of it, the share of the thorough solver, which also looks for steps up, and what one
#: solve may take of that.
_SEARCH_STEPS, _LEAST_SEARCH_S, _MOST_SEARCH_S, _LATE_SHARE, _SOLVE_SHARE = (
    200,
    1.0,
    30.0,
    0.6,
    0.25,
)
_STEP_DOWN = 0.9
#: A step up is worth it from this share on; how many there are at most.
_WORTH_STEP_UP, _MOST_STEPS_UP = 0.03, 3


class BatchTrainer:
    """Trains loader batches under a :class:`~keras_remat.training.backend_race.BackendRace`, in
    steps of the largest batch that fits.

    Args:
        model: inside ``fit``.
        steps: trains single batches.
        report: gets ``max_batch_size`` and ``batch_size``.
        batch_size: ``"keep"``, ``"max"`` or the largest size wanted.
        samples_per_epoch: asked for the epoch's samples given the loader's batch size; ``None``
            when unknown.
        on_change: called with (old, new) when the effective batch size changes.
        seed: for the solver.
    """

    def __init__(
        self,
        model: Any,
        steps: BackendRace,
        report: AutotuneReport,
        batch_size: int | str,
        samples_per_epoch: Callable[[int], int | None],
        on_change: Callable[[int, int], None],
        seed: int = 0,
    ):
        self._model, self._steps, self._report = model, steps, report
        self._wanted, self._samples_per_epoch, self._on_change, self._seed = (
            batch_size,
            samples_per_epoch,
            on_change,
            seed,
        )
        self._group = BatchGrouper()
        self._size: int | None = None  # samples per step; None trains loader batches as they come
        self._searching = batch_size != "keep"
        self._logs: Any = None
        self._scaling: BatchScaling | None = None
        self._at_most: int | None = None
        self._held: int | None = None  # the newest size whose final step kept to the limit
        self._too_large: int | None = None  # the smallest size whose final step did not
        self._steps_up = 0
        self._step_s = 0.0  # what the newest step took
        self.search: BatchSearch | None = None

    def run(self, batch: Any) -> Any:
        """Takes one loader batch; returns the newest logs, or the metrics so far when nothing was
        trained yet."""
        if self._size is None:
            self._logs = self._train(batch, may_split=self._wanted != "keep")
            if self._searching and self._steps.settled:
                self._searching = False
                if self._steps.trainer.micro_batches == 1:
                    self._search(batch)
            return self._logs
        self._group.add(batch)
        self._train_full_groups()
        return self._logs

    def finish(self) -> Any:
        """Trains what is held back; ``None`` when nothing is."""
        if self._group.samples == 0:
            return None
        self._train_full_groups()
        if self._group.samples:
            self._logs = self._steps.run(self._group.take(self._group.samples))
        return self._logs

    def _train(self, batch: Any, **options: Any) -> Any:
        started = time.perf_counter()
        logs = self._steps.run(batch, **options)
        self._step_s = time.perf_counter() - started
        return logs

    @property
    def _search_s(self) -> float:
        """Seconds that a search is worth."""
        return min(_MOST_SEARCH_S, max(_LEAST_SEARCH_S, _SEARCH_STEPS * self._step_s))

    def _train_full_groups(self) -> None:
        while self._size is not None and self._group.samples >= self._size:
            batch = self._group.take(self._size)
            try:
                self._logs = self._train(batch)
            except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
                self._group.put_back(batch)
                if self._size == 1:
                    raise
                self._step_down(int(self._size * _STEP_DOWN), str(error))
                continue
            self._follow_measured(self._size)

    def _follow_measured(self, size: int) -> None:
        """What the measured peak of the final step says about the size."""
        peak = self._steps.trainer.settled_peak_bytes
        if peak is None:
            return
        if peak > self._steps.trainer.limit_bytes:
            if size > 1:
                smaller = int(size * self._steps.trainer.usable_bytes / peak)
                self._too_large = min(size, self._too_large or size)
                if self._held is not None:
                    self._steps_up = _MOST_STEPS_UP  # that was one step up too many
                self._step_down(
                    self._held if self._held is not None and self._held < size else smaller,
                    "its measured peak is over the limit",
                )
        elif self._held != size:
            self._held = size
            self._step_up(size, peak)

    def _step_up(self, size: int, peak_bytes: int) -> None:
        """Goes on with a larger size where a known order, or one more, reaches it by what was
        measured."""
        plan, steps, scaling = self._steps.trainer.plan, self._steps, self._scaling
        if (
            scaling is None
            or self.search is None
            or plan is None
            or self._steps_up >= _MOST_STEPS_UP
        ):
            return
        bounds = (self._at_most, None if self._too_large is None else self._too_large - 1)
        at_most = min([2 * size, *(bound for bound in bounds if bound is not None)])
        least = max(size + 1, int(size * (1 + _WORTH_STEP_UP)))
        if (
            least > at_most
            or plan.problem is None
            or not plan.problem.graph.has_ops_of(scaling.at(size).graph)
        ):
            return
        with steps.fit.long_task("looking for a larger batch"):
            error = peak_bytes - steps.trainer.backend.memory.peak_bytes(
                scaling.at(size), plan.solution.schedule
            )
            orders = dict.fromkeys(
                p.plan.solution.schedule for p in reversed(self.search.probes) if p.plan is not None
            )
            found = SizeSearch(
                scaling,
                max(1, steps.trainer.usable_bytes - error),
                steps.trainer.backend,
                "forward",
                at_most,
                self._seed,
            )
            found.begin_with(size, plan)
            found.best_of([plan.solution.schedule, *orders], least)
            late_s = _LATE_SHARE * self._search_s
            found.climb_and_stretch("auto", late_s)
        if found.good >= least:
            self._steps_up += 1
            message = f"By the {format_bytes(peak_bytes)} that a batch of {size} measured, a schedule trains {found.good}: going up."
            steps.fit.event(EventKind.STEP_UP, message)
            self._change(size, found.good, found.fastest)

    def _step_down(self, size: int, reason: str) -> None:
        assert self._size is not None
        self._steps.fit.event(
            EventKind.STEP_DOWN,
            f"A batch of {self._size} does not fit after all, going down to {max(1, size)}: {reason}",
        )
        self._change(self._size, max(1, size))

    def _search(self, batch: Any) -> None:
        loader = batch_size_of(batch)
        total = self._samples_per_epoch(loader)
        bounds = [
            b
            for b in (total, self._wanted if isinstance(self._wanted, int) else None)
            if b is not None
        ]
        at_most = self._at_most = min(bounds, default=None)
        if isinstance(self._wanted, int) and self._wanted <= loader:
            if self._wanted < loader:
                self._change(loader, self._wanted)
            return
        try:
            with self._steps.fit.long_task("searching the largest batch that fits"):
                steps, backend = self._steps, self._steps.trainer.backend
                traced, problem = steps.trainer.reference_costs()
                scaling = batch_scaling(
                    backend, self._model, traced, problem, batch, steps.trainer.profiles_by_size()
                )
                search = search_batch_size(
                    scaling,
                    loader,
                    steps.trainer.limit_bytes,
                    steps.trainer.usable_bytes,
                    backend,
                    at_most=at_most,
                    time_limit_s=(1 - _LATE_SHARE) * self._search_s,
                    late_solver="auto",
                    late_time_limit_s=_LATE_SHARE * self._search_s,
                    seed=self._seed,
                )
        except (UnsupportedModelError, InfeasibleBudgetError, ScheduleNotFoundError) as error:
            self._steps.fit.event(EventKind.SEARCH, f"No larger batch: {error}")
            self._report.max_batch_size = loader
            return
        self.search, self._scaling = search, scaling
        self._steps.fit.event(EventKind.SEARCH, str(search))
        self._report.max_batch_size = search.max_batch_size
        if search.max_batch_size > loader:
            self._change(loader, search.max_batch_size, search.plan)

    def _change(self, old: int, new: int, expected: Plan | None = None) -> None:
        self._size = new
        self._report.batch_size = new
        self._steps.begin_shape(expected, None if self._scaling is None else self._scaling.at(new))
        self._steps.fit.event(
            EventKind.BATCH, f"The effective batch size is {new} from here on ({old} before)."
        )
        self._on_change(old, new)
