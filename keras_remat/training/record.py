"""Records what is known of a ``fit``; frozen, and made anew by what is seen.

How batches of all shapes are trained in one way, which
:mod:`keras_remat.training.step_trainer` alone assigns, and which batch size trains, which
:mod:`keras_remat.training.batch_trainer` does. The record of one shape is in
:mod:`keras_remat.training.shape_state`, that of the ways in :mod:`keras_remat.training.contest`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from keras_remat.batch_size.climb import SizeClimb
from keras_remat.batch_size.found import BatchSearch
from keras_remat.batch_size.scaling import BatchScaling
from keras_remat.planning.plan import Plan
from keras_remat.training.phases import Phase
from keras_remat.training.shape_state import (
    Costs,
    Known,
    PlannedShape,
    Recording,
    ShapeState,
    Signature,
    is_within,
)

#: Steps of one size whose median time is compared with another size's.
COMPARED_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class StepsRecord:
    """Says how batches of all shapes are trained.

    Args:
        shapes: signature → how its batches are trained.
        reference: the shape that training is about; ``None`` before the first batch of one.
        shown: the shape whose plan is in force: the reference, or the one before it.
        expected: what is known of a reference that has not come yet.
        traced_ops: how many ops the newest step that was traced has; 0 before.
    """

    shapes: Mapping[Signature, ShapeState] = field(default_factory=dict)
    reference: Signature | None = None
    shown: Signature | None = None
    expected: Known = field(default_factory=Known)
    traced_ops: int = 0

    # ---------------------------------------------------------------- what was seen

    def with_shape(self, shape: ShapeState) -> Self:
        """Returns the record where a shape is trained so from now on."""
        shown = shape.signature if self.reference is None else self.shown
        return replace(self, shapes={**self.shapes, shape.signature: shape}, shown=shown)

    def after_batch(self, key: Signature, *, may_miss: bool) -> Self:
        """Returns the record after a batch of a shape has come: the longest of the reference's size
        is what training is about."""
        shape = self.shapes[key]
        reference = self.reference or key
        is_same_size = shape.batch_size == self.shapes[reference].batch_size
        if is_same_size and is_within(reference, key):
            reference = key
        shape = replace(shape, terms=replace(shape.terms, may_miss=may_miss))
        shapes = {**self.shapes, key: shape}
        return replace(self, shapes=shapes, reference=reference, shown=reference)

    def after_trace(self, costs: Costs) -> Self:
        """Returns the record after a step was traced."""
        return replace(self, traced_ops=len(costs.problem.graph.ops))

    def expecting(self, known: Known) -> Self:
        """Returns the record where the next batch's shape is the reference."""
        return replace(self, reference=None, expected=known)

    # ---------------------------------------------------------------- what is asked

    @property
    def reference_shape(self) -> ShapeState | None:
        """How the shape that training is about is trained."""
        return None if self.reference is None else self.shapes[self.reference]

    @property
    def plan(self) -> Plan | None:
        """The plan in force; ``None`` while Keras's own step runs."""
        shape = None if self.shown is None else self.shapes[self.shown]
        return shape.plan if isinstance(shape, PlannedShape) else None

    @cached_property
    def is_settled(self) -> bool:
        """Whether the steps of all shapes are final."""
        phases = {shape.phase for shape in self.shapes.values()}
        return self.reference is not None and phases == {Phase.FINAL}

    def settled_shape(self, key: Signature, *, may_miss: bool) -> PlannedShape | None:
        """Returns a shape whose step is final under a plan, as all others are; ``None`` where
        something is to be found out."""
        shape = self.shapes.get(key)
        if not (isinstance(shape, PlannedShape) and shape.called and self.is_settled):
            return None
        return shape if shape.terms.may_miss == may_miss else None

    def recorded_beside(self, key: Signature) -> tuple[Recording, ...]:
        """Returns the shapes but one whose steps are being recorded."""
        shapes = (shape for other, shape in self.shapes.items() if other != key)
        return tuple(one for one in shapes if isinstance(one, Recording) and one.started)


@dataclass(frozen=True, kw_only=True)
class SizesRecord:
    """Says which batch size trains, and what is known of others.

    Args:
        is_searching: whether a larger batch is still to be searched.
        loader: samples of the loader's first batch; 0 before it.
        chosen: samples of a step; ``None`` trains the loader's batches as they come.
        largest: the most samples of a step since that was chosen.
        epoch_samples: of the loader's batches, since the epoch began.
        other_samples: of those, what came in batches of another size than the first.
        step_s: seconds of the newest steps of this size that are final.
        samples_per_s: size → what it measured, of those that are compared.
        search: what the search for a larger batch found, once there was one.
        scaling: costs at any size, once they were searched.
        climb: chooses the sizes that run; ``None`` while no other size is looked for.
        held_bytes: what lies beside a step of joined batches.
        has_warned: whether it was said what a larger batch means for the training.
        has_changed: whether a step was not what Keras would have run, since the epoch began.
    """

    is_searching: bool
    loader: int = 0
    chosen: int | None = None
    largest: int = 0
    epoch_samples: int = 0
    other_samples: int = 0
    step_s: tuple[float, ...] = ()
    samples_per_s: Mapping[int, float] = field(default_factory=dict)
    search: BatchSearch | None = None
    scaling: BatchScaling | None = None
    climb: SizeClimb | None = None
    held_bytes: int = 0
    has_warned: bool = False
    has_changed: bool = False

    @property
    def size(self) -> int:
        """The samples of a step."""
        return self.chosen or self.loader

    @property
    def is_looking(self) -> bool:
        """Whether another size is looked for."""
        return self.is_searching or self.climb is not None

    @property
    def mostly_others(self) -> bool:
        """Whether most samples of the epoch came in batches of another size than the first."""
        return 2 * self.other_samples > self.epoch_samples

    def after_arrival(self, samples: int) -> Self:
        """Returns the record after a batch of the loader's has come."""
        other = samples if samples != self.loader else 0
        return replace(
            self,
            epoch_samples=self.epoch_samples + samples,
            other_samples=self.other_samples + other,
        )

    def after_step(self, samples: int, *, changed: bool, final_s: float | None) -> Self:
        """Returns the record after a step.

        Args:
            changed: whether it was not what Keras would have run.
            final_s: its seconds, where its size is the one that trains and its step is final.
        """
        step_s = self.step_s if final_s is None else (*self.step_s, final_s)[-COMPARED_STEPS:]
        largest, changed = max(self.largest, samples), self.has_changed or changed
        return replace(self, largest=largest, has_changed=changed, step_s=step_s)

    def in_new_epoch(self) -> Self:
        """Returns the record of an epoch that begins."""
        return replace(self, has_changed=False, epoch_samples=0, other_samples=0)

    def with_size(self, new: int) -> Self:
        """Returns the record where so many samples are a step from here on."""
        chosen = None if new == self.loader else new
        return replace(self, chosen=chosen, largest=0, step_s=())

    def for_new_steps(self, *, is_searching: bool) -> Self:
        """Returns the record where nothing is known of steps and sizes any more."""
        return replace(
            self.with_size(self.loader),
            is_searching=is_searching,
            samples_per_s={},
            search=None,
            scaling=None,
            climb=None,
            largest=self.largest,
        )
