"""Predicts a batch shape from those seen so far: a sequence length, an epoch's last batch.

One model's train step is the same at every shape. So its bytes at a shape that was never traced are
known from a few that were (:class:`~keras_remat.batch_size.graph_scaling.GraphScaling`), an order
found for one shape runs at others, and costs that were measured at one predict those at all. Where
Keras's own step fits by prediction, nothing is traced, and where a known order fits, nothing is
solved.
"""

from __future__ import annotations

from collections.abc import Mapping

from keras_remat.backends.base import TracedStep
from keras_remat.batch_size.cost_fit import transfer_costs
from keras_remat.batch_size.graph_scaling import GraphScaling
from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.training.decide import Phase
from keras_remat.training.shape_state import (
    Costs,
    PlainShape,
    PlannedShape,
    PriorPlans,
    ShapeState,
    Signature,
    TracedShape,
    is_within,
)

#: The shapes seen so far.
Shapes = Mapping[Signature, ShapeState]


class ShapeFamily:
    """Predicts the shapes of one ``fit`` and backend from those seen so far."""

    def __init__(self) -> None:
        # by ranks and dtypes, with the step whose ops they are
        self._scalings: dict[tuple[object, ...], tuple[GraphScaling, TracedStep]] = {}

    def learn(self, signature: Signature, costs: Costs) -> None:
        """Takes in the trace of a shape."""
        if not costs.is_whole:
            return
        kind, sizes = _kind_and_sizes(signature)
        graph = costs.problem.graph
        if kind not in self._scalings:
            self._scalings[kind] = GraphScaling(graph, sizes), costs.traced
        else:
            self._scalings[kind][0].learn(graph, sizes)

    def costs_at(self, shapes: Shapes, signature: Signature) -> Costs | None:
        """Returns the costs of a shape that was not traced; ``None`` where they are not known.

        Their traced step is another shape's.
        """
        kind, sizes = _kind_and_sizes(signature)
        if kind not in self._scalings:
            return None
        scaling, traced = self._scalings[kind]
        graph, seen = scaling.at(sizes), _costs(shapes, signature)
        if graph is None or not seen:
            return None
        return Costs(traced=traced, problem=transfer_costs(seen[0], graph))

    def known(self, shapes: Shapes, signature: Signature) -> PriorPlans:
        """Returns the plans that run at other shapes, and the costs that were seen there."""
        plans = tuple(
            (shape.plan, shape.costs.problem.graph, _first_phase(shape))
            for shape in shapes.values()
            if isinstance(shape, PlannedShape)
            and shape.costs.is_whole
            and shape.signature != signature
        )
        return PriorPlans(plans=plans, costs=_costs(shapes, signature), is_family=True)

    def profiles_by_size(
        self, shapes: Shapes, signature: Signature, graph: Graph
    ) -> dict[int, Profile]:
        """Returns the profiles of a graph's ops that were measured where batches differ from this
        one in their number of samples alone."""
        return {
            shape.batch_size: shape.costs.problem.profile
            for shape in shapes.values()
            if shape.signature != signature
            and _sample_of(shape.signature) == _sample_of(signature)
            and isinstance(shape, PlannedShape)
            and shape.costs.is_whole
            and shape.costs.problem.profile.source == "measured"
            and shape.costs.problem.graph.has_ops_of(graph)
        }

    def is_within_plain(self, shapes: Shapes, signature: Signature) -> bool:
        """Returns whether a batch is nowhere larger than one whose plain step fits."""
        return any(
            isinstance(shape, PlainShape)
            and not shape.tries.plain_ruled_out
            and is_within(signature, shape.signature)
            for shape in shapes.values()
        )


def _costs(shapes: Shapes, signature: Signature) -> tuple[Problem, ...]:
    """Returns the best known costs: measured ones first, then those of the largest shape."""
    problems = [
        shape.costs.problem
        for shape in shapes.values()
        if isinstance(shape, TracedShape) and shape.costs.is_whole and shape.signature != signature
    ]
    problems.sort(key=lambda p: (p.profile.source != "measured", -p.graph.input_bytes))
    return tuple(problems[:1])


def _kind_and_sizes(signature: Signature) -> tuple[tuple[object, ...], tuple[int, ...]]:
    """Returns a signature's kind, which is one for a whole family, and its sizes, which vary."""
    kind = tuple(leaf and (len(leaf[0]), *leaf[1:]) for leaf in signature)
    return kind, tuple(size for leaf in signature if leaf is not None for size in leaf[0])


def _sample_of(signature: Signature) -> tuple[object, ...]:
    """Returns a signature without the number of samples."""
    return tuple(leaf and (leaf[0][1:], *leaf[1:]) for leaf in signature)


def _first_phase(shape: PlannedShape) -> Phase:
    """Returns the phase that another shape begins in under this one's order.

    Until this shape is recorded, its order comes from estimates. It is then to be made again, by
    whichever shape is recorded first.
    """
    is_first = shape.phase in (Phase.WARM_UP, Phase.RECORD, Phase.SOLVE)
    return Phase.WARM_UP if is_first else Phase.VERIFY
