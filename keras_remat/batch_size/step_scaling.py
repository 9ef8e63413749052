"""Derives the costs of a traced and measured step at other batch sizes, for a search.

Where the given batch fits only with some ops in slices, sizes in such slices are searched. The ops
and the number of slices were chosen at the given batch. At every other size that the number
divides, the same ops run in as many slices: the graph at that size is rewritten
(:mod:`keras_remat.core.slices`), and no step is traced for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from keras_remat.backends.base import Backend, TracedStep, Whole
from keras_remat.backends.batches import batch_size_of, repeated_batch
from keras_remat.batch_size.cost_fit import CostFit, transfer_costs
from keras_remat.batch_size.found import BatchSearch
from keras_remat.batch_size.scaling import (
    BatchScaling,
    batch_scaling,
    fixed_bytes,
    traced_at,
)
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.slices import SlicedGraph, SliceRule, Slicing, sliced_graph
from keras_remat.errors import BudgetError, InvalidProblemError, UnsupportedModelError
from keras_remat.planning.make_plan import TracedModel, measured_problem
from keras_remat.planning.request import PlanRequest, plan_by, plan_for
from keras_remat.planning.slice_candidates import candidates
from keras_remat.planning.slice_costs import sliced_costs


@dataclass(frozen=True)
class SlicedSizeOptions:
    """Rules how sizes are searched whose steps run in slices.

    Args:
        worth_slices: factor by which the batch must grow for twice as many slices to be taken.
        search: share of a search's time for the first search in slices, where whole ops do not
            reach a size; each further one may take half of the share before.
        most_tries: number of ways to slice a step that are searched.
        second_plan_s: seconds for a plan under which a second size is measured.
    """

    worth_slices: float = 1.2
    search: float = 0.5
    most_tries: int = 2
    second_plan_s: float = 1.0


OPTIONS = SlicedSizeOptions()

#: Number of sizes found at which a step is traced, before one is taken as it is.
_MOST_TRACES = 2


@dataclass(frozen=True)
class SlicedScaling:
    """Derives a step's costs in slices, at any batch size that the number of slices divides.

    Args:
        whole: the step's costs without slices, at any size.
        rules: op id → how the op may run in slices, at ``samples``.
        granule_bytes: bytes; sizes of slices are rounded up to a multiple of it.
    """

    whole: BatchScaling
    rules: Mapping[int, SliceRule]
    samples: int
    slicing: Slicing
    granule_bytes: int

    @property
    def fit(self) -> CostFit | None:
        """Returns the fitted costs of whole ops; ``None`` where one size alone was measured."""
        return self.whole.fit

    def at(self, size: int) -> Problem:
        """Returns the problem at a batch size that the number of slices divides.

        Raises:
            InvalidProblemError: the number of slices does not divide the size.
        """
        problem = self.whole.at(size)
        rules = {op_id: self._at(rule, size) for op_id, rule in self.rules.items()}
        sliced = sliced_graph(problem.graph, rules, self.slicing, self.granule_bytes)
        return sliced_costs(problem, sliced, self._expected(problem, sliced, size))

    def _expected(self, problem: Problem, sliced: SlicedGraph, size: int) -> list[int]:
        """Returns the expected workspace of each op of a sliced graph, in bytes.

        A part takes the bytes that are the same at every size, and its share of the rest, but no
        less than its kernel is expected to ask for.
        """
        asked, fixed = problem.profile.op_workspace_bytes, self.whole.fixed_workspace_bytes
        parts, least = self.slicing.parts, self.whole.expected_bytes(size // self.slicing.parts)
        of_part = [a + -(-(b - a) // parts) for a, b in zip(fixed, asked, strict=True)]
        of_part = list(map(max, of_part, least)) if least else of_part
        return [of_part[o.source] if o.role == "part" else 0 for o in sliced.origins]

    def in_more(self) -> SlicedScaling | None:
        """Returns the costs in twice as many slices.

        Returns ``None`` where these do not divide the batch that was traced.
        """
        more = replace(self, slicing=replace(self.slicing, parts=2 * self.slicing.parts))
        try:
            more.at(self.samples)
        except InvalidProblemError:
            return None
        return more

    def _at(self, rule: SliceRule, size: int) -> SliceRule:
        """Returns a rule at another size; a number that follows the batch is scaled with it."""
        times, rest = divmod(rule.divides, self.samples)
        return rule if rest else replace(rule, divides=times * size)


#: One train step's problem at any batch size, of whole ops or in slices.
Scaling = BatchScaling | SlicedScaling


def searched_by_traces(
    backend: Backend, model: Any, batch: Any, scaling: Scaling, search: Callable[[], BatchSearch]
) -> BatchSearch:
    """Searches, and again where the step's own trace at the size found needs more than derived.

    TensorFlow on a CPU counts no small array. What a loop keeps in small arrays counts from some
    size on, which no trace at small sizes shows.

    Args:
        scaling: the step's costs at any size; learns the traces.
        search: searches the largest batch by these costs.
    """
    found, whole = search(), scaling.whole
    for _ in range(_MOST_TRACES if backend.memory.smallest_bytes else 0):
        if not whole.may_need_more:
            break
        size = found.max_batch_size
        try:
            traced = traced_at(backend, model, batch, size)
        except UnsupportedModelError:
            break  # told where it runs
        expected = backend.estimated_profile(traced, 0).op_workspace_bytes
        if not whole.learn_trace(size, traced.graph, expected):
            break
        found = search()
    return found


def searched_in_slices(
    scaling: Scaling,
    search: Callable[[Scaling, float], BatchSearch],
    share: float = 1.0,
) -> tuple[Scaling, BatchSearch]:
    """Searches, for a step in slices also in twice as many slices, as long as the batch grows.

    Args:
        scaling: the step's costs at any size.
        search: searches the largest batch in a share of the time, the second argument.
        share: share of the time that the first search may take.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: not even the first search finds a size.
    """
    found = search(scaling, share)
    more = scaling.in_more() if isinstance(scaling, SlicedScaling) else None
    while more is not None:
        share /= 2
        try:
            further = search(more, share)
        except BudgetError:
            break
        if further.max_batch_size < OPTIONS.worth_slices * found.max_batch_size:
            break
        scaling, found, more = more, further, more.in_more()
    slicing = scaling.slicing
    return scaling, found if slicing is None else found.naming(slicing=slicing)


def searched_further(
    scaling: Scaling,
    found: BatchSearch,
    in_slices: Iterable[SlicedScaling],
    wanted: int,
    search: Callable[[Scaling, float], BatchSearch],
) -> tuple[Scaling, BatchSearch]:
    """Searches in slices, where a search with whole ops did not reach the wanted size.

    Args:
        scaling, found: costs at any size with whole ops, and the result of the search by them.
        in_slices: the same step's costs in slices.
        wanted: the batch size that is wanted.
        search: as in :func:`searched_in_slices`.

    Returns:
        Costs and result of the first search in slices that leads further, else ``scaling`` and
        ``found``.
    """
    if found.max_batch_size >= wanted:
        return scaling, found
    for at, sliced in enumerate(in_slices):
        share = OPTIONS.search / 2**at
        try:
            further, its = searched_in_slices(sliced, search, share)
        except BudgetError:
            continue
        parts = sliced.slicing.parts
        is_reached = its.max_batch_size >= wanted - wanted % parts > found.max_batch_size
        if is_reached or its.max_batch_size >= OPTIONS.worth_slices * found.max_batch_size:
            return further, its
    return scaling, found


def scalings_below(
    scaling: BatchScaling, traced: TracedStep, size: int, wanted: int, limit: Limit
) -> Iterator[SlicedScaling]:
    """Yields a step's costs in slices in which the floor of a larger batch is within a limit.

    At most :attr:`SlicedSizeOptions.most_tries` are yielded, few ops and few parts first.

    Args:
        scaling: costs of the step with whole ops.
        traced: the whole step.
        size: batch size that it was traced for; the number of slices divides it.
        wanted: the larger batch size.
        limit: memory limit that the larger batch has to keep to.
    """
    slicer, usable = traced.slicer, limit.usable_bytes
    if slicer is None or not scaling.at(size).graph.has_ops_of(traced.graph):
        return
    yielded = 0
    for slicing in candidates(scaling.at(wanted), slicer.rules, usable):
        sliced = SlicedScaling(scaling, slicer.rules, size, slicing, slicer.granule_bytes)
        try:
            floor_bytes = sliced.at(wanted - wanted % slicing.parts).floor_bytes
        except InvalidProblemError:
            continue
        if floor_bytes <= usable:
            yield sliced
            yielded += 1
        if yielded == OPTIONS.most_tries:
            return


def step_scaling(backend: Backend, model: Any, step: TracedModel) -> Scaling:
    """Returns a step's costs at any size; in slices, at sizes that their number divides.

    Raises:
        UnsupportedModelError: no two of the sizes tried have the same ops.
    """
    sliced = sliced_scaling(backend, model, step.traced, step.problem, step.batch)
    return _measured_scaling(backend, model, step) if sliced is None else sliced


def sliced_scaling(
    backend: Backend, model: Any, traced: TracedStep, problem: Problem, batch: Any
) -> SlicedScaling | None:
    """Returns the costs of a step in slices, at any size that their number divides.

    Returns ``None`` for a step without slices.

    Args:
        traced: the step.
        problem: the step with its costs.
        batch: the batch that it was traced for.

    Raises:
        UnsupportedModelError: no two of the sizes tried have the same ops.
    """
    whole = traced.whole
    if whole is None:
        return None
    scaling = batch_scaling(backend, model, whole.problem(problem), batch, traced=whole.step)
    return scaling_in_slices(scaling, whole, batch_size_of(batch))


def scaling_in_slices(scaling: BatchScaling, whole: Whole, size: int) -> SlicedScaling:
    """Returns the costs of a step in slices at any size that their number divides.

    Args:
        scaling: costs of the step with whole ops.
        whole: what the step in slices was made from.
        size: batch size that it was traced for.

    Raises:
        UnsupportedModelError: the step has other ops at other sizes.
    """
    slicer = whole.step.slicer
    assert slicer is not None, "it has sliced the step"
    if not scaling.at(size).graph.has_ops_of(whole.step.graph):
        raise UnsupportedModelError(
            f"The train step has other ops at larger batches than at {size}: what its slices need "
            "there cannot be told."
        )
    return SlicedScaling(scaling, slicer.rules, size, whole.sliced.slicing, slicer.granule_bytes)


def _measured_scaling(backend: Backend, model: Any, step: TracedModel) -> BatchScaling:
    """Returns the step's costs at any size, fitted to two sizes where it was measured.

    The second size is half the first: it fits where the first does, and takes half the time. Where
    the step has other ops at half, the second size is twice the first, if that fits. Else one size
    has to do.

    Raises:
        UnsupportedModelError: no two of the sizes tried have the same ops.
    """
    size = batch_size_of(step.batch)
    for other in (size // 2, 2 * size) if step.plan is not None else ():
        traced = _traced_or_none(backend, model, step.batch, other)
        if traced is not None and traced.graph.has_ops_of(step.problem.graph):
            profile = _profile_at(other, traced, backend, model, step)
            measured = {} if profile is None else {other: profile}
            fixed = fixed_bytes(backend, {size: step.traced, other: traced})
            steps = step.traced, traced
            return BatchScaling(step.problem, size, traced.graph, other, measured, fixed, steps)
    return batch_scaling(backend, model, step.problem, step.batch, traced=step.traced)


def _traced_or_none(backend: Backend, model: Any, batch: Any, size: int) -> TracedStep | None:
    """Returns the step at another size; ``None`` where the model takes no batch of that size."""
    try:
        return traced_at(backend, model, batch, size) if size else None
    except UnsupportedModelError:
        return None


def _profile_at(
    size: int, traced: TracedStep, backend: Backend, model: Any, step: TracedModel
) -> Profile | None:
    """Measures and returns the profile at another size.

    Returns ``None`` where no plan fits there, memory runs out, or the profiler is busy or saw too
    little.
    """
    assert step.plan is not None
    problem, order = transfer_costs(step.problem, traced.graph), step.plan.solution.schedule
    request = PlanRequest.on(
        backend,
        problem=problem,
        batch_size=size,
        limit=step.limit,
        solver="greedy_first",
        seconds=OPTIONS.second_plan_s,
    )
    usable = step.limit.usable_bytes
    try:
        plan = plan_by(problem, order, usable, backend.memory) or plan_for(request)
        measured = measured_problem(
            backend, model, traced, problem, plan, repeated_batch(step.batch, size)
        )
    except BudgetError:
        return None
    return None if measured is problem else measured.profile


def in_slices(traced: TracedStep, slicing: Slicing | None) -> TracedStep:
    """Returns a whole step in slices; unchanged, where ``slicing`` is ``None``.

    Raises:
        UnsupportedModelError: the step cannot run in these slices.
    """
    if slicing is None:
        return traced
    try:
        if traced.slicer is None:
            raise LookupError("the step cannot be sliced")
        return traced.slicer.sliced(slicing)
    except InvalidProblemError as error:
        raise UnsupportedModelError(f"The step does not run in slices: {error}") from error
