"""Derives a train step's graph and costs at any batch size, from a few traces.

The graph follows from two traces (:mod:`keras_remat.batch_size.graph_scaling`). An op's costs at
another batch size are fitted to profiles measured at two sizes; where only one was measured, they
are in proportion to the op's bytes (:mod:`keras_remat.batch_size.cost_fit`).

Known limits: a framework that optimizes the graph may fold an op at some sizes and not at others.
So sizes with the same ops are looked for, and a size that really runs is compared with its own
trace (:mod:`keras_remat.batch_size.find`, :mod:`keras_remat.training.shape_family`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from keras_remat.backends.base import Backend, TracedStep
from keras_remat.backends.batches import batch_size_of
from keras_remat.backends.example_batches import fixed_batch
from keras_remat.batch_size.cost_fit import CostFit, transfer_costs
from keras_remat.batch_size.graph_scaling import GraphScaling
from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.slices import Slicing
from keras_remat.errors import UnsupportedModelError


class BatchScaling:
    """Derives a train step's problem at any batch size, with whole ops.

    Args:
        problem: graph and profile at ``size``.
        other: the graph traced at ``other_size``.
        measured: profiles of the same ops measured at other sizes. Where two sizes are known, an
            op's costs are fitted to them (:mod:`keras_remat.batch_size.cost_fit`), else they are in
            proportion to the bytes it reads and writes.
        fixed_bytes: for each op, the bytes of workspace that are the same at every size, by its
            shapes; empty where they are not known.
        steps: the traces at ``size`` and ``other_size``. They know of kernels that are used only
            from some size on.

    Attributes:
        fit: the fitted costs with their residuals; ``None`` where one size alone was measured.
        slicing: ``None``, because the ops are whole.

    Raises:
        UnsupportedModelError: the two graphs do not have the same ops, so that other sizes cannot
            be derived.
    """

    slicing: Slicing | None = None

    def __init__(
        self,
        problem: Problem,
        size: int,
        other: Graph,
        other_size: int,
        measured: Mapping[int, Profile] | None = None,
        fixed_bytes: Sequence[int] = (),
        steps: tuple[TracedStep, TracedStep] | None = None,
    ):
        self._graphs, self._problem = GraphScaling(problem.graph, (size,)), problem
        self._fixed_bytes, self._steps = tuple(fixed_bytes), steps
        self._size, self._other_size = size, other_size
        self._late: tuple[int, Sequence[int]] = (size, ())  # workspace seen from this size on
        self._graphs.learn(other, (other_size,))
        if self._graphs.at((other_size,)) is None:
            raise UnsupportedModelError(
                f"The train step has {len(problem.graph.ops)} ops at batch {size} and "
                f"{len(other.ops)} at batch {other_size}, or other ones: "
                "its memory at another batch cannot be told from these two."
            )
        self.fit: CostFit | None = None
        self._measured: dict[int, Profile] = {}
        for at, profile in {size: problem.profile, **(measured or {})}.items():
            self._take(at, profile)

    @property
    def whole(self) -> BatchScaling:
        """Returns the scaling of the step with whole ops: this one."""
        return self

    def learn(self, size: int, problem: Problem) -> None:
        """Takes in the step's costs at another size, if measured and of the same ops."""
        if problem.graph.has_ops_of(self._problem.graph):
            self._take(size, problem.profile)

    @property
    def may_need_more(self) -> bool:
        """Returns whether ops make values of no bytes: an allocator that counts no small array may
        count them at larger sizes, as what a loop keeps."""
        values = self._problem.graph.values
        return any(value.producer is not None and not value.nbytes for value in values)

    def learn_trace(self, size: int, graph: Graph, expected: Sequence[int]) -> bool:
        """Takes in the step's own trace at a larger size.

        Args:
            graph: the step's graph.
            expected: bytes of workspace of each op, expected by its shapes.

        Returns:
            Whether its values need more than was derived. Then sizes are derived from it.
        """
        derived = self.at(size)
        if not graph.has_ops_of(derived.graph) or _bytes(graph) <= _bytes(derived.graph):
            return False
        own = self._graph(self._size)
        self._graphs = GraphScaling(own, (self._size,))
        self._graphs.learn(graph, (size,))
        self._problem = replace(derived, graph=graph)
        known = derived.profile.op_workspace_bytes
        self._late = size, [0 if k else e for k, e in zip(known, expected, strict=True)]
        return True

    def _take(self, size: int, profile: Profile) -> None:
        if profile.source != "measured":
            return
        if size >= self._late[0]:
            self._late = size, ()
        if not self._measured:  # costs in proportion start from a measured profile
            self._problem = Problem(self._graph(size), profile, name=self._problem.name)
        self._measured[size] = profile
        self.fit = CostFit(dict(self._measured)) if len(self._measured) > 1 else None

    def _graph(self, size: int) -> Graph:
        graph = self._graphs.at((size,))
        if graph is None:
            raise LookupError(f"nothing is known of a batch of {size}")
        return graph

    def at(self, size: int) -> Problem:
        """Returns the problem at a batch size.

        Bytes of values are exact; times and workspace are fitted or in proportion.
        """
        problem = transfer_costs(self._problem, self._graph(size))
        profile = problem.profile
        if self.fit is not None:
            times, workspaces = self.fit.op_time_s(size), self.fit.op_workspace_bytes(size)
            profile = replace(profile, op_time_s=times, op_workspace_bytes=workspaces)
        elif any(self.fixed_workspace_bytes):
            known = self._problem.profile.op_workspace_bytes
            workspaces = tuple(
                fixed + round((held - fixed) * scaled / held) if fixed else scaled
                for fixed, held, scaled in zip(
                    self.fixed_workspace_bytes, known, profile.op_workspace_bytes, strict=True
                )
            )
            profile = replace(profile, op_workspace_bytes=workspaces)
        late_size, late = self._late
        for expected in (self.expected_bytes(size), [-(-n * size // late_size) for n in late]):
            if expected and size not in self._measured:
                workspaces = tuple(map(max, profile.op_workspace_bytes, expected))
                profile = replace(profile, op_workspace_bytes=workspaces)
        return replace(problem, profile=profile)

    def expected_bytes(self, size: int) -> Sequence[int]:
        """Returns the expected workspace of each op at a batch size, in bytes, by its shapes.

        It is empty where no kernels are known that are used only from some size on.
        """
        if self._steps is None:
            return ()
        step, other = self._steps
        share = Fraction(size - self._size, self._other_size - self._size)
        return step.workspaces_towards(other, share)

    @property
    def fixed_workspace_bytes(self) -> tuple[int, ...]:
        """Returns for each op the bytes of workspace that are the same at every size.

        They follow from two measured sizes, or else from the op's shapes.
        """
        if self.fit is not None:
            return self.fit.op_workspace_bytes(0)
        known = self._problem.profile.op_workspace_bytes
        told = self._fixed_bytes or (0,) * len(known)
        return tuple(min(pair) for pair in zip(told, known, strict=True))


def _bytes(graph: Graph) -> int:
    return sum(value.nbytes for value in graph.values)


def batch_scaling(
    backend: Backend,
    model: Any,
    problem: Problem,
    batch: Any,
    measured: Mapping[int, Profile] | None = None,
    traced: TracedStep | None = None,
) -> BatchScaling:
    """Traces the step at another size and returns the problem at any size.

    Args:
        problem: the problem at the size of ``batch``.
        measured: see :class:`BatchScaling`; not used where the step is derived from two larger
            traces instead.
        traced: the whole step at the size of ``batch``. With it, the shapes of two traces tell
            which workspace is the same at every size.

    Raises:
        UnsupportedModelError: no two of the sizes tried have the same ops.
    """
    size = batch_size_of(batch)
    step = traced_at(backend, model, batch, 2 * size)
    double = step.graph
    if not problem.graph.has_ops_of(double):
        # larger batches are what a search asks for, and they look like the larger trace
        quadruple = graph_at(backend, model, batch, 4 * size)
        if double.has_ops_of(quadruple):
            return BatchScaling(transfer_costs(problem, double), 2 * size, quadruple, 4 * size)
    if traced is None or not all(map(traced.graph.has_ops_of, (problem.graph, double))):
        return BatchScaling(problem, size, double, 2 * size, measured)  # may raise: ops differ
    fixed = fixed_bytes(backend, {size: traced, 2 * size: step})
    return BatchScaling(problem, size, double, 2 * size, measured, fixed, (traced, step))


def fixed_bytes(backend: Backend, steps: Mapping[int, TracedStep]) -> list[int]:
    """Returns for each op the bytes of workspace that are expected to be the same at every size.

    They follow from the workspace expected at two sizes.

    Args:
        steps: batch size → the step traced at it, for two sizes; of the same ops.
    """
    (size, step), (other, its) = steps.items()
    asked = [backend.estimated_profile(of, 0).op_workspace_bytes for of in (step, its)]
    pairs = zip(*asked, strict=True)
    return [max(0, (a * other - b * size) // (other - size)) for a, b in pairs]


def graph_at(backend: Backend, model: Any, batch: Any, size: int) -> Graph:
    """Returns the graph of the train step at another batch size; see :func:`traced_at`."""
    return traced_at(backend, model, batch, size).graph


def traced_at(backend: Backend, model: Any, batch: Any, size: int) -> TracedStep:
    """Traces the train step at another batch size.

    Raises:
        UnsupportedModelError: the model cannot take a batch of that size.
    """
    try:
        return backend.trace(model, backend.resized_spec(batch, size))
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever the layers of a user's model raise
        fixed = fixed_batch(model)
        if fixed is not None:
            raise UnsupportedModelError(
                f"The model takes batches of {fixed[1][0]} samples only: its input {fixed[0]!r} "
                f"has the fixed shape {fixed[1]}. make_plan says what it needs."
            ) from error
        raise UnsupportedModelError(
            f"The model takes no batch of {size} samples: {type(error).__name__}: {error}"
        ) from error
