"""Runs the default solver: fast heuristics first, then steps that improve the best schedule.

1. Without a budget, or where an order without recomputation fits (the default or the memory-aware
   one), that order is optimal and the solver is done.
2. :mod:`keras_remat.solvers.search.greedy` gives a first schedule, whatever the clock says. Where
   the graph is not large, :mod:`keras_remat.solvers.papers.dtr` gives others, by several scores,
   and so does :mod:`keras_remat.solvers.search.backward`, or it proves that there is none. Where
   the graph is small, :mod:`keras_remat.solvers.papers.checkmate_milp` gives one, too.
3. :mod:`keras_remat.solvers.bounds.cut_bound`, and :mod:`keras_remat.solvers.bounds.window_bound`
   with a few cuts, may prove the best schedule optimal.
4. :mod:`keras_remat.solvers.search.intervals` searches around the best schedule, with more
   candidates each time its program was solved. It keeps the order of the ops. It finds more on the
   graph's own order than on one that annealing made, so it comes before annealing.
5. :mod:`keras_remat.solvers.search.anneal` looks for another order, which decides everything on
   graphs with many parallel branches. Where there is still no schedule, the search backwards goes
   on for longer, and step 4 follows.
6. Annealing takes turns: from the best schedule and, in two ways, from nothing.
7. After the first turn, on small graphs, :mod:`keras_remat.solvers.bounds.window_bound` with all
   cuts tries to close the gap from below.

Graphs of more than ``OPTIONS.large_ops`` ops are coarsened first
(:mod:`keras_remat.solvers.orders.coarsen`), and steps 2, 5 and 6 work on the coarse problem. Step 4
is left out there, because its program is too large. It is also left out without OR-Tools, and in
less than ``OPTIONS.process_s`` seconds. Whichever step finds a schedule, recomputations are taken
back where there is room (:mod:`keras_remat.solvers.orders.trim`).

``benchmarks/arms.py`` measures what each step is worth (``benchmarks/results/arms.md``).

Every schedule is checked by :func:`keras_remat.core.validate.validate` before it counts. The bound
is that of step 3 or 7; both hold for every legal order.

All steps but 3 and 7 end by counted work (:func:`keras_remat.core.deadline.work_budget_s`), and a
schedule replaces another only if it is faster by more than the tolerance of the proofs. So the same
seed gives the same schedule, unless the clock ends one of these steps after all, on a very busy or
very slow machine. The *bound* depends on the clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from keras_remat.core.deadline import Deadline, work_budget_s
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.solvers.bounds import cut_bound, window_bound
from keras_remat.solvers.engines import cp_sat, native
from keras_remat.solvers.orders import coarsen
from keras_remat.solvers.orders.incumbent import Incumbent, seconds_of
from keras_remat.solvers.orders.reorder import base_orders
from keras_remat.solvers.orders.trim import trimmed
from keras_remat.solvers.papers import checkmate_milp, dtr
from keras_remat.solvers.search import anneal, backward, greedy, intervals

logger = logging.getLogger(__name__)

Order = tuple[int, ...]


@dataclass(frozen=True)
class AutoOptions:
    """Rules which steps of ``auto`` run, and for how long.

    Shares are of the time limit, or, where a step counts its work, of the work for that limit.

    Args:
        proof_tolerance: relative tolerance within which a schedule meets a bound. The bounds give
            away a millionth for their solver's tolerances, so that no schedule meets them exactly.
        large_ops: number of needed ops above which a graph is coarsened.
        provable_ops: number of needed ops up to which a graph is worth the integer program of
            :mod:`keras_remat.solvers.bounds.window_bound`.
        few_cuts: number of cuts of the window bound that is tried before the interval search, on
            every graph that is not coarsened.
        process_s: seconds; shorter time limits are not worth a process of its own for CP-SAT, which
            takes a second to start.
        dtr_scores: scores that DTR is tried with.
        dtr_ops_per_s: ops that DTR runs per score and second of the time limit.
        late_s: seconds. A solve with a shorter time limit looks for a first schedule beyond its
            time only once, in the whole graph; on coarse problems it keeps to its time. ``auto``
            gets so short a limit where the time for a plan is over. Where a U-Net's 5,205 ops in
            slices have no schedule, all looks of a solve for 0.5 seconds take 8, and the first one
            takes 4 (``benchmarks/ablation.py late``).
        tightenings: number of times that greedy is tried on a coarse problem whose schedules do not
            fit the whole one, each time with less room.
        turns: number of turns of step 6.
        greedy, exact, first_backward, backward, intervals: shares of these steps.
        first_anneal: share of step 5.
        anneal, coarse_anneal: share of one turn, on a whole and on a coarse problem. With less on a
            coarse problem, DenseNet121's step at half of its peak was not improved in 10 s (8.2 %
            instead of 7.4).
        bounds_end, proof_ends, last_ends: shares of the time limit at which the quick bounds, the
            exact bound, and everything else end.
    """

    proof_tolerance: float = 3e-6
    large_ops: int = 700
    provable_ops: int = 150
    few_cuts: int = 3
    process_s: float = 5.0
    late_s: float = 1.0
    dtr_scores: tuple[str, ...] = ("dtr", "local", "msps", "eq")
    dtr_ops_per_s: int = 1_500
    tightenings: int = 4
    turns: int = 12
    greedy: float = 0.15
    exact: float = 0.15
    first_backward: float = 0.04
    backward: float = 0.2
    intervals: float = 0.3
    first_anneal: float = 0.15
    anneal: float = 0.12
    coarse_anneal: float = 0.18
    bounds_end: float = 0.3
    proof_ends: float = 0.7
    last_ends: float = 0.9


OPTIONS = AutoOptions()


def solve(incumbent: Incumbent, seed: int) -> None:
    """Offers schedules until the time limit, or until one is proved optimal.

    Raises:
        InfeasibleBudgetError: it is proved that no schedule fits.
    """
    _Search(incumbent, seed).run()


class _Search:
    """Holds the state that the steps share, besides the best schedule and bound."""

    def __init__(self, incumbent: Incumbent, seed: int):
        self.incumbent, self.problem, self.seed = incumbent, incumbent.problem, seed
        self.deadline, self.limit_s = incumbent.deadline, incumbent.deadline.seconds
        incumbent.tolerance = OPTIONS.proof_tolerance
        self.last = self.deadline.share(OPTIONS.last_ends)
        self.view = self.whole = _View(self.problem, tuple, tuple)
        self.coarse_best: Order | None = None

    def offer(self, order: Sequence[int], solver: str) -> bool:
        """Keeps an order, trimmed, if it fits and is faster than the best one.

        Returns whether it is legal and within the budget.
        """
        seconds = seconds_of(self.problem, order)
        if seconds < self.incumbent.best_s * (1 - OPTIONS.proof_tolerance):
            self.incumbent.solver = solver
            self.incumbent.offer(trimmed(self.problem, order))
        return seconds < float("inf")

    def raise_bound(self, bound_s: float) -> None:
        """Keeps a bound if it is higher than the best one."""
        self.incumbent.bound_s = max(self.incumbent.bound_s, bound_s)
        self.incumbent.report()

    def _offer_of_view(self, order: Order) -> None:
        """Offers an order of the view, and keeps the view's own best one."""
        time_s = self.view.problem.profile.op_time_s
        if self.coarse_best is None or (
            sum(time_s[op_id] for op_id in order) < sum(time_s[op_id] for op_id in self.coarse_best)
        ):
            self.coarse_best = order
        self.offer(self.view.expand(order), "anneal")

    def run(self) -> None:
        bases, ops = base_orders(self.problem), len(self.problem.graph.needed)
        if any(self.offer(base, "greedy") for base in bases):
            return
        native.begin()
        large = ops > OPTIONS.large_ops
        known: list[Order] = []
        if large:
            self._coarsen(bases)
        else:
            known = self._heuristics(bases)
        self.raise_bound(
            cut_bound.lower_bound_s(self.problem, deadline=self.deadline.share(OPTIONS.bounds_end))
        )
        if not large:
            chain = window_bound.longest_chain(self.problem)
            widest = sorted(
                chain, key=lambda op_id: -cut_bound.crossing_bytes(self.problem, op_id)
            )[: OPTIONS.few_cuts]
            self._window_bound(sorted(widest), self.deadline.share(OPTIONS.bounds_end))
        if self.incumbent.proved:
            return
        begins_with_intervals = self.incumbent.order is not None and not large
        if begins_with_intervals:
            self._intervals(known)
        if not self.incumbent.proved:
            self._anneal((anneal.LOOSE, anneal.STIFF), OPTIONS.first_anneal, self.seed)
        if self.incumbent.order is None and not large:
            known += self._backward(OPTIONS.backward)
        if not begins_with_intervals and not large:
            self._intervals(known)
        self._take_turns(small=ops <= OPTIONS.provable_ops)

    def _take_turns(self, *, small: bool) -> None:
        """Gives turns to three ways of annealing that improve the best schedule (step 6)."""
        share = OPTIONS.anneal if self.view is self.whole else OPTIONS.coarse_anneal
        arms: list[Callable[[int], None]] = [
            partial(self._anneal, (anneal.COOL,), share, from_best=True),
            partial(self._anneal, (anneal.LOOSE, anneal.COOL), share),
            partial(self._anneal, (anneal.STIFF, anneal.COOL), share),
        ]
        for turn in range(OPTIONS.turns):
            if self.incumbent.proved or self.last.is_over:
                return
            # only the last two need no schedule to begin with
            at = turn % len(arms) if self.incumbent.order is not None else 1 + turn % 2
            arms[at](self.seed + 1 + turn)
            if not turn and small and not self.incumbent.proved:
                self._window_bound(
                    window_bound.longest_chain(self.problem),
                    self.deadline.share(OPTIONS.proof_ends),
                )

    def _coarsen(self, bases: Sequence[Order]) -> None:
        """Makes the view a coarse problem.

        It is that of the first base order whose coarse schedules fit the whole problem.
        """
        self._greedy(self.whole, bases, most=1, is_first=True)
        if not any(self._coarse(base) for base in bases) and self.incumbent.order is None:
            self._greedy(self.whole, bases[:1])

    def _coarse(self, base: Order) -> bool:
        """Makes the view a coarse problem along an order.

        Its budget is lowered until a schedule that greedy finds for it fits the whole problem.
        Returns whether one does.
        """
        coarse = coarsen.Coarse(
            self.problem, base, coarsen.small_value_threshold(self.problem, base)
        )
        self.view = _View(coarse.problem, coarse.expand, coarse.project)
        budget = limit = self.problem.budget_bytes or 0
        bases = [tuple(range(len(coarse.ops)))]
        for _ in range(OPTIONS.tightenings):
            first = self._greedy(self.view, bases, most=1)
            if not first:
                break
            peak = simulate(self.problem, Schedule(coarse.expand(first[0]))).peak_bytes
            if peak <= limit:
                self.coarse_best = (self._greedy(self.view, bases) or first)[-1]
                return True
            budget -= peak - limit
            if budget < coarse.problem.floor_bytes:
                break
            self.view = replace(self.view, problem=coarse.problem.with_budget(budget))
        return False

    def _heuristics(self, bases: Sequence[Order]) -> list[Order]:
        """Returns the orders that greedy, DTR, Checkmate and the search backwards find."""
        known = self._greedy(self.whole, bases, is_first=True)
        if self.incumbent.proved:
            return known
        for score in OPTIONS.dtr_scores:
            left_s = max(0.1, self.deadline.share(OPTIONS.bounds_end).left_s())
            trial = Incumbent(self.problem, "dtr", left_s, patience=self.deadline.patience)
            max_ops_run = int(OPTIONS.dtr_ops_per_s * work_budget_s(self.limit_s))
            dtr.solve(trial, self.seed, score=score, max_ops_run=max_ops_run)
            if trial.order is not None and self.offer(trial.order, "dtr"):
                known.append(trial.order)
        if len(self.problem.graph.needed) <= checkmate_milp.EXACT_OPS:
            exact = Incumbent(self.problem, "checkmate_milp", OPTIONS.exact * self.limit_s)
            checkmate_milp.solve(exact, self.seed)
            if exact.order is not None:
                self.offer(exact.order, exact.solver)
                known.append(exact.order)
        return known + self._backward(OPTIONS.first_backward)

    def _backward(self, share: float) -> list[Order]:
        """Returns the orders that the search backwards finds in a share of the time limit.

        Raises:
            InfeasibleBudgetError: it is proved that no schedule fits.
        """
        steps = backward.steps_limit(share * self.limit_s)
        orders = backward.both(self.problem, steps, self.last)
        return [order for order in orders if self.offer(order, "backward")]

    def _greedy(
        self,
        view: _View,
        bases: Sequence[Order],
        most: int | None = None,
        *,
        is_first: bool = False,
    ) -> list[Order]:
        """Returns the first ``most`` orders that greedy finds for the view.

        Those that fit the whole problem are offered.
        """
        is_sure = is_first or self.limit_s >= OPTIONS.late_s
        steps = greedy.steps_limit(OPTIONS.greedy * self.limit_s)
        candidates = greedy.candidates(
            view.problem,
            deadline=self.deadline,
            max_steps=steps,
            orders=bases,
            anyway=is_sure and self.incumbent.order is None,
        )
        found = list(islice(candidates, most))
        for order in found:
            self.offer(view.expand(order), "greedy")
        return found

    def _window_bound(self, cuts: Sequence[int], deadline: Deadline) -> None:
        limit_s = deadline.left_s()
        if limit_s > 0:
            known_s = self.incumbent.best_s
            bound_s = window_bound.lower_bound_s(
                self.problem, cuts, limit_s=limit_s, known_s=known_s
            )
            self.raise_bound(bound_s)

    def _intervals(self, known: list[Order]) -> None:
        """Searches intervals on the best schedule's order of first runs.

        Does nothing without a schedule or CP-SAT.

        Args:
            known: schedules to take candidates from.
        """
        start = self.incumbent.order
        if start is None or self.limit_s < OPTIONS.process_s or not cp_sat.available():
            return
        base = tuple(dict.fromkeys(start))
        known = [start, *(order for order in known if tuple(dict.fromkeys(order)) == base)]
        work = intervals.work_limit(OPTIONS.intervals * self.limit_s)
        try:
            for order in intervals.improve(
                self.problem, base, known, deadline=self.last, work=work, seed=self.seed
            ):
                self.offer(order, "intervals")
                if self.incumbent.proved:
                    return
        except cp_sat.CpSatProcessError as error:
            logger.warning("keras_remat: goes on without CP-SAT: %s", error)

    def _start(self) -> Order:
        """Returns the best order of the view.

        For a coarse problem, that is the best order within *its* budget: an order that is better
        only after trimming on the whole problem uses room that other coarse orders do not have.
        """
        if self.incumbent.order is None:
            raise ValueError("needs a schedule to start from")
        if self.view is not self.whole and self.coarse_best:
            return self.coarse_best
        return self.view.project(self.incumbent.order)

    def _anneal(
        self,
        coolings: Sequence[anneal.Cooling],
        share: float,
        seed: int,
        *,
        from_best: bool = False,
    ) -> None:
        compiled = anneal.is_compiled(self.deadline)
        moves = anneal.moves_for(self.view.problem, share * self.limit_s, compiled=compiled)
        for order in anneal.improve(
            self.view.problem,
            self._start() if from_best else None,
            deadline=self.last,
            moves=moves // len(coolings),
            compiled=compiled,
            coolings=coolings,
            seed=seed,
        ):
            self._offer_of_view(order)


@dataclass(frozen=True)
class _View:
    """Holds the problem that heuristics work on, whole or coarse.

    ``expand`` turns its orders into orders of the whole problem, and ``project`` does the reverse.
    """

    problem: Problem
    expand: Callable[[Sequence[int]], Order]
    project: Callable[[Sequence[int]], Order]
