"""How much a search for the largest batch may do: shares and limits, and work that is counted."""

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
        resolution: the search stops when a size that fits and one that does not are this share
            apart.
        largest_size: beyond it nothing is tried.
        reached: an order that reaches this share of the size it was made for has not failed.
        retried: sizes up to this many times the largest get another chance.
        window: sizes above the largest that the thorough solver is asked for at least, as far as
            the floor allows. MobileNet's 20 samples became 21 and 22 where it was 2, and 24 are
            possible.
        first_step, longest_step: up from a known order, as shares of the size.
        most_failed_steps: without a find, after which they end.
        targets, least_target: shares of the budget that new orders are solved for in those steps,
            and the least of all.
        solve: of the work, what one solve may take.
        improve, step: of the work of the thorough solver, what is left for steps, and what one step
            may take.
        remembered_problems: that are kept for sizes that come up again.
        remembered_ratios: the last orders that tell how much the allocator fragments.
        high_ratio: from which on that is more than under most.
        patience: how many times the seconds of counted work the clock may show before it ends a
            solve or the search.
        turns: how many times the seconds it is given ``auto`` may count: twelve turns of up to 0.18
            of them, and what comes before.
        least_solve_clock_s, least_clock_s: what the clock may show at least.
        replay_s, simulation_s: seconds of work for an op of a predicted peak, with the problem at
            its size: an allocator's replay takes 70 to 210 microseconds, and a simulation, which
            does where the order of ops does not matter, 55 on a busy machine.
        compiling, least_compiling_s: of the time limit, and at least, what is waited for the moves
            of the searches to become machine code: with slower ones they make fewer, and find less.
        sure_solves: solves of a quick solver that neither work nor clock keeps from being made: so
            many halve the bracket to its resolution, a few that the allocator wastes included.
        sure_passes: passes over the ops that each of them may take at least.
        closing: of the time limit, what closing gaps may take. In a tenth of 40 seconds predicted
            batches on a T4 grew by 4, 5 and 9 % in three cases of twelve
            (``benchmarks/cards_batch.py``).
        most_predictions: of one order's peak, until the size that it reaches is taken for known.
        halved_every: of so many, one halves the bracket; the others follow the line of the peaks.
        furthest: times a known size that such a line is trusted.
        rounded: sizes down to this share are as good where they are rounder.
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
#: Passes over the ops that a solve takes at most, by solver, with the passes that predict its peak
#: at a few sizes. Other solvers take their seconds.
_PASSES = {"greedy_first": 40.0, "greedy": 60.0}


class SearchWork:
    """Counts the work of a search, in seconds of an idle machine.

    Args:
        seconds: of work; infinite where something else bounds it.
        deadline_s: by ``time.perf_counter``; nothing is begun after it.
        of_solves: whether solves alone are counted, and no predictions.
        sure_solves: so many of a solver whose steps are counted are made whatever is left.

    Attributes:
        ended_by_clock: whether the clock left nothing while there was work left: a machine that is
            less busy may find more.
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
        """Returns the seconds of work that are left; 0 where the clock leaves none."""
        if time.perf_counter() < self.deadline_s:
            return self._seconds
        self.ended_by_clock = self.ended_by_clock or self._seconds > 0
        return 0.0

    def predict(self, problem: Problem, *, replays: bool, count: int = 1) -> None:
        """Takes predictions of a peak off what is left.

        Args:
            problem: the step at a size.
            replays: whether an allocator is replayed for it, or bytes alive are simulated.
            count: how many.
        """
        if not self._of_solves:
            each_s = OPTIONS.replay_s if replays else OPTIONS.simulation_s
            self._seconds -= count * each_s * len(problem.graph.ops)

    def take(self, problem: Problem, solver: str, solve_s: float) -> tuple[float, float]:
        """Takes one solve off what is left.

        Returns:
            The seconds that it may take, and how much patience it has: where it is made whatever
            is left, its steps alone end it.
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
