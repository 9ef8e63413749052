"""Holds all that is known of a ``fit`` in frozen records; every step makes a new one.

:class:`FitRecord` holds the others, and :mod:`keras_remat.training.driver` alone assigns it. The
record of one shape is in :mod:`keras_remat.training.shape_state`, that of the modes that compete in
:mod:`keras_remat.training.contest`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from keras_remat.batch_size.found import BatchSearch
from keras_remat.batch_size.size_chooser import SizeChooser
from keras_remat.batch_size.step_scaling import Scaling
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Usage
from keras_remat.planning.plan import Plan
from keras_remat.training.arguments import FitOptions
from keras_remat.training.baseline import Baseline
from keras_remat.training.contest import Contest
from keras_remat.training.decide import Phase
from keras_remat.training.grouping import HeldBatches
from keras_remat.training.shape_state import (
    Costs,
    PlannedShape,
    PriorPlans,
    Recording,
    ShapeState,
    Signature,
    TracedShape,
    is_within,
)

#: Number of steps of one size whose median time is compared with another size's.
COMPARED_STEPS = 5


@dataclass(frozen=True)
class Mode:
    """Names how batches are trained: by which backend's steps, in how many micro-batches.

    Args:
        at: index of the backend among those that can train the model, from 0 on.
        micro_batches: number of micro-batches that a batch is to be trained in.
        plain_may_run: ``False`` where it is known that Keras's own step does not fit.
        is_on_trial: whether another mode keeps to the limit, so that solving is worth little time.
    """

    at: int
    micro_batches: int
    plain_may_run: bool = True
    is_on_trial: bool = False


@dataclass(frozen=True, kw_only=True)
class StepsRecord:
    """Says how batches of all shapes are trained in one mode.

    Args:
        shapes: signature → how its batches are trained.
        reference: signature of the main shape; ``None`` before its first batch.
        shown: signature of the shape whose plan is in force: the reference, or the one before it.
        expected: plans and costs known for a reference that has not come yet.
    """

    shapes: Mapping[Signature, ShapeState] = field(default_factory=dict)
    reference: Signature | None = None
    shown: Signature | None = None
    expected: PriorPlans = field(default_factory=PriorPlans)

    # ---------------------------------------------------------------- what was seen

    def with_shape(self, shape: ShapeState) -> Self:
        """Returns the record where a shape is trained so from now on."""
        shown = shape.signature if self.reference is None else self.shown
        return replace(self, shapes={**self.shapes, shape.signature: shape}, shown=shown)

    def after_batch(self, key: Signature, size: int, *, allow_over_limit: bool) -> Self:
        """Returns the record after a batch of a shape has come.

        The longest shape of the size in force becomes the reference.

        Args:
            size: samples of a full step, which a rest has fewer of; 0 where no size is in force.
        """
        shape, reference = self.shapes[key], self.reference
        if reference is None:
            reference = key if size in (0, shape.batch_size) else None
        elif shape.batch_size == self.shapes[reference].batch_size and is_within(reference, key):
            reference = key
        shape = replace(
            shape, constraints=replace(shape.constraints, allow_over_limit=allow_over_limit)
        )
        shapes = {**self.shapes, key: shape}
        return replace(self, shapes=shapes, reference=reference, shown=reference or self.shown)

    def expecting(self, known: PriorPlans) -> Self:
        """Returns the record where the next batch's shape is the reference."""
        return replace(self, reference=None, expected=known)

    # ---------------------------------------------------------------- what is asked

    @property
    def reference_shape(self) -> ShapeState | None:
        """Returns how the reference shape is trained; ``None`` before there is one."""
        return None if self.reference is None else self.shapes[self.reference]

    @property
    def plan(self) -> Plan | None:
        """Returns the plan in force; ``None`` while Keras's own step runs."""
        shape = None if self.shown is None else self.shapes[self.shown]
        return shape.plan if isinstance(shape, PlannedShape) else None

    @property
    def is_final(self) -> bool:
        """Returns whether the reference shape's step is final."""
        shape = self.reference_shape
        return shape is not None and shape.phase is Phase.FINAL

    @property
    def settled_usage(self) -> Usage:
        """Returns the usage that the newest steps of the reference shape measured.

        Raises:
            LookupError: the shape's step is not final.
        """
        shape = self.reference_shape
        if shape is None or shape.phase is not Phase.FINAL:
            raise LookupError("the step is not final")
        return shape.measured

    @property
    def costs(self) -> Costs | None:
        """Returns the reference shape's traced step and its costs, measured once there are any;
        ``None`` where the step was not traced."""
        shape = self.reference_shape
        return shape.costs if isinstance(shape, TracedShape) else None

    @property
    def problem(self) -> Problem | None:
        """Returns the problem of :attr:`costs`."""
        return None if self.costs is None else self.costs.problem

    @property
    def batch_size(self) -> int:
        """Returns the samples of a batch of the reference shape; 0 before there is one."""
        shape = self.reference_shape
        return 0 if shape is None else shape.batch_size

    @cached_property
    def is_settled(self) -> bool:
        """Returns whether the steps of all shapes are final."""
        phases = {shape.phase for shape in self.shapes.values()}
        return self.reference is not None and phases == {Phase.FINAL}

    def recorded_beside(self, key: Signature) -> tuple[Recording, ...]:
        """Returns the shapes other than ``key`` whose steps are being recorded."""
        shapes = (shape for other, shape in self.shapes.items() if other != key)
        return tuple(one for one in shapes if isinstance(one, Recording) and one.started)


@dataclass(frozen=True, kw_only=True)
class SizesRecord:
    """Says which batch size trains, and holds the measurements of others.

    Args:
        is_searching: whether a larger batch is still to be searched.
        loader: samples of the loader's first batch; 0 before it.
        chosen: samples of a step; ``None`` trains the loader's batches as they come.
        largest: most samples of a step since ``chosen`` was set.
        epoch_samples: samples of the loader's batches since the epoch began.
        other_samples: those of them that came in batches of another size than the first.
        step_s: seconds of the newest final steps of this size.
        samples_per_s: size → measured samples per second, for the sizes that are compared.
        search: result of the search for a larger batch, once there was one.
        scaling: costs at any size, once they were searched.
        chooser: chooses the sizes that run; ``None`` while no other size is looked for.
        held_bytes: bytes that lie beside a step of joined batches.
        has_warned: whether the user was told what a larger batch means for the training.
        has_changed: whether a step since the epoch began was not the one that Keras would have run.
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
    scaling: Scaling | None = None
    chooser: SizeChooser | None = None
    held_bytes: int = 0
    has_warned: bool = False
    has_changed: bool = False

    @property
    def size(self) -> int:
        """Returns the samples of a step."""
        return self.chosen or self.loader

    @property
    def is_looking(self) -> bool:
        """Returns whether another size is looked for."""
        return self.is_searching or self.chooser is not None

    @property
    def mostly_others(self) -> bool:
        """Returns whether most samples of the epoch came in batches of another size than the
        first."""
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
            changed: whether the step was not the one that Keras would have run.
            final_s: seconds of the step, where its size is the one that trains and it is final.
        """
        step_s = self.step_s if final_s is None else (*self.step_s, final_s)[-COMPARED_STEPS:]
        largest, changed = max(self.largest, samples), self.has_changed or changed
        return replace(self, largest=largest, has_changed=changed, step_s=step_s)

    def in_new_epoch(self, *, has_plan: bool) -> Self:
        """Returns the record of an epoch that begins, whose first step may be under a plan."""
        return replace(self, has_changed=has_plan, epoch_samples=0, other_samples=0)

    def with_size(self, new: int) -> Self:
        """Returns the record where a step has ``new`` samples from here on."""
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
            chooser=None,
            largest=self.largest,
        )


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Holds what the steps of a ``fit`` have shown of its device, in whichever mode they ran.

    Args:
        copy_s: seconds that copying the model's state to the host took; ``None`` before the first
            copy.
        step_s: seconds of the newest step that was waited for.
        after_plain: whether the last step was Keras's own, not one under a plan.
        plain_seen: compilation → the predicted activation bytes of the largest measured plain step,
            and the ratio of its measured bytes to these. Predictions differ between compilations.
    """

    copy_s: float | None = None
    step_s: float = 0.0
    after_plain: bool = True
    plain_seen: Mapping[str, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class SetUp:
    """Says how long set-up took before the first plan trained.

    Args:
        spent_s: seconds that it took.
        limit_s: seconds after which no plan was improved any more.
    """

    spent_s: float
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class FitRecord:
    """Holds all that is known of a ``fit``.

    Args:
        contest: which mode trains, and the results of others.
        steps: mode → how it trains, for the modes that train.
        sizes: which batch size trains, and the measurements of others.
        held: samples that wait for a later step.
        device: what steps have shown of the device.
        baseline: the usage of Keras's own step.
        setup: how long set-up took; ``None`` before a plan has trained.
        lowered_limit: the limit in force where it was lowered; ``None`` while the one asked for is
            in force.
        logs: logs of the newest step.
    """

    contest: Contest[Mode]
    sizes: SizesRecord
    steps: Mapping[Mode, StepsRecord] = field(default_factory=dict)
    held: HeldBatches = field(default_factory=HeldBatches)
    device: DeviceFacts = field(default_factory=DeviceFacts)
    baseline: Baseline = field(default_factory=Baseline)
    setup: SetUp | None = None
    lowered_limit: Limit | None = None
    logs: Any = None

    def of(self, mode: Mode) -> StepsRecord:
        """Returns how a mode trains."""
        return self.steps.get(mode) or StepsRecord()

    @property
    def mode(self) -> Mode:
        """Returns the mode that is in force, or on trial."""
        return self.contest.running

    @property
    def running(self) -> StepsRecord:
        """Returns how the mode that is in force, or on trial, trains."""
        return self.of(self.contest.running)

    @property
    def is_settled(self) -> bool:
        """Returns whether the reference shape's step is final, and no other is on trial."""
        return self.contest.trial is None and self.running.is_final

    @property
    def trains_as_given(self) -> bool:
        """Returns whether batches are trained as they come, and no other size is looked for."""
        sizes = self.sizes
        return sizes.chosen is None and not sizes.is_looking and not self.held.samples

    def with_steps(self, mode: Mode, steps: StepsRecord) -> Self:
        """Returns the record where a mode trains so from now on."""
        return replace(self, steps={**self.steps, mode: steps})

    def with_shape(self, mode: Mode, shape: ShapeState) -> Self:
        """Returns the record where a mode trains a shape so from now on."""
        return self.with_steps(mode, self.of(mode).with_shape(shape))

    def in_contest(self, contest: Contest[Mode]) -> Self:
        """Returns the record with a new contest; modes that train no more are dropped."""
        kept = {mode: steps for mode, steps in self.steps.items() if mode in contest.sides}
        return replace(self, contest=contest, steps=kept)


def begun(options: FitOptions, backends: int) -> FitRecord:
    """Returns the record of a ``fit`` that begins, which knows nothing.

    Args:
        backends: number of backends that can train the model.
    """
    contest = Contest(
        running=Mode(0, options.micro_batches),
        modes_left=backends - 1,
        chooses_micro_batches=options.chooses_micro_batches,
    )
    return FitRecord(contest=contest, sizes=SizesRecord(is_searching=options.batch_size != "keep"))
