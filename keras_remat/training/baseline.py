"""Records the usage of Keras's own step: measured where it runs, predicted where it cannot.

Under a plan, the plain step's time is the measured time less that of the recomputed ops. This
ignores that the plain step runs independent ops in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal, Self

from keras_remat.core.schedule import Usage
from keras_remat.planning.plan import Plan
from keras_remat.training.decide import Phase
from keras_remat.training.shape_state import PlainShape, PlannedShape, ShapeState, Signature

#: How a step is trained: how it is compiled, and in how many micro-batches.
TrainedBy = tuple[str, int]

#: Number of an epoch's newest steps whose median predicts the plain step's time.
_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Holds the time and peak of the plain step.

    A predicted time follows the plan's steps from epoch to epoch: a device that slows down would
    slow the plain step down, too. Where a ``fit`` trains in several modes, each has its own plan,
    and all of them predict the same plain step.

    Args:
        usage: seconds and peak of the plain step; ``None`` before anything is known.
        batch_size: samples of that step.
        shape: signature of the shape whose steps define the baseline.
        shares: mode → seconds of a plain step, over those of a step of the mode's plan.
        plain_s: seconds of a plain step as predicted from each of the epoch's newest steps.
    """

    usage: Usage | None = None
    source: Literal["measured", "predicted"] | None = None
    batch_size: int | None = None
    shape: Signature | None = None
    shares: Mapping[TrainedBy, float] = field(default_factory=dict)
    plain_s: tuple[float, ...] = ()

    def after_step(
        self,
        before: ShapeState,
        after: ShapeState,
        reference: Signature,
        compilation: str,
        plain_peak_bytes: Callable[[PlainShape], int],
    ) -> Self:
        """Returns the baseline after a step was trained.

        Args:
            before: the shape, right after the step.
            after: the shape after the move that followed.
            reference: signature of the main shape. The first shape measured defines the baseline.
            compilation: how the step is compiled.
            plain_peak_bytes: returns the peak of a plain step that was measured.
        """
        if before.signature != (self.shape or reference) or not before.steps:
            return self
        if isinstance(before, PlainShape) and before.phase in (Phase.PLAIN, Phase.VERIFY):
            return replace(
                self,
                usage=replace(before.measured, peak_bytes=plain_peak_bytes(before)),
                source="measured",
                batch_size=before.batch_size,
                shape=before.signature,
            )
        if before.phase is Phase.FINAL:
            return self.after_planned(before.steps[-1].time_s, _mode(compilation, before))
        if isinstance(after, PlannedShape) and after.phase is Phase.FINAL:
            mode, time_s = _mode(compilation, after), after.measured.time_s
            told = replace(self, shape=after.signature)
            return told.predicting(after.plan, after.batch_size, time_s, mode)
        return self

    def predicting(self, plan: Plan, batch_size: int, time_s: float, mode: TrainedBy) -> Self:
        """Returns the baseline predicted from a plan whose steps took ``time_s`` seconds.

        Later steps refine it. A measured baseline is kept. Where the plan trains in micro-batches,
        an earlier prediction is kept, too: a plan for the whole batch predicts a plain step better.
        """
        (_, micro_batches), known = mode, self.usage
        if self.source == "measured":
            return self
        if micro_batches > 1 and known is not None and time_s > 0:
            return replace(self, shares={**self.shares, mode: known.time_s / time_s}, plain_s=())
        predicted_s = plan.predicted.time_s
        share = plan.store_all.time_s / predicted_s if predicted_s > 0 else 1.0
        return replace(
            self,
            usage=Usage(share * time_s, plan.store_all.peak_bytes),
            source="predicted",
            batch_size=batch_size,
            shares={**self.shares, mode: share},
            plain_s=(),
        )

    def in_new_epoch(self) -> Self:
        """Returns the baseline of a new epoch, whose steps alone predict the plain step's time."""
        return replace(self, plain_s=())

    def after_planned(self, time_s: float, mode: TrainedBy) -> Self:
        """Returns the baseline after one more step of the plan that predicts it."""
        if self.source != "predicted" or self.usage is None or mode not in self.shares:
            return self
        plain_s = (*self.plain_s, self.shares[mode] * time_s)[-_STEPS:]
        return replace(self, usage=replace(self.usage, time_s=median(plain_s)), plain_s=plain_s)


def _mode(compilation: str, shape: ShapeState) -> TrainedBy:
    return compilation, shape.costs.micro_batches if isinstance(shape, PlannedShape) else 1
