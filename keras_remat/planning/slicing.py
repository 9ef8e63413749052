"""Chooses slices where no schedule of the whole step fits: which ops, and how many parts.

No schedule gets below the bytes that one op needs while it runs. Where these are over the budget,
or where no schedule is found, the ops that need most are put into slices, together with all ops
around them that exchange large values. Of these values, only a part exists at a time
(:mod:`keras_remat.core.slices`). The numbers of the training stay the same, up to the order in
which a sum over the batch is added up.

The candidates are a short list, few ops and few parts first: smaller kernels are slower, and a
larger graph takes longer to solve. A quick look at each finds a first schedule. The first candidate
whose schedule adds little to a step is taken; where all are dear, the cheapest is. More parts leave
more room, and so recompute less.

Where a number of micro-batches is asked for, the batch runs in as many slices
(:func:`in_micro_batches`) of all ops that exchange large values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import inf
from operator import itemgetter

from keras_remat.backends.base import Slicer, TracedStep
from keras_remat.backends.memory import MemoryModel
from keras_remat.core.deadline import Deadline
from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.simulate import simulate
from keras_remat.core.slices import SliceRule, Slicing
from keras_remat.core.validate import validate
from keras_remat.errors import (
    BudgetError,
    InfeasibleBudgetError,
    InvalidProblemError,
    PlanMismatchError,
    ScheduleNotFoundError,
    UnsupportedModelError,
    statement_of,
)
from keras_remat.planning.advice import advising
from keras_remat.planning.plan import Plan
from keras_remat.planning.quick_orders import QUICK, quick_orders
from keras_remat.planning.request import PlanRequest, plan_for
from keras_remat.planning.slice_candidates import able_ops, candidates, grown
from keras_remat.planning.slice_costs import costs_of, ends_bytes, undivided_scratch
from keras_remat.solvers import check_floor
from keras_remat.solvers.search import greedy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlicingOptions:
    """Rules which ways to slice a step are tried, and for how long.

    Args:
        hopeless: share of the budget less the resident bytes. A candidate whose floor is above this
            share leaves no room for a schedule: more parts are tried at once.
        promising: share of the floor of the candidate that failed last, both without the resident
            bytes. Candidates with a floor up to this share come first after the failure. For
            MobileNetV2's step at 0.8 of its floor, the quick solver finds no schedule for five
            candidates whose floors are 0.5 to 1.0 of the first one's, and finds one at 0.25.
        dear: share of a step's time. A schedule in slices that adds more than this is dear: other
            candidates are looked at. At 0.8 of the floor of a U-Net's step, 2, 4 and 8 slices add
            3.1, 0.6 and 0.4; of MobileNetV2's, 2 have no schedule, and 4 and 8 add 0.9 and 0.4.
        most_tries: number of candidates that are solved for at most.
        most_s: seconds after which no further candidate is solved for; the request's seconds for
            solving where these are more. A compiler takes most of that time: where a small model's
            step had no schedule, two candidates took 164 seconds, and solving was to take 3.
        most_times, most_more: a sliced graph has at most ``most_times`` times the ops of the whole
            graph, plus ``most_more``.
        micro_batch_shares: shares of the largest value that an op makes or reads part by part. In
            micro-batches, ops with larger values than such a share run in slices. The least share
            is taken that does not make the graph too large.
    """

    hopeless: float = 0.85
    promising: float = 0.6
    dear: float = 0.25
    most_tries: int = 4
    most_s: float = 120.0
    most_times: int = 4
    most_more: int = 2000
    micro_batch_shares: tuple[float, ...] = (1 / 256, 1 / 64, 1 / 16, 1 / 4)


OPTIONS = SlicingOptions()
#: A way to slice a step, the step in slices, and its costs.
_Candidate = tuple[Slicing, TracedStep, Problem]


def _most_ops(graph: Graph) -> int:
    """Returns how many ops a graph may have once it is in slices."""
    return OPTIONS.most_times * len(graph.ops) + OPTIONS.most_more


def in_micro_batches(
    traced: TracedStep,
    problem: Problem,
    samples: int,
    count: int,
    estimate: Callable[[TracedStep], Profile],
) -> tuple[TracedStep, Problem]:
    """Puts a whole step into slices, as micro-batches; returns the step and its costs.

    Args:
        traced, problem: the whole step and its costs.
        samples: number of samples of the batch.
        count: number of slices that are asked for. Where it does not divide the batch, the next
            larger number that does is taken, up to twice as many, or else a smaller one.
        estimate: returns estimated costs of a step.

    Raises:
        UnsupportedModelError: no such number divides the batch, or nothing large runs in slices;
            the message says which.
    """
    slicer, graph = traced.slicer, problem.graph
    if slicer is None:
        raise UnsupportedModelError("A step of several devices does not run in slices.")
    numbers = (*range(count, 2 * count + 1), *range(count - 1, 1, -1))
    parts = next((n for n in numbers if n > 1 and samples % n == 0), None)
    if parts is None:
        raise UnsupportedModelError(
            f"No number from 2 to {2 * count} divides a batch of {samples} samples."
        )
    rules = slicer.rules
    able = able_ops(rules, samples)  # also in fewer slices, since these divide the samples
    handed_on = {op_id: _large_bytes(graph, op_id, rules[op_id]) for op_id in able}
    for share in OPTIONS.micro_batch_shares:
        large_bytes = share * max(handed_on.values(), default=0)
        seeds = {op_id for op_id in able if handed_on[op_id] > large_bytes}
        chosen = grown(graph, rules, seeds, able, large_bytes)
        if chosen and len(graph.ops) + (parts - 1) * len(chosen) <= _most_ops(graph):
            try:
                sliced = slicer.sliced(Slicing(tuple(sorted(chosen)), parts))
            except InvalidProblemError as error:
                raise UnsupportedModelError(
                    f"They do not run in {parts} slices: {error}."
                ) from error
            return costs_of(sliced, problem, estimate)
    raise UnsupportedModelError("Nothing large runs in slices.")


def _large_bytes(graph: Graph, op_id: int, rule: SliceRule) -> int:
    """Returns the bytes of the largest value that an op makes or reads part by part."""
    by_part = rule.sliced | (set(graph.ops[op_id].outputs) - rule.sums)
    return max((graph.values[v].nbytes for v in by_part), default=0)


def plan_with_slices(
    traced: TracedStep,
    request: PlanRequest,
    estimate: Callable[[TracedStep], Profile],
) -> tuple[TracedStep, Problem, Plan]:
    """Returns the step that runs, its costs, and a plan for it.

    The step runs in slices where no plan for the whole step keeps to the limit.

    Args:
        traced: the step of the request, in slices or not.
        request: the plan that is asked for.
        estimate: returns estimated costs of a step.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: slices do not help, either.
    """
    try:
        return traced, request.problem, plan_for(request)
    except BudgetError as error:
        return plan_in_slices(traced, request, estimate, error)


def plan_in_slices(
    traced: TracedStep,
    request: PlanRequest,
    estimate: Callable[[TracedStep], Profile],
    failure: BudgetError,
    door: Callable[[PlanRequest], Plan] = plan_for,
    seen: tuple[TracedStep, Problem] | None = None,
    below_s: float = inf,
) -> tuple[TracedStep, Problem, Plan]:
    """Returns a step in slices, its costs and its plan, as :func:`plan_with_slices` does.

    Args:
        failure: the error that says why no plan of whole ops was found.
        door: makes a plan for a request.
        seen: a measured step in other slices, with its costs, for which no plan was found.
        below_s: seconds of a known step. Only candidates are tried for which a look finds a faster
            step.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: slices do not help. The message names the op
            that needs too much even in slices, or the least peak that was found.
    """
    slicer, problem, budget = traced.slicer, request.problem, request.limit.usable_bytes
    if slicer is None:
        raise failure
    clock, end = Deadline(request.clock_s), Deadline(max(OPTIONS.most_s, request.seconds))
    undivided = {} if seen is None else undivided_scratch(*seen, estimate)
    told, failed, floors = failure, list[int](), [problem]
    found = _hopeful(slicer, request, estimate, undivided, floors)
    tried = None if seen is None else seen[0].slicing
    found = (one for one in found if one[0] != tried)
    likely = islice(_by_promise(found, failed), OPTIONS.most_tries)
    for time_s, (slicing, sliced, costs) in _cheap_first(likely, request, failed, below_s):
        asked = replace(
            request,
            problem=costs,
            clock_s=clock.left_s(),
            solver=QUICK if clock.is_over else request.solver,
            # a look at the whole budget found nothing, so there is no room for headroom
            headroom_bytes=request.headroom_bytes if time_s < inf else 0,
        )
        try:
            return sliced, costs, door(asked)
        except BudgetError as error:
            logger.debug("keras_remat: %s: %s", _name(slicing), statement_of(error))
            if isinstance(error, ScheduleNotFoundError):
                error.least_over_limit = None  # it is no schedule of the whole step
            # the error that is raised decides which limits are advised: where whole ops have room,
            # slices without any schedule say less, and trying limits for them takes longer
            if error.best_peak_bytes is not None or isinstance(failure, InfeasibleBudgetError):
                told = min(told, error, key=_nearness)
        if end.is_over:
            break
    least = min(floors, key=lambda one: one.floor_bytes)
    if told is failure and least is not problem:
        with advising(least, request.limit, request.batch_size, request, seed=request.seed):
            check_floor(least.with_budget(budget))
            if isinstance(told, InfeasibleBudgetError):  # of whole ops, whose floor is no more
                raise ScheduleNotFoundError(budget, least.floor_bytes, solver=request.solver)
    raise told from failure.__cause__


def _hopeful(
    slicer: Slicer,
    request: PlanRequest,
    estimate: Callable[[TracedStep], Profile],
    undivided: Mapping[int, int],
    floors: list[Problem],
) -> Iterator[_Candidate]:
    """Yields the candidates whose floor leaves room for a schedule, few ops and few parts first.

    Args:
        floors: gets the costs of every candidate that was looked at.
    """
    problem, budget = request.problem, request.limit.usable_bytes
    resident = problem.profile.resident_bytes
    most_bytes = OPTIONS.hopeless * (budget - resident)
    for slicing in candidates(problem, slicer.rules, budget):
        if ends_bytes(problem.graph, slicer.rules, slicing) > most_bytes:
            continue
        try:
            sliced = slicer.sliced(slicing)
        except InvalidProblemError as error:  # a kernel lays a part out in another way
            logger.debug("keras_remat: %s: %s", _name(slicing), error)
            continue
        if len(sliced.graph.ops) > _most_ops(problem.graph):
            continue
        sliced, costs = costs_of(sliced, problem, estimate, undivided)
        floors.append(costs)
        if costs.floor_bytes - resident <= most_bytes:
            yield slicing, sliced, costs


def _by_promise(found: Iterator[_Candidate], failed: Sequence[int]) -> Iterator[_Candidate]:
    """Yields candidates; after a failure, those first that need much less than the failed one.

    Args:
        failed: floors, less the resident bytes, of the candidates for which nothing cheap was
            found; the caller adds to them.
    """
    waiting = []
    for one in found:
        if failed and _floor_above_resident(one[2]) > OPTIONS.promising * failed[-1]:
            waiting.append(one)
        else:
            yield one
    yield from sorted(waiting, key=lambda one: one[2].floor_bytes)


def _cheap_first(
    found: Iterator[_Candidate], request: PlanRequest, failed: list[int], below_s: float
) -> Iterator[tuple[float, _Candidate]]:
    """Looks at candidates, and yields each with the seconds of the schedule that a look finds.

    A candidate with a cheap schedule is yielded at once. The dear ones follow, the cheapest first.
    Those without a schedule (infinite seconds) come last, and only where ``below_s`` is infinite.

    Args:
        failed: the list that :func:`_by_promise` reads.
        below_s: as in :func:`plan_in_slices`.
    """
    dear, best_s = list[tuple[float, _Candidate]](), below_s
    for one in found:
        time_s = request.where.of_first(partial(_look, one[2], request, best_s))
        if is_dear(time_s, request.problem):
            dear.append((time_s, one))
        else:
            yield time_s, one
        best_s = min(best_s, time_s)
        failed.append(_floor_above_resident(one[2]))
    tried = (one for one in dear if below_s == inf or one[0] < inf)
    yield from sorted(tried, key=itemgetter(0))


def is_dear(time_s: float, whole: Problem) -> bool:
    """Returns whether a step in slices takes so long that others may be cheaper.

    Args:
        whole: the costs of the whole step.
    """
    return time_s > (1 + OPTIONS.dear) * whole.store_all_time_s


def _look(costs: Problem, request: PlanRequest, below_s: float) -> float:
    """Returns the seconds of a schedule that a few passes find; infinite where they find none.

    The schedule is remembered as the quick solver's answer.

    Args:
        below_s: seconds; a slower schedule will not do.
    """
    within = costs.with_budget(request.limit.usable_bytes)
    order = greedy.look(within, below_s)
    if order is None:
        return inf
    schedule = Schedule(order)
    validate(within, schedule)
    usage = simulate(within, schedule)
    found = Solution(schedule, QUICK, "feasible", 0.0, usage=usage)
    quick_orders(request.memory).keep(within, request.seed, request.seconds, [found])
    return usage.time_s


def _floor_above_resident(costs: Problem) -> int:
    return costs.floor_bytes - costs.profile.resident_bytes


def _name(slicing: Slicing) -> str:
    """Returns the name of a candidate in logs."""
    return f"{len(slicing.ops)} ops in {slicing.parts}"


def _nearness(error: BudgetError) -> tuple[bool, int]:
    """Returns a sort key, smaller for a nearer miss: the least peak found, or else the floor."""
    found = error.best_peak_bytes
    return found is None, error.floor_bytes if found is None else found


def in_slices_of(
    plan: Plan, traced: TracedStep, problem: Problem, estimate: Callable[[TracedStep], Profile]
) -> tuple[TracedStep, Problem]:
    """Returns a step and its costs in a plan's slices; whole, where the plan has none.

    Raises:
        PlanMismatchError: the plan's slices are of another step.
    """
    if plan.slicing == traced.slicing:
        return traced, problem
    whole = traced.whole
    if whole is not None:
        traced, problem = whole.step, whole.problem(problem)
    if plan.slicing is None:
        return traced, problem
    try:
        if traced.slicer is None:
            raise InvalidProblemError("steps of this backend do not run in slices")
        sliced = traced.slicer.sliced(plan.slicing)
    except InvalidProblemError as error:
        fingerprint = problem.graph.fingerprint
        raise PlanMismatchError(plan.fingerprint, fingerprint, f"{error}.") from error
    return costs_of(sliced, problem, estimate)


def told_whole(plan: Plan, traced: TracedStep, problem: Problem, memory: MemoryModel) -> Plan:
    """Returns a plan with its slices, and with the usage of the whole step without a plan.

    Args:
        traced: the step that the plan runs, in slices or not.
        problem: the costs of that step.
    """
    if traced.whole is None:
        return plan
    whole = traced.whole.problem(problem)
    store_all = Schedule.store_all(whole.graph)
    usage = Usage(simulate(whole, store_all).time_s, memory.peak_bytes(whole, store_all))
    return replace(plan, store_all=usage, slicing=traced.slicing)
