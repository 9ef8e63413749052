"""Which batch size a running ``fit`` trains with: the loader's, or larger ones made of the loader's
batches.

With ``batch_size="keep"`` every loader batch is one step. Otherwise the first steps train loader
batches as they come; once their costs are known, the largest batch that fits is searched
(:mod:`keras_remat.batch_size.search`), and from then on samples are held back until a batch of the
chosen size is full. Samples keep their order and each is trained exactly once per epoch: what is
left when the epoch's data ends is one smaller step, before validation.

The search only predicts; the steps that train tell, and the size goes up or down by the same rule
as outside of ``fit`` (:mod:`keras_remat.batch_size.sizes`). With ``"fastest"``, sizes are doubled
as long as the steps that train take less time for a sample; before a larger size stays, the
loader's is measured once more.

One file, though long: every method reads or changes the size that trains.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from statistics import median
from typing import Any

from keras_remat.backends.batches import batch_bytes, batch_size_of
from keras_remat.batch_size.climb import SizeClimb
from keras_remat.batch_size.found import BatchSearch, overhead_bound
from keras_remat.batch_size.scaling import BatchScaling, batch_scaling, graph_at
from keras_remat.batch_size.search import search_batch_size
from keras_remat.batch_size.sizes import faster_size, largest_wanted
from keras_remat.core.events import EventKind
from keras_remat.core.limit import Limit
from keras_remat.errors import (
    InfeasibleBudgetError,
    RematError,
    ScheduleNotFoundError,
    UnsupportedModelError,
    statement_of,
)
from keras_remat.planning.plan import Plan
from keras_remat.reporting.fit_report import AutotuneReport
from keras_remat.training.backend_race import BackendRace
from keras_remat.training.grouping import BatchGrouper
from keras_remat.training.learning_rate import LearningRateScaling
from keras_remat.training.shape_state import USUAL_TERMS, Terms
from keras_remat.units import format_bytes

#: The search may take as long as this many steps of training, or this share of those that are left,
#: but at least and at most so many seconds.
_SEARCH_STEPS, _SEARCH_SHARE, _LEAST_SEARCH_S, _MOST_SEARCH_S = 200, 0.2, 1.0, 60.0
#: The quick solver's share of that, and the share of one solve afterwards.
_QUICK_SHARE, _SOLVE_SHARE = 0.4, 0.1
#: Steps of one size whose median time is compared with another size's.
_COMPARED_STEPS = 5
#: A plain step is recorded where so many are left: recording it, and measuring it again, takes 8 to
#: 20 of them.
_LEAST_PROFILED_STEPS = 100


class BatchTrainer:
    """Trains loader batches under a :class:`~keras_remat.training.backend_race.BackendRace`.

    Args:
        batch_size: ``"keep"``, ``"max"``, ``"fastest"`` or the largest size wanted.
        steps_per_epoch: of the loader's batches; ``None`` where that is not known.

    Attributes:
        search: what the search for a larger batch found, once there was one.
        has_changed: whether a step was not what Keras would have run, since the epoch began.
    """

    def __init__(
        self,
        model: Any,
        steps: BackendRace,
        report: AutotuneReport,
        batch_size: int | str,
        steps_per_epoch: int | None,
        learning_rate: LearningRateScaling,
        seed: int = 0,
    ):
        self._model, self._steps, self._report = model, steps, report
        self._wanted, self._steps_per_epoch = batch_size, steps_per_epoch
        self._learning_rate, self._seed = learning_rate, seed
        self._group = BatchGrouper()
        self._loader = 0  # samples of the first batch
        self._size: int | None = None  # samples per step; None trains loader batches as they come
        self._largest = 0  # samples of a step, since the size was chosen
        self._epoch_samples = 0  # of the loader, since the epoch began
        self._other_samples = 0  # of those, what came in batches of another size than the first
        self._step_s: list[float] = []  # of the newest steps of this size that are final
        self._samples_per_s: dict[int, float] = {}  # of the sizes that are compared
        self._searching, self._has_warned = batch_size != "keep", False
        self._climb: SizeClimb | None = None
        self._scaling: BatchScaling | None = None
        self._held_bytes = 0  # beside a step of joined batches
        self._logs: Any = None
        self.search: BatchSearch | None = None
        self.has_changed = False

    # ---------------------------------------------------------------- batches

    def run(self, batch: Any) -> Any:
        """Takes one loader batch; returns the newest logs, or the metrics so far when nothing was
        trained yet."""
        samples = batch_size_of(batch)
        if samples == 0:
            return self._run_empty(batch)
        self._loader = self._loader or samples
        if self._size is None:
            self._train_held()
            may_split = self._wanted != "keep"
            terms = Terms(may_split=may_split, wants_profile=self._wants_profile)
            self._logs = self._train(batch, terms)
            self._epoch_samples += samples
            self._other_samples += samples if samples != self._loader else 0
            if self._searching and self._is_ready(batch):
                self._search(batch)
            elif samples == self._loader and self._wanted == "fastest":
                self._follow_measured(samples)
            return self._logs
        try:
            self._group.add(batch)
        except UnsupportedModelError as error:
            self._begin_other_samples(error)
            return self.run(batch)
        self._epoch_samples += samples
        self._train_full_groups(is_end=samples < self._loader)
        self._train_held()
        return self._logs

    def _run_empty(self, batch: Any) -> Any:
        """Trains a batch without samples as it came; joined with others it adds nothing."""
        if self._size is None:
            self._train_held()
            self._logs = self._steps.run(batch)
        return self._logs

    def run_settled(self, batch: Any) -> Any:
        """Trains one loader batch and returns its logs, where batches are trained as they come and
        its step is settled; ``None`` where not."""
        logs = self._steps.run_settled(batch) if self.trains_as_given else None
        if logs is not None:
            self._logs, self.has_changed = logs, True
        return logs

    def finish(self) -> Any:
        """Trains what is held back; ``None`` when nothing is."""
        if self._group.samples == 0:
            return None
        self._train_full_groups(is_end=True)
        if self._size is not None and self._group.samples:
            self._train_rest()
        self._train_held()
        return self._logs

    def _train_rest(self) -> None:
        """Trains less than a full batch; where no schedule is found for it, or the devices do not
        divide it, the loader's batches, which have trained before."""
        rest = self._group.samples
        if rest <= self._loader or rest == self._divisible(rest):
            with suppress(InfeasibleBudgetError, ScheduleNotFoundError, UnsupportedModelError):
                self._logs = self._train(self._group.take(rest), Terms(in_order=True))
        while self._group.samples:
            size = self._without_small_rest(min(self._loader, self._group.samples))
            self._logs = self._train(self._group.take(size))

    def _without_small_rest(self, size: int) -> int:
        """Returns the size of the next step of joined batches: a little less than ``size`` where
        it would leave fewer samples than there are devices, some of which would then get none."""
        multiple = self._steps.trainer.backend.batch_multiple
        leaves_too_few = 0 < self._group.samples - size < multiple < size
        return size - multiple if leaves_too_few else size

    def take_held(self) -> Iterator[Any]:
        """Yields what was not trained, oldest first, and holds it no longer."""
        while self._group.samples:
            yield self._group.take_oldest()

    def begin_anew(self, steps: BackendRace) -> None:
        """Goes on with other steps, and the loader's batches; what is held back is not lost."""
        self._steps, self._size, self._searching = steps, None, self._wanted != "keep"
        self._climb = self._scaling = self.search = None
        self._step_s.clear()
        self._samples_per_s.clear()

    @property
    def _is_comparing(self) -> bool:
        """Whether the times of steps decide which size trains."""
        return self._wanted == "fastest" and (self._searching or self._climb is not None)

    @property
    def trains_as_given(self) -> bool:
        """Whether the loader's batches are trained as they come, and no other size is looked
        for."""
        is_looking = self._searching or self._climb is not None
        return self._size is None and not is_looking and not self._group.samples

    @property
    def holds_samples(self) -> bool:
        """Whether samples are held back for a later step."""
        return self._group.samples > 0

    @property
    def loader_size(self) -> int:
        """The samples of the loader's first batch; 0 before it."""
        return self._loader

    @property
    def has_begun(self) -> bool:
        """Whether a batch of the loader has been trained."""
        return self._loader > 0

    def epoch_begins(self) -> None:
        """Begins to tell what an epoch's steps were."""
        self.has_changed, self._epoch_samples, self._other_samples = False, 0, 0

    def epoch_ends(self) -> None:
        """Keeps the updates of an epoch whose length was not known before, and says why no larger
        batch was searched in it."""
        if self._searching and 2 * self._other_samples > self._epoch_samples:
            self._searching = False
            self._steps.fit.warn(
                EventKind.SEARCH,
                f"No larger batch: the first one had {self._loader} samples, and most others do "
                "not. Give fit the batch of another size last.",
            )
        if isinstance(self._wanted, int) or self._size is None or not self._epoch_samples:
            return
        most = largest_wanted(self._wanted, self._loader, self._epoch_samples)
        if most is not None and self._size > most:
            self._climb = None
            self._change(max(self._loader, self._divisible(most)))

    def _train(self, batch: Any, terms: Terms = USUAL_TERMS) -> Any:
        size = batch_size_of(batch)
        # a rest that is smaller than the loader's batches is trained as such a rest always is
        usual = min(self._loader, self._size or self._loader)
        as_given = self._size is None  # the loader's own batches may differ in size
        factor = 1.0 if as_given else self._learning_rate.factor(max(size, usual), self._loader)
        started = time.perf_counter()
        with self._learning_rate.during(factor):
            try:
                given = self._steps.fit.installed.as_given(batch)
                logs = self._steps.run(given, terms, timed=self._is_comparing)
            except RematError:
                self._group.put_back(batch)  # it was not trained
                raise
        if self._steps.settled and size == (self._size or self._loader):
            self._step_s = [*self._step_s, time.perf_counter() - started][-_COMPARED_STEPS:]
        self._report.batch_size = self._largest = max(self._largest, size)
        self.has_changed |= self._size is not None or self._steps.trainer.plan is not None
        return logs

    def _train_full_groups(self, *, is_end: bool) -> None:
        """Trains full batches.

        Args:
            is_end: whether the newest batch is the epoch's last, as far as its size tells.
        """
        while self._size is not None and self._group.samples >= self._size:
            size = self._without_small_rest(self._size) if is_end else self._size
            try:
                climbs = self._climb is not None and size > self._climb.trained
                self._logs = self._train(self._group.take(size), Terms(may_miss=not climbs))
            except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
                if self._climb is None:
                    raise
                self._climb.note(size, None, 0, fits=False)
                self._go_on(f"A batch of {size} does not fit after all: {statement_of(error)}")
            except UnsupportedModelError as error:
                if size <= self._loader:
                    raise
                self._refuse_larger(error)
            else:
                self._follow_measured(size)

    def _train_held(self) -> None:
        """Trains what is held back as it came, where batches are no longer joined."""
        while self._size is None and self._group.samples:
            self._logs = self._train(self._group.take_oldest())

    def _begin_other_samples(self, error: UnsupportedModelError) -> None:
        """Trains what is held back, because no batch that follows can be joined with it."""
        if self._size is not None and self._size > self._loader:
            self._refuse_larger(error)
        elif self._group.samples:
            self._train_rest()
        else:  # nor can this one be split
            self._steps.fit.event(EventKind.SEARCH, f"No other batch: {error}")
            self._change(self._loader)

    # ---------------------------------------------------------------- sizes

    def _is_ready(self, batch: Any) -> bool:
        """Whether the loader's batches have told what there is to know; where they differ in
        shape, the batch is of the one that training is about."""
        steps = self._steps
        if not steps.settled or batch_size_of(batch) != self._loader:
            return False
        if not steps.trainer.is_reference(batch):
            return False
        if steps.trainer.micro_batches > 1:
            self._searching = False
        enough = self._wanted != "fastest" or len(self._step_s) == _COMPARED_STEPS
        return self._searching and enough

    def _search(self, batch: Any) -> None:
        self._searching = False
        loader, wanted, at_most = self._loader, self._wanted, self._at_most
        if isinstance(wanted, int) and wanted <= loader:
            if wanted < loader:
                self._make_smaller(batch, wanted)
            return
        if at_most is not None and at_most <= loader:
            self._refuse_larger("an epoch keeps ten updates; an int as batch_size lifts that.")
            return
        self._held_bytes = self._bytes_held_beside(batch)
        try:
            self.search = self._predicted(batch, at_most)
        except (UnsupportedModelError, InfeasibleBudgetError, ScheduleNotFoundError) as error:
            self._refuse_larger(error)
            return
        steps, search = self._steps, self.search
        steps.fit.event(EventKind.SEARCH, str(search))
        self._report.max_batch_size = search.max_batch_size
        self._climb = SizeClimb(
            steps.trainer.backend,
            search,
            at_most=at_most,
            trained=loader,
            solve_s=_SOLVE_SHARE * self._search_s,
            multiple=steps.trainer.backend.batch_multiple,
            seed=self._seed,
        )
        if wanted == "fastest":
            self._compare(loader)
        elif search.max_batch_size > loader:
            self._go_on()

    @property
    def _at_most(self) -> int | None:
        """The largest batch that is wanted; ``None`` where only memory bounds it."""
        at_most = largest_wanted(self._wanted, self._loader, self._samples_per_epoch)
        return None if at_most is None else self._divisible(at_most)

    @property
    def _wants_profile(self) -> bool:
        """Whether a larger batch will be searched, and trained for long enough."""
        at_most, left = self._at_most if self._searching else 0, self._steps.fit.most_steps_left
        may_grow = at_most is None or at_most > self._loader
        return may_grow and (left is None or left >= _LEAST_PROFILED_STEPS)

    @property
    def _samples_per_epoch(self) -> int | None:
        return None if self._steps_per_epoch is None else self._steps_per_epoch * self._loader

    def _divisible(self, size: int) -> int:
        """Returns the largest size up to ``size`` that the devices divide evenly."""
        return size - size % self._steps.trainer.backend.batch_multiple

    def _make_smaller(self, batch: Any, size: int) -> None:
        size = self._divisible(size) or self._steps.trainer.backend.batch_multiple
        try:
            graph_at(self._steps.trainer.backend, self._model, batch, size)
        except UnsupportedModelError as error:
            self._steps.fit.event(EventKind.SEARCH, f"No other batch: {error}")
        else:
            self._change(size)

    def _predicted(self, batch: Any, at_most: int | None) -> BatchSearch:
        """Searches the largest batch by prediction."""
        with self._steps.fit.long_task("searching the largest batch that fits"):
            steps = self._steps.trainer
            backend = steps.backend
            problem, measured = steps.reference_costs(batch)
            self._scaling = batch_scaling(backend, self._model, problem, batch, measured)
            return search_batch_size(
                self._scaling,
                self._loader,
                self._limit,
                backend,
                at_most=at_most,
                time_limit_s=_QUICK_SHARE * self._search_s,
                late_solver="auto",
                late_time_limit_s=(1 - _QUICK_SHARE) * self._search_s,
                multiple=backend.batch_multiple,
                seed=self._seed,
            )

    @property
    def _limit(self) -> Limit:
        """What a step of joined batches may use."""
        return self._steps.fit.limit.reserving(self._held_bytes)

    def _bytes_held_beside(self, batch: Any) -> int:
        """Returns what lies in the device's memory beside a step of joined batches: where that is
        the host's, the loader's newest batch and what was cut off it."""
        steps = self._steps.trainer
        return 0 if steps.on_gpu else 2 * batch_bytes(batch) // steps.backend.batch_multiple

    @property
    def _search_s(self) -> float:
        """Seconds that a search is worth, by what a step is estimated to take: what is measured
        depends on what else the machine does."""
        step_s = self._steps.trainer.estimated_step_s
        steps, left = float(_SEARCH_STEPS), self._steps.fit.most_steps_left
        if left is not None:
            steps = min(steps, _SEARCH_SHARE * left)
        return min(_MOST_SEARCH_S, max(_LEAST_SEARCH_S, steps * step_s))

    def _follow_measured(self, size: int) -> None:
        """Chooses the next size by what the final steps of this one measured."""
        if self._climb is None or not self._steps.settled or size == self._climb.failed[0]:
            return
        plan, peak = self._steps.trainer.plan, self._steps.trainer.settled_peak_bytes
        if peak is not None and not self._steps.fit.limit.holds(peak):
            self._climb.note(size, plan, peak, fits=False)
            self._go_on(
                f"The {format_bytes(peak)} that a batch of {size} measured are over the limit."
            )
        elif self._wanted == "fastest":
            self._compare(size)
        elif plan is not None and size > self._climb.trained:
            self._climb.note(size, plan, peak or 0, fits=True)
            bound = inf if plan.problem is None else overhead_bound(plan.problem, "forward")
            if plan.overhead > bound:
                self._steps.fit.event(
                    EventKind.REMARK,
                    f"By the op times that were measured, a batch of {size} takes "
                    f"{plan.overhead:.1%} longer. One forward pass, which the search allowed, is "
                    f"{bound:.1%}.",
                )
            self._go_on(
                f"By the {format_bytes(peak or 0)} that a batch of {size} measured, more fits."
            )

    def _go_on(self, reason: str = "") -> None:
        """Goes on with the size that the rule says: another one, or the largest that trained.

        Args:
            reason: what was measured, if anything was.
        """
        climb, scaling, size = self._climb, self._scaling, self._size or self._loader
        if climb is None or scaling is None:
            return
        problem, chosen = self._steps.trainer.problem, None
        if problem is not None and self._steps.settled:
            scaling.learn(size, problem)
        if self._wanted != "fastest":
            with self._steps.fit.long_task("looking for the largest batch"):
                chosen = climb.choose(scaling, self._limit)
        new, plan = (climb.trained, None) if chosen is None else chosen
        if chosen is None and climb.trained == size == self._loader:
            usable = format_bytes(self._limit.usable_bytes)
            self._refuse_larger(
                f"{self._report.max_batch_size} samples were predicted to keep to {usable}. By the "
                f"costs that were measured since, no more than {size} do. A higher limit would do."
            )
            return
        if chosen is None:
            self._climb = None
            self._report.max_batch_size = climb.trained
        if new != size:
            if reason:
                kind = EventKind.STEP_UP if new > size else EventKind.STEP_DOWN
                self._steps.fit.event(kind, reason)
            self._change(new, plan)

    def _compare(self, size: int) -> None:
        """Goes on with the size that trains the most samples per second, once it is known."""
        if len(self._step_s) < _COMPARED_STEPS or self._climb is None or self.search is None:
            return
        rate = size / median(self._step_s)
        is_second = size in self._samples_per_s
        self._samples_per_s[size] = max(rate, self._samples_per_s.get(size, 0.0))
        self._climb.trained = max(size, self._climb.trained)
        new = faster_size(self._samples_per_s, self.search.max_batch_size)
        if new in self._samples_per_s and new != self._loader and not is_second:
            new = self._loader  # devices slow down and speed up: it is measured once more
        elif new in self._samples_per_s:
            self._climb = None
            told = ", ".join(f"{rate:.4g} at {of}" for of, rate in self._samples_per_s.items())
            self._steps.fit.event(
                EventKind.SEARCH, f"Samples per second: {told}. The batch size is {new}."
            )
        if new != size:
            self._change(new, self.search.plan)

    def _refuse_larger(self, reason: Exception | str) -> None:
        """Goes on with the batches as they come."""
        told = reason if isinstance(reason, str) else statement_of(reason)
        self._steps.fit.event(EventKind.SEARCH, f"No larger batch: {told}")
        self._report.max_batch_size = self._loader
        self._climb = None
        if self._size is not None:
            self._change(self._loader)

    def _change(self, new: int, expected: Plan | None = None) -> None:
        """Trains ``new`` samples a step from here on."""
        old, self._largest = self._size or self._loader, 0
        self._size = None if new == self._loader else new
        self._step_s.clear()
        scaling = self._scaling
        self._steps.begin_shape(expected, None if scaling is None else scaling.at(new))
        devices = self._steps.trainer.backend.batch_multiple
        each = f": {new // devices} on each of {devices} devices" if devices > 1 else ""
        self._steps.fit.event(
            EventKind.BATCH, f"The batch size is {new} from here on ({old} before){each}."
        )
        if new > self._loader and isinstance(self._wanted, str) and not self._has_warned:
            self._has_warned = True
            self._warn(new)

    def _warn(self, new: int) -> None:
        """Says what a larger batch means for the training."""
        loader, samples = self._loader, self._samples_per_epoch
        updates = "fewer updates in an epoch"
        if samples is not None:
            updates = f"{-(-samples // new)} updates in an epoch instead of {-(-samples // loader)}"
        self._learning_rate.leave_schedule_alone()
        factor = self._learning_rate.factor(new, loader)
        rate = (
            'The learning rate stays as it is; learning_rate_scaling="linear" or "sqrt" makes it '
            "follow the batch."
            if factor == 1.0
            else f"The learning rate is multiplied by {factor:.4g} in its steps."
        )
        warnings.warn(
            f"keras_remat: fit was given batches of {loader} and trains batches of {new} from here "
            f'on: {updates}. {rate} batch_size="keep" keeps the batches.',
            stacklevel=2,
        )
