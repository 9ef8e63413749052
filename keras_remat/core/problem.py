"""Holds a graph, its costs, and the budget it must fit: the input of every solver."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from keras_remat.core.graph import Graph, is_int, reused_bytes
from keras_remat.core.profile import Profile
from keras_remat.errors import InvalidProblemError


@dataclass(frozen=True)
class Problem:
    """Holds one instance of the rematerialization problem.

    Args:
        graph: the ops and values of a step.
        profile: the costs of the graph; one entry per op.
        budget_bytes: the peak no schedule may exceed, resident bytes included; ``None`` for no
            limit.
        name: name for people.

    Raises:
        InvalidProblemError: the profile is for another number of ops, or the budget is not a
            positive int.
    """

    graph: Graph
    profile: Profile
    budget_bytes: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if len(self.profile.op_time_s) != len(self.graph.ops):
            raise InvalidProblemError(
                f"the profile has {len(self.profile.op_time_s)} ops, the graph has "
                f"{len(self.graph.ops)}",
                field="profile",
            )
        budget = self.budget_bytes
        if budget is not None and (not is_int(budget) or budget <= 0):
            raise InvalidProblemError(
                f"must be a positive int, got {budget!r}", field="budget_bytes", value=budget
            )

    @property
    def room_bytes(self) -> int | None:
        """Returns the budget less the resident bytes; ``None`` without a budget."""
        budget = self.budget_bytes
        return None if budget is None else budget - self.profile.resident_bytes

    def with_budget(self, budget_bytes: int | None) -> Problem:
        """Returns the same problem under another budget."""
        return replace(self, budget_bytes=budget_bytes)

    def op_floor_bytes(self, op_id: int) -> int:
        """Returns the bytes that are alive while ``op_id`` runs, at least, in any schedule.

        They are resident bytes, inputs, outputs that reuse no input (a graph output that cannot be
        computed again is never overwritten), and workspace.
        """
        graph, op = self.graph, self.graph.ops[op_id]
        alive = {v for v in op.inputs if graph.values[v].producer is not None}
        total = self.profile.resident_bytes + self.profile.op_workspace_bytes[op_id]
        total += sum(graph.values[v].nbytes for v in alive | set(op.outputs))
        return total - reused_bytes(op, graph.values, alive - self.irreplaceable)

    @cached_property
    def irreplaceable(self) -> frozenset[int]:
        """Returns ids of the graph outputs whose op may run only once.

        Their first instance must survive to the end.
        """
        graph = self.graph
        return frozenset(
            v
            for v in graph.outputs
            if (p := graph.values[v].producer) is not None and not graph.ops[p].recomputable
        )

    @cached_property
    def _end_bytes(self) -> int:
        """Returns the bytes alive at the end, at least: resident ones and computed outputs."""
        values = [self.graph.values[v] for v in set(self.graph.outputs)]
        outputs = sum(value.nbytes for value in values if value.producer is not None)
        return self.profile.resident_bytes + outputs

    @cached_property
    def floor_op(self) -> int | None:
        """Returns the id of the op that sets the floor; ``None`` where the step's end does."""
        op_id = max(sorted(self.graph.needed), key=self.op_floor_bytes, default=None)
        return None if op_id is None or self.op_floor_bytes(op_id) < self._end_bytes else op_id

    @property
    def floor_bytes(self) -> int:
        """Returns a bound on the peak that no schedule beats.

        It is the resident bytes plus the most bytes that any single needed op holds while it runs,
        or that the outputs hold at the end.
        """
        return self._end_bytes if self.floor_op is None else self.op_floor_bytes(self.floor_op)

    @cached_property
    def store_all_time_s(self) -> float:
        """Returns the seconds of the schedule with no recomputation: each needed op once."""
        return sum(self.profile.op_time_s[i] for i in sorted(self.graph.needed))
