"""A graph written op by op, for tests of what is done with one."""

from __future__ import annotations

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile


class Builder:
    """A graph written op by op; every op has one output."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: list[Value] = []

    def add(self, name: str, nbytes: int, inputs: tuple[int, ...] = (), **options: object) -> int:
        at = len(self.values)
        self.values.append(Value(at, name, nbytes, producer=len(self.ops)))
        op = Op(len(self.ops), name, name, inputs, (at,), **options)  # type: ignore[arg-type]
        self.ops.append(op)
        return at

    def problem(
        self,
        outputs: tuple[int, ...],
        budget_bytes: int | None = None,
        times: tuple[float, ...] = (),
    ) -> Problem:
        costs = Profile(times or (1.0,) * len(self.ops), (0,) * len(self.ops), 0)
        return Problem(Graph(tuple(self.ops), tuple(self.values), outputs), costs, budget_bytes)
