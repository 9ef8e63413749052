"""Bounds a search for the largest batch: shares and limits, and work that is counted."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from keras_remat.core.problem import Problem
from keras_remat.solvers.search import greedy


@dataclass(frozen=True)
class SearchOptions:
    """Rules a search for the largest batch.

    Args:
        resolution: share by which a size that does not fit is larger than one that fits when the
            search stops.
        largest_size: largest batch size that is tried.
        reached: share of the size an order was made for; an order that reaches it has not failed.
        retried: factor on the largest size; sizes up to it get another chance.
        window: number of sizes above the largest that the thorough solver searches at least, as far
            as the floor allows. With a window of 2, MobileNet's 20 samples became 21 and 22, and 24
            are possible.
        first_step, longest_step: steps up from a known order, as shares of the size.
        most_failed_steps: number of steps in a row without a larger size after which the steps end.
        targets: shares of the budget that new orders are solved for in those steps.
        least_target: least share of the budget that a solver gets.
        solve: share of the work that one solve may take.
        improve, step: shares of the thorough solver's work: for all steps, and for one step.
        remembered_problems: number of problems that are kept for sizes that come up again.
        remembered_ratios: number of last orders from which the allocator's waste is estimated.
        high_ratio: ratio of a peak to the bytes alive from which the allocator wastes more than
            under most orders.
        patience: factor on the seconds of counted work; by the clock, a solve or the search may
            take that many times as long.
        turns: factor on the seconds that ``auto`` is given, up to which it may count work: twelve
            turns of up to 0.18 of them, and its work before the turns.
        least_solve_clock_s, least_clock_s: seconds that one solve, and the search, may take by the
            clock at least.
        replay_s, simulation_s: seconds of work per op of one predicted peak, with the problem at
            its size. An allocator's replay takes 70 to 210 microseconds; a simulation, which is
            enough where the order of ops does not matter, takes 55 on a busy machine.
        compiling, least_compiling_s: share of the time limit, and least seconds, to wait until the
            searches' moves are machine code: with slower moves, searches make fewer and find less.
        sure_solves: number of solves of a quick solver that are made whatever work or clock show.
            So many halve the bracket to its resolution, a few lost to the allocator's waste
            included.
        sure_passes: number of passes over the ops that each sure solve may take at least.
        closing: share of the time limit for closing gaps. In a tenth of 40 seconds, predicted
            batches on a T4 grew by 4, 5 and 9 % in three cases of twelve
            (``benchmarks/cards_batch.py``).
        most_predictions: number of predicted peaks of one order, after which the size that it
            reaches is taken to be known.
        halved_every: every such prediction halves the bracket; the others follow the line of the
            peaks.
        furthest: factor on a known size, up to which the line of the peaks is trusted.
        rounded: share of a size; rounder sizes down to it are as good.
    """

    resolution: float = 0.01
    largest_size: int = 2**40
    reached: float = 0.97
    retried: float = 1.1
    window: int = 5
    first_step: float = 0.02
    longest_step: float = 0.3
    most_failed_steps: int = 16
    targets: tuple[float, ...] = (0.98, 1.0, 0.96)
    least_target: float = 0.88
    solve: float = 0.25
    improve: float = 0.6
    step: float = 0.12
    remembered_problems: int = 12
    remembered_ratios: int = 5
    high_ratio: float = 1.03
    patience: float = 3.0
    turns: float = 2.5
    least_solve_clock_s: float = 2.0
    least_clock_s: float = 10.0
    replay_s: float = 2e-4
    simulation_s: float = 5e-5
    compiling: float = 0.25
    least_compiling_s: float = 3.0
    sure_solves: int = 8
    sure_passes: float = 5.0
    closing: float = 0.1
    most_predictions: int = 12
    halved_every: int = 4
    furthest: int = 8
    rounded: float = 0.99


OPTIONS = SearchOptions()
#: Number of passes over the ops that a solve takes at most, by solver, the passes that predict its
#: peak at a few sizes included. Solves of other solvers count with their seconds.
_PASSES = {"greedy_first": 40.0, "greedy": 60.0}


class SearchWork:
    """Counts the work of a search, in seconds of an idle machine.

    Args:
        seconds: seconds of work; infinite where something else bounds it.
        deadline_s: seconds of ``time.perf_counter`` after which nothing is begun.
        of_solves: whether only solves are counted, and no predictions.
        sure_solves: number of solves that are made whatever is left, by solvers whose steps are
            counted.

    Attributes:
        ended_by_clock: whether the clock ended the search while there was work left. On a less busy
            machine it may find more.
    """

    def __init__(
        self,
        seconds: float = math.inf,
        deadline_s: float = math.inf,
        *,
        of_solves: bool = False,
        sure_solves: int = 0,
    ):
        self._seconds, self.deadline_s, self._of_solves = seconds, deadline_s, of_solves
        self._sure_solves = sure_solves
        self.ended_by_clock = False

    def is_sure(self, solver: str) -> bool:
        """Returns whether the next solve of a solver is made whatever is left."""
        return self._sure_solves > 0 and solver in _PASSES

    def left_s(self) -> float:
        """Returns the seconds of work that are left; 0 after the deadline."""
        if time.perf_counter() < self.deadline_s:
            return self._seconds
        self.ended_by_clock = self.ended_by_clock or self._seconds > 0
        return 0.0

    def predict(self, problem: Problem, *, replays: bool, count: int = 1) -> None:
        """Takes predictions of a peak off the work that is left.

        Args:
            problem: the step at a size.
            replays: whether an allocator is replayed for it, or bytes alive are simulated.
            count: number of predictions.
        """
        if not self._of_solves:
            each_s = OPTIONS.replay_s if replays else OPTIONS.simulation_s
            self._seconds -= count * each_s * len(problem.graph.ops)

    def take(self, problem: Problem, solver: str, solve_s: float) -> tuple[float, float]:
        """Takes one solve off the work that is left.

        Returns:
            The seconds that the solve may take, and its patience; infinite for a sure solve, which
            only its steps end.
        """
        passes, ops = _PASSES.get(solver, math.inf), len(problem.graph.ops)
        if self.is_sure(solver):
            self._sure_solves -= 1
            solve_s = max(solve_s, OPTIONS.sure_passes * ops / greedy.OPTIONS.steps_per_s)
            patience = math.inf
        else:
            clock_s = self.deadline_s - time.perf_counter()
            turns = OPTIONS.turns if solver == "auto" else 1.0
            most = max(turns * OPTIONS.patience, OPTIONS.least_solve_clock_s / solve_s)
            patience = max(1.0, min(most, clock_s / solve_s))
        self._seconds -= min(solve_s, passes * ops / greedy.OPTIONS.steps_per_s)
        return solve_s, patience
