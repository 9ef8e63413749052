"""Records of how batches of one shape are trained; one frozen record for every kind of step.

The driver (:mod:`keras_remat.training.driver`) replaces a shape's record after every step. A
record holds just what its kind of step has: a planned step has a plan and costs, a recorded one a
recorder, and Keras's own step may run without ever having been traced.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from operator import gt
from statistics import median
from typing import Any, Self

from keras_remat.backends.base import ProfileRecorder, RunStep, TracedStep
from keras_remat.backends.batches import leaves_of
from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.planning.background import PlanProcess
from keras_remat.planning.plan import Plan
from keras_remat.training.decide import Move, Phase, Recorded, RetryCounts

#: For every array of a batch: its shape, its dtype's name, and the structure that it is a leaf of;
#: ``None`` stays ``None``.
Signature = tuple[tuple[tuple[int, ...], str, str] | None, ...]


def signature_of(batch: Any) -> Signature:
    """Returns the signature that all batches trained by one step share."""
    import keras

    # leaves in the same order are other arguments where they are named or nested otherwise
    structure = repr(keras.tree.map_structure(lambda leaf: 0, batch))
    return tuple(
        None if leaf is None else (tuple(leaf.shape), _name_of(leaf.dtype), structure)
        for leaf in leaves_of(batch)
    )


def _name_of(dtype: Any) -> str:
    """Returns the name of a dtype, the same for any framework's tensors and for arrays.

    Batches that were held back are arrays. Those of Python objects have a name, too, although Keras
    knows none.
    """
    import keras

    return str(getattr(dtype, "name", "")) or str(keras.backend.standardize_dtype(dtype))


class Signatures:
    """Finds the signatures of batches quickly, where batches like them came before."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Signature] = {}

    def of(self, batch: Any) -> Signature:
        """Returns the signature of a batch; see :func:`signature_of`."""
        layout = layout_of(batch)
        if layout not in self._known:
            self._known[layout] = signature_of(batch)
        return self._known[layout]


def layout_of(nested: Any) -> Hashable:
    """Returns the containers of a batch, and shapes and dtypes in the place of arrays."""
    if isinstance(nested, (tuple, list)):
        return type(nested), *map(layout_of, nested)
    if nested is None:
        return None
    shape = getattr(nested, "shape", None)
    if shape is not None:
        return shape, nested.dtype
    return dict, *((key, layout_of(inner)) for key, inner in nested.items())


def is_within(small: Signature, large: Signature) -> bool:
    """Returns whether a batch is of another one's kind, and no array of it is larger."""
    if len(small) != len(large):
        return False
    for a, b in zip(small, large, strict=True):
        if a is None or b is None:
            if a != b:
                return False
        elif a[1:] != b[1:] or len(a[0]) != len(b[0]) or any(map(gt, a[0], b[0])):
            return False
    return True


@dataclass(frozen=True, kw_only=True)
class StepConstraints:
    """Holds the constraints on how a batch is trained.

    Args:
        may_split: whether a batch that fits under no schedule may be trained in micro-batches. It
            may not where the size of a step is given.
        allow_over_limit: whether a plan that is known to miss the limit is better than none. It is
            not where there is a smaller batch to go back to.
        wants_profile: whether the ops are to be measured even where Keras's own step fits, because
            larger batches are planned by their costs.
        require_planned: whether the batch runs under a plan even where Keras's own step fits. Where
            the order of ops matters, steps need more memory after a plain one: 21 samples of
            U-Net's measured 177 MiB before a plain step of 5, and 210 after it.
        least_margin: margin of the limit that plans keep at least, where such a plan is found.
    """

    may_split: bool = False
    allow_over_limit: bool = True
    wants_profile: bool = False
    require_planned: bool = False
    least_margin: float = 0.0


USUAL_CONSTRAINTS = StepConstraints()


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Holds the traced step of a batch shape and its costs.

    Args:
        micro_batches: number of micro-batches that the step trains its batch in.
    """

    traced: TracedStep
    problem: Problem
    micro_batches: int = 1

    @property
    def is_whole(self) -> bool:
        """Returns whether the ops are those of Keras's own step: neither micro-batches nor
        slices."""
        return self.micro_batches == 1 and self.traced.whole is None

    @property
    def as_whole(self) -> Costs:
        """Returns the costs of the same step with whole ops, where slices were not asked for."""
        whole = self.traced.whole
        if whole is None or self.micro_batches > 1:
            return self
        return replace(self, traced=whole.step, problem=whole.problem(self.problem))

    @property
    def store_all(self) -> Schedule:
        """Returns the schedule without recomputation."""
        return Schedule.store_all(self.problem.graph)


@dataclass(frozen=True, kw_only=True)
class PriorPlans:
    """Holds the plans and costs that are known before a shape is planned.

    Args:
        plans: plans for other shapes of the same step; each with the graph it was made for and the
            phase that it begins in.
        costs: the step's costs at some shape; empty where nothing is known.
        is_family: whether the plans are of shapes that came before, and more may come.
    """

    plans: tuple[tuple[Plan, Graph, Phase], ...] = ()
    costs: tuple[Problem, ...] = ()
    is_family: bool = False


@dataclass(frozen=True, kw_only=True)
class OverLimit:
    """Holds the measurements of a step that was over the limit.

    It does not hold the step itself, whose large constants would stay in use: the steps of a
    ConvLSTM's plans have 8 MiB each.

    Args:
        plan: the step's plan; ``None`` for Keras's own step.
    """

    costs: Costs
    plan: Plan | None
    steps: tuple[Usage, ...]

    @property
    def peak_bytes(self) -> int:
        """Returns the largest peak of :attr:`steps`; 0 where there is none."""
        return max((step.peak_bytes for step in self.steps), default=0)


@dataclass(frozen=True, kw_only=True)
class ShapeState:
    """Says how batches of one shape are trained: by Keras's own step, which was not traced for it.

    Args:
        called: whether ``run`` has had its first call, which is slower and larger than others.
        steps: measurements of the later calls in this phase; of a phase that may be long, the last
            one.
        resident_bytes: most bytes in use between two of the shape's steps.
        over_limit: the shape's steps that measured over the limit.
    """

    signature: Signature
    batch_size: int
    run: RunStep
    phase: Phase
    constraints: StepConstraints = field(default_factory=StepConstraints)
    tries: RetryCounts = field(default_factory=RetryCounts)
    recorded: Recorded = Recorded.NONE
    called: bool = False
    steps: tuple[Usage, ...] = ()
    resident_bytes: int = 0
    over_limit: tuple[OverLimit, ...] = ()

    @property
    def measured(self) -> Usage:
        """Returns the median time and the largest peak of :attr:`steps`; there must be one."""
        return Usage(
            median(step.time_s for step in self.steps), max(step.peak_bytes for step in self.steps)
        )

    @property
    def peak_bytes(self) -> int:
        """Returns the largest peak of :attr:`steps`; 0 before there is one."""
        return max((step.peak_bytes for step in self.steps), default=0)

    def after_step(self, usage: Usage, bytes_in_use: int) -> Self:
        """Returns the record after one more call of ``run``; the first call is not measured."""
        if not self.called:
            return replace(self, called=True)
        newest_only = self.phase in (Phase.SOLVE, Phase.FINAL)
        steps = (usage,) if newest_only else (*self.steps, usage)
        resident = max(self.resident_bytes, bytes_in_use)
        return replace(self, steps=steps, resident_bytes=resident)

    def trying(self, move: Move) -> Self:
        """Returns the record where a move is counted, made or found impossible."""
        return replace(self, tries=self.tries.after(move))

    def without(self, move: Move) -> Self:
        """Returns the record after a move that could not be made."""
        return replace(self, tries=self.tries.without(move))

    def plainly(self, run: RunStep, costs: Costs, phase: Phase) -> PlainShape:
        """Returns the record of Keras's own step, traced."""
        return PlainShape(**(_carried(self) | {"run": run, "phase": phase}), costs=costs)

    def traced(self, costs: Costs) -> PlainShape:
        """Returns the record of Keras's own step, which goes on, with its traced costs."""
        return PlainShape(**vars(self), costs=costs)

    def planned(self, run: RunStep, costs: Costs, plan: Plan, phase: Phase) -> PlannedShape:
        """Returns the record of a new plan's step."""
        changes: dict[str, Any] = {"run": run, "phase": phase}
        if not isinstance(self, PlannedShape):
            changes["resident_bytes"] = 0  # Keras's own step leaves variables in larger chunks
        return PlannedShape(**(_carried(self) | changes), costs=costs, plan=plan)


@dataclass(frozen=True, kw_only=True)
class TracedShape(ShapeState):
    """Says how batches of one shape are trained, and holds the costs of their traced step."""

    costs: Costs

    def with_over_limit(self) -> Self:
        """Returns the record with this step as the last of those that measured over the limit."""
        plan = self.plan if isinstance(self, PlannedShape) else None
        seen = OverLimit(costs=self.costs, plan=plan, steps=self.steps)
        return replace(self, over_limit=(*self.over_limit, seen))


class PlainShape(TracedShape):
    """Says how batches of one shape are trained: by Keras's own step, whose costs are known."""


@dataclass(frozen=True, kw_only=True)
class PlannedShape(TracedShape):
    """Says how batches of one shape are trained: under a plan."""

    plan: Plan

    @property
    def schedule(self) -> Schedule:
        """Returns the schedule of the plan."""
        return self.plan.solution.schedule

    def recording(self, recorder: ProfileRecorder, phase: Phase) -> Recording:
        """Returns the record of steps that are recorded from the next one on."""
        return Recording(**self._going_on(phase), recorder=recorder)

    def solving(self, process: PlanProcess | None, phase: Phase) -> Solving:
        """Returns the record of steps that go on while a process solves for another plan."""
        return Solving(**self._going_on(phase), process=process)

    def _going_on(self, phase: Phase) -> dict[str, Any]:
        """Returns the fields of a step that goes on in another phase."""
        going_on = {"run": self.run, "called": self.called, "costs": self.costs, "plan": self.plan}
        return _carried(self) | going_on | {"phase": phase}


@dataclass(frozen=True, kw_only=True)
class Recording(PlannedShape):
    """Says how batches of one shape are trained: under a plan whose steps are recorded.

    Args:
        started: whether the recorder is recording.
    """

    recorder: ProfileRecorder
    started: bool = False


@dataclass(frozen=True, kw_only=True)
class Solving(PlannedShape):
    """Says how batches of one shape are trained: under a plan, while another one is solved for.

    Args:
        process: the process that solves; ``None`` where nothing has to be solved, or it was ended.
    """

    process: PlanProcess | None

    @property
    def solved(self) -> bool:
        """Returns whether there is nothing to wait for."""
        return self.process is None or self.process.has_ended


_CARRIED = (
    "signature", "batch_size", "constraints", "tries", "recorded", "resident_bytes", "over_limit",
)  # fmt: skip


def _carried(shape: ShapeState) -> dict[str, Any]:
    """Returns the fields that a shape keeps when another step trains it."""
    return {name: getattr(shape, name) for name in _CARRIED}
