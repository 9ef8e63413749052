"""Searches from the end of the step backwards, for schedules near the floor.

It finds one, or proves that none exists, by following the values that must be alive before a run.

Let H be the values that must be alive at some moment. Whichever op i ran last before it wrote one
of them, and the moment before that

    H' = (H − outputs of i) ∪ inputs of i,      bytes(H ∪ outputs ∪ inputs) + workspace − taken-over
    buffers ≤ budget.

From the graph's outputs to the empty set, each such step is one run, the last one first, and every
schedule without useless runs is such a path. The values that die at i are known (inputs not in H),
so that bytes are exactly those of :mod:`keras_remat.core.simulate`; order and number of
recomputations are free. It is the pebble game of Sethi (1975) played backwards. Near the floor few
sets fit the budget: there, heuristics that walk forwards get stuck, and this search is short.

The search goes depth first, and drops sets that it has seen before. Two kinds of step are taken at
once, because the rest of the way is no harder after them:

* (merge) all inputs of i are in H: H' is a subset of H. Costs a recomputation, which
  :mod:`keras_remat.solvers.orders.trim` may take back.
* (first run) nothing that is still to run reads i, and H' holds no more bytes than H: whatever path
  there is from H, i can be moved to its front. This counts on buffers not being taken over: in
  graphs with ``may_reuse`` it proves nothing.

When a search without unproved shortcuts ends by itself, no schedule fits; otherwise a number of
steps cuts it off. There are two sorts of search: ``"once"`` tries first runs before recomputations
and does not merge, which recomputes less; ``"few"`` tries the steps with the fewest bytes first and
takes all shortcuts that prove something.

Known limits: nothing is minimized, and thousands of ops are too many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from keras_remat.core.deadline import NO_DEADLINE, Deadline, work_budget_s
from keras_remat.core.graph import reused_bytes
from keras_remat.core.problem import Problem
from keras_remat.errors import InfeasibleBudgetError
from keras_remat.solvers.orders.incumbent import Incumbent
from keras_remat.solvers.orders.trim import trimmed

STEPS_PER_S = 60_000
"""Steps looked at per second of a time limit, those over the budget included; fewer than a machine
looks at in a second."""

Sort = Literal["few", "once"]
_Path = tuple[int, "_Path | None"]
_Position = tuple[int, int, int, _Path | None]
"""Values alive, ops left, bytes held, and the runs that come after."""


def solve(incumbent: Incumbent, seed: int) -> None:
    """Offers the orders that the two sorts of search find.

    Recomputations that the budget has room to avoid are taken back first.

    Raises:
        InfeasibleBudgetError: it is proved that no schedule fits.
    """
    problem = incumbent.problem
    if incumbent.offer_store_all():
        return
    max_steps = steps_limit(incumbent.deadline.seconds / 2)
    for order in both(problem, max_steps, incumbent.deadline):
        incumbent.offer(trimmed(problem, order))


def both(problem: Problem, max_steps: int, deadline: Deadline) -> Iterator[tuple[int, ...]]:
    """Yields the orders that the two sorts of search find; arguments as in :func:`search`.

    Raises:
        InfeasibleBudgetError: it is proved that no schedule fits.
    """
    sorts: tuple[Sort, ...] = ("once", "few")
    for sort in sorts:
        order = search(problem, sort, max_steps=max_steps, deadline=deadline)
        if order is not None:
            yield order


def steps_limit(time_limit_s: float) -> int:
    """Returns how many steps are looked at within a time limit."""
    return int(STEPS_PER_S * work_budget_s(time_limit_s))


def search(
    problem: Problem, sort: Sort, *, max_steps: int, deadline: Deadline = NO_DEADLINE
) -> tuple[int, ...] | None:
    """Returns a legal order within the budget.

    Returns ``None`` where the search was cut off, or where it ended but proves nothing.

    Args:
        problem: a problem with a budget.
        sort: see the module docstring.
        max_steps: number of steps after which the search is cut off.
        deadline: deadline at which the search ends.

    Raises:
        InfeasibleBudgetError: it is proved that no schedule fits.
    """
    game = _Game(problem)
    merges = sort == "few"
    moves = not merges or not game.takes_over
    effects, wanted = game.start()
    start = (wanted, game.closure(wanted, effects))
    seen = {(wanted, effects)}
    stack: list[_Position] = [(*start, game.bytes_of(wanted), None)]
    while stack:
        position = stack.pop()
        if game.looked > max_steps or deadline.is_over:
            return None
        position, steps = _at_once(game, position, seen, merges=merges, moves=moves)
        _, left, _, path = position
        if not left:
            return _order(path)
        if merges:
            steps.sort(key=lambda step: -step.held)
        else:
            steps.sort(key=lambda step: (step.first, -step.held))
        for step in steps:
            key = (step.alive, step.left & game.effects)
            if key not in seen:
                seen.add(key)
                stack.append((step.alive, step.left, step.held, (step.op_id, path)))
    if game.takes_over and not merges:
        return None
    budget = problem.budget_bytes or 0
    raise InfeasibleBudgetError(budget, budget + 1, by_search=True)


def _at_once(
    game: _Game, position: _Position, seen: set[tuple[int, int]], *, merges: bool, moves: bool
) -> tuple[_Position, list[_Step]]:
    """Takes all steps that are taken at once; returns the position after them, and its next steps.

    There are no next steps where the search is at its end, or the position was seen before.

    Args:
        seen: values alive and effects left of earlier positions; the positions passed are added.
        merges, moves: whether (merge) and (first run) steps are taken at once.
    """
    alive, left, held, path = position
    while left:
        steps = []
        for step in game.steps(alive, left, held):
            if (moves and step.first and step.held <= held) or (merges and not step.alive & ~alive):
                break
            steps.append(step)
        else:
            return (alive, left, held, path), steps
        alive, left, held, path = step.alive, step.left, step.held, (step.op_id, path)
        key = (alive, left & game.effects)
        if key in seen and left:
            break
        seen.add(key)
    return (alive, left, held, path), []


@dataclass(frozen=True, slots=True)
class _Step:
    """Stands for a run of an op, one step backwards.

    Before it, the values ``alive`` must be alive and the ops ``left`` have to run. ``first`` says
    whether it is the op's first run.
    """

    op_id: int
    alive: int
    left: int
    held: int
    first: bool


class _Game:
    """Holds the graph as bit sets: bit v of a set of values, bit i of a set of ops."""

    def __init__(self, problem: Problem):
        graph = problem.graph
        self.graph, self.nbytes = graph, [value.nbytes for value in graph.values]
        self.budget = (problem.budget_bytes or 0) - problem.profile.resident_bytes
        self.workspace = problem.profile.op_workspace_bytes
        self.ops = graph.ops
        self.producer = [-1 if v.producer is None else v.producer for v in graph.values]
        count = len(graph.ops)
        self.reads = [_bits(v for v in op.inputs if self.producer[v] >= 0) for op in graph.ops]
        self.writes = [_bits(op.outputs) for op in graph.ops]
        self.readers = [0] * count
        self.ancestors = [0] * count
        self.blockers = [0] * count  # ops whose copies must all run later
        self.effects = 0
        self.looked = 0  # number of steps looked at
        self.takes_over = any(graph.ops[i].may_reuse for i in graph.needed)
        for op_id in sorted(graph.needed):
            op = graph.ops[op_id]
            self.ancestors[op_id] = 1 << op_id
            for v in op.inputs:
                if self.producer[v] >= 0:
                    self.ancestors[op_id] |= self.ancestors[self.producer[v]]
                    self.readers[self.producer[v]] |= 1 << op_id
            for earlier in op.after:
                self.blockers[earlier] |= 1 << op_id
            if not op.recomputable:
                self.effects |= 1 << op_id

    def start(self) -> tuple[int, int]:
        """Returns the ops with effects, and the values alive at the end."""
        return self.effects, _bits(v for v in self.graph.outputs if self.producer[v] >= 0)

    def closure(self, alive: int, effects: int) -> int:
        """Returns the ops that must run until ``alive`` are there and ``effects`` have run."""
        left = 0
        for op_id in [*(self.producer[v] for v in _members(alive)), *_members(effects)]:
            left |= self.ancestors[op_id]
        return left

    def bytes_of(self, values: int) -> int:
        return sum(self.nbytes[v] for v in _members(values))

    def steps(self, alive: int, left: int, held: int) -> Iterator[_Step]:
        """Yields every run that may have been the last one."""
        candidates = dict.fromkeys(self.producer[v] for v in _members(alive))
        candidates.update(dict.fromkeys(_members(left & self.effects)))
        self.looked += len(candidates)
        for op_id in candidates:
            first = not self.readers[op_id] & left
            if self.blockers[op_id] & left or not (first or self.ops[op_id].recomputable):
                continue
            more = self.bytes_of(self.reads[op_id] & ~alive)
            peak = held + more + self.bytes_of(self.writes[op_id] & ~alive) + self.workspace[op_id]
            if peak > self.budget:
                reused = 0
                if self.ops[op_id].may_reuse:
                    dying = {
                        v
                        for v in self.ops[op_id].may_reuse
                        if not alive >> v & 1 and self.producer[v] >= 0
                    }
                    reused = reused_bytes(self.ops[op_id], self.graph.values, dying)
                if peak - reused > self.budget:
                    continue
            yield _Step(
                op_id,
                (alive & ~self.writes[op_id]) | self.reads[op_id],
                left & ~(1 << op_id) if first else left,
                held + more - self.bytes_of(self.writes[op_id] & alive),
                first,
            )


def _bits(members: Iterator[int] | tuple[int, ...]) -> int:
    bits = 0
    for member in members:
        bits |= 1 << member
    return bits


def _members(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _order(path: _Path | None) -> tuple[int, ...]:
    order = []
    while path is not None:
        order.append(path[0])
        path = path[1]
    return tuple(order)
