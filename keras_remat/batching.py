"""Which batch size a running ``fit`` trains with: the loader's, or larger ones made of the loader's batches.

With ``batch_size="keep"`` every loader batch is one step. Otherwise the first steps train loader batches as they come; once their costs are
known, the largest batch that fits is searched (:mod:`keras_remat.autotune`), and from then on samples are held back until a batch of that
size is full. Samples keep their order and each is trained exactly once per epoch: what is left when the epoch's data ends is one smaller
step, before validation. A size that turns out not to fit after all is stepped down before anything of it was trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_remat.autotune import BatchSearch, batch_scaling, search_batch_size
from keras_remat.backends.examples import batch_size_of
from keras_remat.compilation import StepChoice
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError, UnsupportedModelError
from keras_remat.grouping import BatchGrouper
from keras_remat.report import AutotuneReport

_SEARCH_TIME_LIMIT_S = 60.0
_STEP_DOWN = 0.9


class BatchTrainer:
    """Trains loader batches under a :class:`~keras_remat.compilation.StepChoice`, in steps of the largest batch that fits.

    Args:
        model: inside ``fit``.
        steps: trains single batches.
        report: gets ``max_batch_size`` and ``batch_size``.
        batch_size: ``"keep"``, ``"max"`` or the largest size wanted.
        samples_per_epoch: asked for the epoch's samples given the loader's batch size; ``None`` when unknown.
        on_change: called with (old, new) when the effective batch size changes.
        seed: for the solver.
    """

    def __init__(
        self,
        model: Any,
        steps: StepChoice,
        report: AutotuneReport,
        batch_size: int | str,
        samples_per_epoch: Callable[[int], int | None],
        on_change: Callable[[int, int], None],
        seed: int = 0,
    ):
        self._model, self._steps, self._report = model, steps, report
        self._wanted, self._samples_per_epoch, self._on_change, self._seed = batch_size, samples_per_epoch, on_change, seed
        self._group = BatchGrouper()
        self._size: int | None = None  # samples per step; None trains loader batches as they come
        self._searching = batch_size != "keep"
        self._logs: Any = None
        self.search: BatchSearch | None = None

    def run(self, batch: Any) -> Any:
        """Takes one loader batch; returns the newest logs, or the metrics so far when nothing was trained yet."""
        if self._size is None:
            self._logs = self._steps.run(batch, may_split=self._wanted != "keep")
            if self._searching and self._steps.settled:
                self._searching = False
                if self._steps.micro_batches == 1:
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

    def _train_full_groups(self) -> None:
        while self._size is not None and self._group.samples >= self._size:
            batch = self._group.take(self._size)
            try:
                self._logs = self._steps.run(batch)
            except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
                self._group.put_back(batch)
                if self._size == 1:
                    raise
                self._step_down(int(self._size * _STEP_DOWN), str(error))
                continue
            peak = self._steps.settled_peak_bytes
            if peak is not None and peak > self._steps.limit_bytes and self._size > 1:
                self._step_down(int(self._size * self._steps.usable_bytes / peak), "its measured peak is over the limit")

    def _step_down(self, size: int, reason: str) -> None:
        assert self._size is not None
        self._steps.event(
            "step-down", f"A batch of {self._size} does not fit after all, going down to {max(1, size)}: {reason}"
        )
        self._change(self._size, max(1, size))

    def _search(self, batch: Any) -> None:
        loader = batch_size_of(batch)
        total = self._samples_per_epoch(loader)
        bounds = [b for b in (total, self._wanted if isinstance(self._wanted, int) else None) if b is not None]
        at_most = min(bounds, default=None)
        if isinstance(self._wanted, int) and self._wanted <= loader:
            if self._wanted < loader:
                self._change(loader, self._wanted)
            return
        try:
            with self._steps.long_task("searching the largest batch that fits"):
                traced, problem = self._steps.measured_main()
                scaling = batch_scaling(self._steps.backend, self._model, traced, problem, batch)
                search = search_batch_size(
                    scaling, loader, self._steps.limit_bytes, self._steps.usable_bytes, self._steps.backend,
                    at_most=at_most, time_limit_s=_SEARCH_TIME_LIMIT_S, seed=self._seed,
                )  # fmt: skip
        except (UnsupportedModelError, InfeasibleBudgetError, ScheduleNotFoundError) as error:
            self._steps.event("search", f"No larger batch: {error}")
            self._report.max_batch_size = loader
            return
        self.search = search
        self._steps.event("search", str(search))
        self._report.max_batch_size = search.max_batch_size
        if search.max_batch_size > loader:
            self._change(loader, search.max_batch_size)

    def _change(self, old: int, new: int) -> None:
        self._size = new
        self._report.batch_size = new
        self._steps.forget_main()
        self._steps.event("batch", f"The effective batch size is {new} from here on ({old} before).")
        self._on_change(old, new)
