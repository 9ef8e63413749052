"""Decides what follows from a step: a table in which the first row that matches wins.

A batch shape goes through phases. It runs plainly and is measured (PLAIN), or a first plan runs
once (WARM_UP), is recorded by the profiler (RECORD), goes on while a better one is solved for
beside it (SOLVE), and the plan made from that is measured (VERIFY), until a step is final and only
watched (FINAL). Where a larger batch is searched, a shape that trains plainly is recorded once,
too: a plan runs in order while its ops are measured, and then Keras's own step comes back. After
every step the driver (:mod:`keras_remat.training.driver`) states the :class:`Facts`, asks
:func:`decide`, and makes the move. A move that cannot be made (no plan was found) is noted among
the facts, and the table is asked again: a later row matches instead.

Nothing here knows a backend, a clock or a log. Two things are shown by enumeration in the tests:
every combination of facts has a row, and every path reaches FINAL or REFUSE. The second holds
because :class:`RetryCounts` counts every move that could go round in a circle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

#: How often a plan is made again because its measured peak is over the limit.
MAX_TIGHTENINGS = 3
#: How often a batch shape may run out of memory before its error is the user's.
MAX_OUT_OF_MEMORY = 4
#: Numbers of micro-batches that are tried for a batch that fits under no schedule.
MICRO_BATCHES = (2, 4, 8)


class Phase(Enum):
    """Names the purpose of a batch shape's steps."""

    PLAIN = auto()
    """Keras's own step runs and is measured."""
    WARM_UP = auto()
    """A plan from estimated op times runs for the first time."""
    RECORD = auto()
    """The profiler records its steps."""
    SOLVE = auto()
    """The first plan goes on while a process of its own solves for a better one."""
    VERIFY = auto()
    """A plan's steps are measured."""
    FINAL = auto()
    """Training goes on with this step; its peak is watched."""


class Recorded(Enum):
    """Says how recording the step's ops ended."""

    NONE = auto()
    """No recording has ended."""
    BUSY = auto()
    """The recording could not start: the user's own profiler session runs."""
    BLIND = auto()
    """Too few ops were seen, or this backend can time none."""
    MEASURED = auto()
    """There is a measured profile."""


class Move(Enum):
    """Names the driver's action between two steps."""

    STAY = auto()
    """Nothing changes."""
    FINISH = auto()
    """What runs was measured within the limit and is final."""
    PLAN = auto()
    """The plain step is over the limit: the first plan is made."""
    PROFILE = auto()
    """The plain step fits: a plan takes over for as long as its ops are measured."""
    START_RECORDER = auto()
    """The next steps are recorded."""
    KEEP_PLAN = auto()
    """No better plan came of the recording: the running one is measured."""
    RUN_PLAIN = auto()
    """By the measured costs the plain step fits: it takes over."""
    START_SOLVER = auto()
    """A process beside training begins to solve, from the measured profile."""
    REPLAN = auto()
    """The plan is made again, from the measured profile."""
    TIGHTEN = auto()
    """The plan is made again, because its measured peak is over the limit."""
    SPLIT = auto()
    """The batch is trained in micro-batches, or in more of them."""
    TRY_PLAIN = auto()
    """No plan keeps to the limit: Keras's own step is measured, too, as it may take less."""
    KEEP_SMALLEST = auto()
    """Of the steps that measured over the limit, Keras's own among them, the smallest is final."""
    LOWER_LIMIT = auto()
    """The device has less memory than was thought: a plan is made for what it has."""
    REFUSE = auto()
    """The batch cannot be trained: its error is the user's."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """States all that the next move depends on.

    Args:
        phase: phase of the batch shape.
        enough_steps: whether as many steps of the phase were measured as are wanted.
        over_limit: whether a measured step took more than the limit.
        attempts_left: whether the plan may be made again because a step needed too much memory.
        may_split: whether the batch may be trained in (more) micro-batches.
        allow_over_limit: whether a plan that is known to miss the limit is better than none, or no
            peak is measured.
        runs_a_plan: whether a plan runs, and not Keras's own step.
        plain_fits: whether Keras's own step was measured within the limit, or is predicted to fit
            with room to spare.
        plain_ruled_out: whether Keras's own step is known not to fit, whatever is predicted.
        plain_may_be_smaller: whether Keras's own step was not measured, and may take less than the
            plans that measured over the limit.
        wants_profile: whether the ops are to be measured even where Keras's own step fits.
        recorded: how recording ended.
        solves_beside: whether a process of its own may solve while training goes on.
        solved: whether that process has ended.
        out_of_memory: whether the step ran out of memory and was undone.
        failed: moves that were decided on after this step and could not be made.
    """

    phase: Phase
    enough_steps: bool = False
    over_limit: bool = False
    attempts_left: bool = True
    may_split: bool = False
    allow_over_limit: bool = True
    runs_a_plan: bool = True
    plain_fits: bool = False
    plain_ruled_out: bool = False
    plain_may_be_smaller: bool = False
    wants_profile: bool = False
    recorded: Recorded = Recorded.NONE
    solves_beside: bool = False
    solved: bool = False
    out_of_memory: bool = False
    failed: frozenset[Move] = frozenset()

    def without(self, move: Move) -> Facts:
        """Returns the facts after a move that could not be made."""
        return replace(self, failed=self.failed | {move})


@dataclass(frozen=True)
class Row:
    """Holds one row of the table: in this phase, where these facts hold, that move is made.

    Args:
        before: the phase that the row is for; ``None`` stands for every phase.
        facts: name of a fact → the value it must have.
        move: the move that is made.
        after: the phase that the move leads to; ``None`` stands for the first phase of a new plan.
    """

    before: Phase | None
    facts: Mapping[str, object]
    move: Move
    after: Phase | None

    def matches(self, facts: Facts) -> bool:
        """Returns whether the row's facts hold and its move was not found impossible."""
        return (
            self.before in (None, facts.phase)
            and self.move not in facts.failed
            and all(getattr(facts, name) == value for name, value in self.facts.items())
        )


_OVER, _OOM, _MEASURED = (
    {"over_limit": True}, {"out_of_memory": True}, {"recorded": Recorded.MEASURED},
)  # fmt: skip
_MISSES = {**_OVER, "allow_over_limit": False}
_OVER_WITH_PLAN = {**_OVER, "runs_a_plan": True}
_PLAIN_FITS = {"runs_a_plan": True, "plain_fits": True, "plain_ruled_out": False}

TABLE: tuple[Row, ...] = (
    # whatever the phase, a step that ran out of memory comes first
    Row(None, {**_OOM, **_PLAIN_FITS}, Move.RUN_PLAIN, Phase.PLAIN),
    # a plain step that was only compared with plans that have trained
    Row(Phase.VERIFY, {**_OOM, "runs_a_plan": False}, Move.KEEP_SMALLEST, Phase.FINAL),
    Row(None, {**_OOM, "attempts_left": True}, Move.LOWER_LIMIT, None),
    Row(None, {**_OOM, "may_split": True}, Move.SPLIT, None),
    Row(None, _OOM, Move.REFUSE, Phase.FINAL),
    Row(Phase.PLAIN, _OVER, Move.PLAN, None),
    Row(Phase.PLAIN, {**_OVER, "may_split": True}, Move.SPLIT, None),
    Row(Phase.PLAIN, _OVER, Move.KEEP_SMALLEST, Phase.FINAL),
    Row(Phase.PLAIN, {"enough_steps": True, "wants_profile": True}, Move.PROFILE, Phase.WARM_UP),
    Row(Phase.PLAIN, {"enough_steps": True}, Move.FINISH, Phase.FINAL),
    Row(Phase.PLAIN, {}, Move.STAY, Phase.PLAIN),
    Row(Phase.WARM_UP, {}, Move.START_RECORDER, Phase.RECORD),
    Row(Phase.RECORD, {"recorded": Recorded.NONE}, Move.STAY, Phase.RECORD),
    Row(Phase.RECORD, _PLAIN_FITS, Move.RUN_PLAIN, Phase.PLAIN),
    # the order of a larger batch was made from measured costs; another one may miss the limit
    Row(
        Phase.RECORD, {**_MEASURED, "over_limit": False, "allow_over_limit": False},
        Move.KEEP_PLAN, Phase.VERIFY,
    ),
    Row(Phase.RECORD, {**_MEASURED, "solves_beside": True}, Move.START_SOLVER, Phase.SOLVE),
    Row(Phase.RECORD, _MEASURED, Move.REPLAN, Phase.VERIFY),
    Row(Phase.RECORD, {**_MEASURED, **_MISSES}, Move.KEEP_SMALLEST, Phase.FINAL),
    Row(Phase.RECORD, {}, Move.KEEP_PLAN, Phase.VERIFY),
    Row(Phase.SOLVE, {"over_limit": False, "solved": False}, Move.STAY, Phase.SOLVE),
    Row(Phase.SOLVE, {}, Move.REPLAN, Phase.VERIFY),
    Row(Phase.SOLVE, _MISSES, Move.KEEP_SMALLEST, Phase.FINAL),
    Row(Phase.SOLVE, {}, Move.KEEP_PLAN, Phase.VERIFY),
    Row(Phase.VERIFY, {**_OVER_WITH_PLAN, "attempts_left": True}, Move.TIGHTEN, Phase.VERIFY),
    Row(Phase.VERIFY, {**_OVER_WITH_PLAN, "may_split": True}, Move.SPLIT, None),
    Row(
        Phase.VERIFY, {**_OVER_WITH_PLAN, "allow_over_limit": True, "plain_may_be_smaller": True},
        Move.TRY_PLAIN, Phase.VERIFY,
    ),
    Row(Phase.VERIFY, _OVER, Move.KEEP_SMALLEST, Phase.FINAL),
    Row(Phase.VERIFY, {"enough_steps": True}, Move.FINISH, Phase.FINAL),
    Row(Phase.VERIFY, {}, Move.STAY, Phase.VERIFY),
    # other users of the allocator change as training goes on: a final step may exceed the limit
    Row(
        Phase.FINAL, {**_OVER_WITH_PLAN, "attempts_left": True},
        Move.TIGHTEN, Phase.VERIFY,
    ),
    Row(Phase.FINAL, {**_OVER, "runs_a_plan": False, "plain_ruled_out": False}, Move.PLAN, None),
    Row(Phase.FINAL, {}, Move.STAY, Phase.FINAL),
)  # fmt: skip


def decide(facts: Facts) -> tuple[Move, Phase]:
    """Returns the move that the facts ask for, and the phase it leads to.

    Raises:
        LookupError: the facts name a failed move that cannot fail.

    Example:
        >>> decide(Facts(phase=Phase.VERIFY, over_limit=True))
        (<Move.TIGHTEN: 10>, <Phase.VERIFY: 5>)
    """
    for row in TABLE:
        if row.matches(facts):
            return row.move, row.after or _first_phase(row.move, facts.recorded)
    raise LookupError(f"no row for {facts}")


def _first_phase(move: Move, recorded: Recorded) -> Phase:
    """Returns the first phase of a new plan: its steps are recorded once, where they can be."""
    # a split step is another graph: an earlier recording tells nothing of it
    known = (Recorded.BLIND,) if move is Move.SPLIT else tuple(set(Recorded) - {Recorded.NONE})
    return Phase.VERIFY if recorded in known else Phase.WARM_UP


@dataclass(frozen=True, kw_only=True)
class RetryCounts:
    """Counts the moves that were tried for a batch shape, so that every path ends.

    Args:
        tightenings: how often the plan was made again since the batch was last split.
        out_of_memory: how often a step ran out of memory.
        splits: how many numbers of micro-batches were tried.
        profiled: whether a step that runs plainly was recorded for its ops' costs.
        plain_ruled_out: whether Keras's own step is known not to fit.
        plain_tried: whether it was measured because no plan kept to the limit.
        replan_failed: whether no plan was found from the measured profile.
    """

    tightenings: int = 0
    out_of_memory: int = 0
    splits: int = 0
    profiled: bool = False
    plain_ruled_out: bool = False
    plain_tried: bool = False
    replan_failed: bool = False

    def attempts_left(self, *, out_of_memory: bool) -> bool:
        """Returns whether a plan may be made once more because a step needed too much memory."""
        if out_of_memory:
            return self.out_of_memory < MAX_OUT_OF_MEMORY
        return self.tightenings < MAX_TIGHTENINGS

    @property
    def splits_left(self) -> bool:
        """Returns whether there is a number of micro-batches that was not tried."""
        return self.splits < len(MICRO_BATCHES)

    def without(self, move: Move) -> RetryCounts:
        """Returns the counts after a move that could not be made.

        Where no tighter plan was found once, none is looked for again.
        """
        if move is Move.REPLAN:
            return replace(self, replan_failed=True)
        return replace(self, tightenings=MAX_TIGHTENINGS) if move is Move.TIGHTEN else self

    def after(self, move: Move) -> RetryCounts:
        """Returns the counts after a move, made or found impossible."""
        if move is Move.TIGHTEN:
            return replace(self, tightenings=self.tightenings + 1)
        if move is Move.LOWER_LIMIT:
            return replace(self, out_of_memory=self.out_of_memory + 1, plain_ruled_out=True)
        if move is Move.PROFILE:
            return replace(self, profiled=True)
        if move is Move.SPLIT:
            return replace(self, splits=self.splits + 1, tightenings=0, plain_ruled_out=True)
        if move is Move.TRY_PLAIN:
            return replace(self, plain_tried=True)
        if move is Move.KEEP_SMALLEST:
            return replace(self, tightenings=MAX_TIGHTENINGS, plain_ruled_out=True)
        return replace(self, plain_ruled_out=True) if move is Move.PLAN else self
