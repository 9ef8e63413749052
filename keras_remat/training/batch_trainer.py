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
from dataclasses import replace
from math import inf
from statistics import median
from typing import Any

from keras_remat.backends.batches import batch_bytes, batch_size_of
from keras_remat.batch_size.climb import SizeClimb
from keras_remat.batch_size.found import BatchSearch, overhead_bound
from keras_remat.batch_size.scaling import batch_scaling, graph_at
from keras_remat.batch_size.search import search_batch_size
from keras_remat.batch_size.sizes import largest_wanted
from keras_remat.core.limit import Limit
from keras_remat.errors import (
    InfeasibleBudgetError,
    RematError,
    ScheduleNotFoundError,
    UnsupportedModelError,
)
from keras_remat.planning.plan import Plan
from keras_remat.reporting.fit_report import AutotuneReport
from keras_remat.training import tell
from keras_remat.training.backend_race import BackendRace
from keras_remat.training.contest import compared
from keras_remat.training.grouping import BatchGrouper
from keras_remat.training.learning_rate import LearningRateScaling
from keras_remat.training.record import COMPARED_STEPS, SizesRecord
from keras_remat.training.shape_state import USUAL_TERMS, Terms
from keras_remat.training.step_trainer import StepTrainer

#: The search may take as long as this many steps of training, or this share of those that are left,
#: but at least and at most so many seconds.
_SEARCH_STEPS, _SEARCH_SHARE, _LEAST_SEARCH_S, _MOST_SEARCH_S = 200, 0.2, 1.0, 60.0
#: The quick solver's share of that, and the share of one solve afterwards.
_QUICK_SHARE, _SOLVE_SHARE = 0.4, 0.1
#: A plain step is recorded where so many are left: recording it, and measuring it again, takes 8 to
#: 20 of them.
_LEAST_PROFILED_STEPS = 100


class BatchTrainer:
    """Trains loader batches under a :class:`~keras_remat.training.backend_race.BackendRace`.

    Args:
        batch_size: ``"keep"``, ``"max"``, ``"fastest"`` or the largest size wanted.
        steps_per_epoch: of the loader's batches; ``None`` where that is not known.

    Attributes:
        steps: trains single batches.
        sizes: which size trains, and what is known of others.
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
        self._model, self.steps, self._report = model, steps, report
        self._wanted, self._steps_per_epoch = batch_size, steps_per_epoch
        self._learning_rate, self._seed = learning_rate, seed
        self._group = BatchGrouper()
        self.sizes = SizesRecord(is_searching=batch_size != "keep")
        self._logs: Any = None

    # ---------------------------------------------------------------- batches

    def run(self, batch: Any) -> Any:
        """Takes one loader batch; returns the newest logs, or the metrics so far when nothing was
        trained yet."""
        samples = batch_size_of(batch)
        if samples == 0:
            return self._run_empty(batch)
        if not self.sizes.loader:
            self.sizes = replace(self.sizes, loader=samples)
        loader = self.sizes.loader
        if self.sizes.chosen is None:
            self._train_held()
            may_split = self._wanted != "keep"
            terms = Terms(may_split=may_split, wants_profile=self._wants_profile)
            self._logs = self._train(batch, terms)
            self.sizes = self.sizes.after_arrival(samples)
            if self.sizes.is_searching and self._is_ready(batch):
                self._search(batch)
            elif samples == loader and self._wanted == "fastest":
                self._follow_measured(samples)
            return self._logs
        try:
            self._group.add(batch)
        except UnsupportedModelError as error:
            self._begin_other_samples(error)
            return self.run(batch)
        self.sizes = self.sizes.after_arrival(samples)
        self._train_full_groups(is_end=samples < loader)
        self._train_held()
        return self._logs

    def _run_empty(self, batch: Any) -> Any:
        """Trains a batch without samples as it came; joined with others it adds nothing."""
        if self.sizes.chosen is None:
            self._train_held()
            self._logs = self.steps.run(batch)
        return self._logs

    @property
    def settled_trainer(self) -> StepTrainer | None:
        """What trains a batch of the loader's as it comes, where no other size or way is looked
        for."""
        return self.steps.settled_trainer if self.trains_as_given else None

    def note_settled(self, logs: Any) -> None:
        """Notes the logs of a batch that :attr:`settled_trainer` has trained under a plan."""
        self._logs = logs
        if not self.sizes.has_changed:
            self.sizes = replace(self.sizes, has_changed=True)

    def finish(self) -> Any:
        """Trains what is held back; ``None`` when nothing is."""
        if self._group.samples == 0:
            return None
        self._train_full_groups(is_end=True)
        if self.sizes.chosen is not None and self._group.samples:
            self._train_rest()
        self._train_held()
        return self._logs

    def _train_rest(self) -> None:
        """Trains less than a full batch; where no schedule is found for it, or the devices do not
        divide it, the loader's batches, which have trained before."""
        rest, loader = self._group.samples, self.sizes.loader
        if rest <= loader or rest == self._divisible(rest):
            with suppress(InfeasibleBudgetError, ScheduleNotFoundError, UnsupportedModelError):
                self._logs = self._train(self._group.take(rest), Terms(in_order=True))
        while self._group.samples:
            size = self._without_small_rest(min(loader, self._group.samples))
            self._logs = self._train(self._group.take(size))

    def _without_small_rest(self, size: int) -> int:
        """Returns the size of the next step of joined batches: a little less than ``size`` where
        it would leave fewer samples than there are devices, some of which would then get none."""
        multiple = self.steps.trainer.backend.batch_multiple
        leaves_too_few = 0 < self._group.samples - size < multiple < size
        return size - multiple if leaves_too_few else size

    def take_held(self) -> Iterator[Any]:
        """Yields what was not trained, oldest first, and holds it no longer."""
        while self._group.samples:
            yield self._group.take_oldest()

    def begin_anew(self, steps: BackendRace) -> None:
        """Goes on with other steps, and the loader's batches; what is held back is not lost."""
        self.steps = steps
        self.sizes = self.sizes.for_new_steps(is_searching=self._wanted != "keep")

    @property
    def _is_comparing(self) -> bool:
        """Whether the times of steps decide which size trains."""
        return self._wanted == "fastest" and self.sizes.is_looking

    @property
    def trains_as_given(self) -> bool:
        """Whether the loader's batches are trained as they come, and no other size is looked
        for."""
        sizes = self.sizes
        return sizes.chosen is None and not sizes.is_looking and not self._group.samples

    @property
    def holds_samples(self) -> bool:
        """Whether samples are held back for a later step."""
        return self._group.samples > 0

    def epoch_begins(self) -> None:
        """Begins to tell what an epoch's steps were."""
        self.sizes = self.sizes.in_new_epoch()

    def epoch_ends(self) -> None:
        """Keeps the updates of an epoch whose length was not known before, and says why no larger
        batch was searched in it."""
        sizes = self.sizes
        if sizes.is_searching and sizes.mostly_others:
            self.sizes = replace(sizes, is_searching=False)
            self.steps.fit.warn(*tell.first_batch_is_odd(sizes.loader))
        if isinstance(self._wanted, int) or sizes.chosen is None or not sizes.epoch_samples:
            return
        most = largest_wanted(self._wanted, sizes.loader, sizes.epoch_samples)
        if most is not None and sizes.chosen > most:
            self.sizes = replace(self.sizes, climb=None)
            self._change(max(sizes.loader, self._divisible(most)))

    def _train(self, batch: Any, terms: Terms = USUAL_TERMS) -> Any:
        size, loader, chosen = batch_size_of(batch), self.sizes.loader, self.sizes.chosen
        factor = 1.0  # the loader's own batches may differ in size
        if chosen is not None:
            # a rest that is smaller than the loader's batches is trained as such a rest always is
            factor = self._learning_rate.factor(max(size, min(loader, chosen)), loader)
        started = time.perf_counter()
        with self._learning_rate.during(factor):
            try:
                given = self.steps.fit.installed.as_given(batch)
                logs = self.steps.run(given, terms, timed=self._is_comparing)
            except RematError:
                self._group.put_back(batch)  # it was not trained
                raise
        is_final = self.steps.settled and size == self.sizes.size
        self.sizes = self.sizes.after_step(
            size,
            changed=chosen is not None or self.steps.trainer.plan is not None,
            final_s=time.perf_counter() - started if is_final else None,
        )
        self._report.batch_size = self.sizes.largest
        return logs

    def _train_full_groups(self, *, is_end: bool) -> None:
        """Trains full batches.

        Args:
            is_end: whether the newest batch is the epoch's last, as far as its size tells.
        """
        while (size := self.sizes.chosen) is not None and self._group.samples >= size:
            size, climb = self._without_small_rest(size) if is_end else size, self.sizes.climb
            try:
                climbs = climb is not None and size > climb.trained
                self._logs = self._train(self._group.take(size), Terms(may_miss=not climbs))
            except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
                if climb is None:
                    raise
                climb.note(size, None, 0, fits=False)
                self._go_on(tell.does_not_fit(size, error))
            except UnsupportedModelError as error:
                if size <= self.sizes.loader:
                    raise
                self._refuse_larger(tell.no_larger_batch(error))
            else:
                self._follow_measured(size)

    def _train_held(self) -> None:
        """Trains what is held back as it came, where batches are no longer joined."""
        while self.sizes.chosen is None and self._group.samples:
            self._logs = self._train(self._group.take_oldest())

    def _begin_other_samples(self, error: UnsupportedModelError) -> None:
        """Trains what is held back, because no batch that follows can be joined with it."""
        if self.sizes.size > self.sizes.loader:
            self._refuse_larger(tell.no_larger_batch(error))
        elif self._group.samples:
            self._train_rest()
        else:  # nor can this one be split
            self.steps.fit.event(*tell.no_other_batch(error))
            self._change(self.sizes.loader)

    # ---------------------------------------------------------------- sizes

    def _is_ready(self, batch: Any) -> bool:
        """Whether the loader's batches have told what there is to know; where they differ in
        shape, the batch is of the one that training is about."""
        steps = self.steps
        if not steps.settled or batch_size_of(batch) != self.sizes.loader:
            return False
        if not steps.trainer.is_reference(batch):
            return False
        if steps.trainer.micro_batches > 1 or steps.trainer.in_slices:
            self.sizes = replace(self.sizes, is_searching=False)
        enough = self._wanted != "fastest" or len(self.sizes.step_s) == COMPARED_STEPS
        return self.sizes.is_searching and enough

    def _search(self, batch: Any) -> None:
        self.sizes = replace(self.sizes, is_searching=False)
        loader, wanted, at_most = self.sizes.loader, self._wanted, self._at_most
        if isinstance(wanted, int) and wanted <= loader:
            if wanted < loader:
                self._make_smaller(batch, wanted)
            return
        if at_most is not None and at_most <= loader:
            self._refuse_larger(tell.keeps_updates())
            return
        self.sizes = replace(self.sizes, held_bytes=self._bytes_held_beside(batch))
        try:
            search = self._predicted(batch, at_most)
        except (UnsupportedModelError, InfeasibleBudgetError, ScheduleNotFoundError) as error:
            self._refuse_larger(tell.no_larger_batch(error))
            return
        steps = self.steps
        steps.fit.event(*tell.searched(search))
        self._report.max_batch_size = search.max_batch_size
        climb = SizeClimb(
            steps.trainer.backend,
            search,
            at_most=at_most,
            trained=loader,
            solve_s=_SOLVE_SHARE * self._search_s,
            multiple=steps.trainer.backend.batch_multiple,
            seed=self._seed,
        )
        self.sizes = replace(self.sizes, search=search, climb=climb)
        if wanted == "fastest":
            self._compare(loader)
        elif search.max_batch_size > loader:
            self._go_on()

    @property
    def _at_most(self) -> int | None:
        """The largest batch that is wanted; ``None`` where only memory bounds it."""
        at_most = largest_wanted(self._wanted, self.sizes.loader, self._samples_per_epoch)
        return None if at_most is None else self._divisible(at_most)

    @property
    def _wants_profile(self) -> bool:
        """Whether a larger batch will be searched, and trained for long enough."""
        at_most = self._at_most if self.sizes.is_searching else 0
        may_grow, left = (
            at_most is None or at_most > self.sizes.loader,
            self.steps.fit.most_steps_left,
        )
        return may_grow and (left is None or left >= _LEAST_PROFILED_STEPS)

    @property
    def _samples_per_epoch(self) -> int | None:
        steps = self._steps_per_epoch
        return None if steps is None else steps * self.sizes.loader

    def _divisible(self, size: int) -> int:
        """Returns the largest size up to ``size`` that the devices divide evenly."""
        return size - size % self.steps.trainer.backend.batch_multiple

    def _make_smaller(self, batch: Any, size: int) -> None:
        size = self._divisible(size) or self.steps.trainer.backend.batch_multiple
        try:
            graph_at(self.steps.trainer.backend, self._model, batch, size)
        except UnsupportedModelError as error:
            self.steps.fit.event(*tell.no_other_batch(error))
        else:
            self._change(size)

    def _predicted(self, batch: Any, at_most: int | None) -> BatchSearch:
        """Searches the largest batch by prediction."""
        with self.steps.fit.long_task("searching the largest batch that fits"):
            steps = self.steps.trainer
            backend = steps.backend
            problem, measured = steps.reference_costs(batch)
            scaling = batch_scaling(backend, self._model, problem, batch, measured)
            self.sizes = replace(self.sizes, scaling=scaling)
            return search_batch_size(
                scaling,
                self.sizes.loader,
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
        return self.steps.fit.limit.reserving(self.sizes.held_bytes)

    def _bytes_held_beside(self, batch: Any) -> int:
        """Returns what lies in the device's memory beside a step of joined batches: where that is
        the host's, the loader's newest batch and what was cut off it."""
        steps = self.steps.trainer
        return 0 if steps.on_gpu else 2 * batch_bytes(batch) // steps.backend.batch_multiple

    @property
    def _search_s(self) -> float:
        """Seconds that a search is worth, by what a step is estimated to take: what is measured
        depends on what else the machine does."""
        step_s = self.steps.trainer.estimated_step_s
        steps, left = float(_SEARCH_STEPS), self.steps.fit.most_steps_left
        if left is not None:
            steps = min(steps, _SEARCH_SHARE * left)
        return min(_MOST_SEARCH_S, max(_LEAST_SEARCH_S, steps * step_s))

    def _follow_measured(self, size: int) -> None:
        """Chooses the next size by what the final steps of this one measured."""
        climb = self.sizes.climb
        if climb is None or not self.steps.settled or size == climb.failed[0]:
            return
        plan, peak = self.steps.trainer.plan, self.steps.trainer.settled_peak_bytes
        if peak is not None and not self.steps.fit.limit.holds(peak):
            climb.note(size, plan, peak, fits=False)
            self._go_on(tell.is_over(size, peak))
        elif self._wanted == "fastest":
            self._compare(size)
        elif plan is not None and size > climb.trained:
            climb.note(size, plan, peak or 0, fits=True)
            bound = inf if plan.problem is None else overhead_bound(plan.problem, "forward")
            if plan.overhead > bound:
                self.steps.fit.event(*tell.recomputes_more(size, plan.overhead, bound))
            self._go_on(tell.more_fits(size, peak or 0))

    def _go_on(self, reason: str = "") -> None:
        """Goes on with the size that the rule says: another one, or the largest that trained.

        Args:
            reason: what was measured, if anything was.
        """
        climb, scaling, size = self.sizes.climb, self.sizes.scaling, self.sizes.size
        if climb is None or scaling is None:
            return
        problem, chosen = self.steps.trainer.problem, None
        if problem is not None and self.steps.settled:
            scaling.learn(size, problem)
        if self._wanted != "fastest":
            with self.steps.fit.long_task("looking for the largest batch"):
                chosen = climb.choose(scaling, self._limit)
        new, plan = (climb.trained, None) if chosen is None else chosen
        if chosen is None and climb.trained == size == self.sizes.loader:
            predicted = self._report.max_batch_size or 0
            self._refuse_larger(tell.reaches_no_further(predicted, size, self._limit))
            return
        if chosen is None:
            self.sizes = replace(self.sizes, climb=None)
            self._report.max_batch_size = climb.trained
        if new != size:
            if reason:
                self.steps.fit.event(*tell.goes_on(reason, up=new > size))
            self._change(new, plan)

    def _compare(self, size: int) -> None:
        """Goes on with the size that trains the most samples per second, once it is known."""
        sizes = self.sizes
        climb, search = sizes.climb, sizes.search
        if len(sizes.step_s) < COMPARED_STEPS or climb is None or search is None:
            return
        rates, new, is_over = compared(
            sizes.samples_per_s, size, median(sizes.step_s), sizes.loader, search.max_batch_size
        )
        climb.trained = max(size, climb.trained)
        self.sizes = replace(sizes, samples_per_s=rates, climb=None if is_over else climb)
        if is_over:
            self.steps.fit.event(*tell.sizes_were_compared(rates, new))
        if new != size:
            self._change(new, search.plan)

    def _refuse_larger(self, why: tell.News) -> None:
        """Goes on with the batches as they come."""
        self.steps.fit.event(*why)
        self._report.max_batch_size = self.sizes.loader
        self.sizes = replace(self.sizes, climb=None)
        if self.sizes.chosen is not None:
            self._change(self.sizes.loader)

    def _change(self, new: int, expected: Plan | None = None) -> None:
        """Trains ``new`` samples a step from here on."""
        old, scaling = self.sizes.size, self.sizes.scaling
        self.sizes = self.sizes.with_size(new)
        self.steps.begin_shape(expected, None if scaling is None else scaling.at(new))
        devices = self.steps.trainer.backend.batch_multiple
        self.steps.fit.event(*tell.new_size(new, old, devices))
        larger = new > self.sizes.loader and isinstance(self._wanted, str)
        if larger and not self.sizes.has_warned:
            self.sizes = replace(self.sizes, has_warned=True)
            self._warn(new)

    def _warn(self, new: int) -> None:
        """Says what a larger batch means for the training."""
        loader, samples = self.sizes.loader, self._samples_per_epoch
        self._learning_rate.leave_schedule_alone()
        factor = self._learning_rate.factor(new, loader)
        told = tell.larger_batch(new, loader, samples, factor)
        warnings.warn(f"keras_remat: {told}", stacklevel=2)
