"""Answers for one model's train step whether it fits cards, with a row for each card.

The process of :mod:`keras_remat.cards.process` runs this. The step is traced once for all cards on
which XLA sees the same ops, and compiled without recomputation for each. The compiler's peak for
that step decides the verdict. A plan is made, and compiled, only where the plain step does not fit:
of whole ops, or with some ops in slices of the batch, as ``fit`` would. The largest batches are
predicted from these.

Compiling is the compiler's time and searching is Python's, so the next card's step is compiled in a
thread while batches are searched for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

from keras_remat.backends.base import Backend, TracedStep, Whole
from keras_remat.backends.batches import batch_bytes, batch_size_of
from keras_remat.batch_size.scaling import BatchScaling, batch_scaling, graph_at
from keras_remat.batch_size.search import search_batch_size
from keras_remat.batch_size.step_scaling import Scaling, scaling_in_slices
from keras_remat.cards.breakdown import activations_by_layer, parts_at_peak
from keras_remat.cards.report import DOES_NOT_FIT, FITS, WITH_A_PLAN, CardRow
from keras_remat.core.graph import Graph
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.target import Target
from keras_remat.errors import BudgetError, UnsupportedModelError
from keras_remat.planning.calibrated_solve import least_over_budget
from keras_remat.planning.plan import Plan
from keras_remat.planning.request import PlanRequest, plan_for
from keras_remat.planning.slicing import plan_in_slices


@dataclass(frozen=True)
class RowOptions:
    """Divides the time for one card.

    Args:
        plan_share, smallest_share, search_share: shares of a card's seconds for solving for a plan,
            for finding the smallest peak where there is no plan, and for searching for the largest
            batch, a third of which is counted as work.
        sliced_share: share of a card's seconds for each try of some ops in slices.
        least_smallest_s: least seconds for finding the smallest peak.
        ahead: number of cards whose steps are written down before the first answer is waited for.
    """

    plan_share: float = 0.5
    smallest_share: float = 0.25
    search_share: float = 0.75
    sliced_share: float = 0.25
    least_smallest_s: float = 5.0
    ahead: int = 2


_OPTIONS = RowOptions()


class CardBackend(Backend, Protocol):
    """Is a backend that compiles for cards that need not be there."""

    def taken_over(self, traced: Any) -> TracedStep | None:
        """Returns a step that was traced for another card as a step for this one; ``None`` where
        XLA treats its ops differently here."""

    def written_plain(self, problem: Problem) -> Callable[[], None]:
        """Writes Keras's own step down; returns a function that compiles it, in any thread."""


@dataclass(frozen=True)
class _Begun:
    """Stands for a card whose step is being compiled.

    Args:
        row: the card's row, as far as it is known.
        limit: the limit that the step has to keep to.
        backend: the backend that compiles for the card.
        traced: the step.
        problem: the step with its costs on the card.
        compiled: a future that is done when Keras's own step is compiled.
        sliced: what the step in slices was made from, where it fits in slices alone; ``None`` where
            it fits whole, does not fit at all, or that is not known.
    """

    row: CardRow
    limit: Limit
    backend: CardBackend
    traced: TracedStep
    problem: Problem
    compiled: Future[None]
    sliced: Whole | None = None


class AskedStep:
    """Holds a train step that cards are asked about.

    Args:
        model: a compiled model.
        batch: arrays, specs or a batch size.
        backend_of: function that makes the backend for a card, on the framework that Keras runs on.
        margin: share of a card's usable memory that is kept free.
        time_limit_s: seconds of solving for each card, compiling not counted.
        seed: seed of the solver's random choices.

    Attributes:
        layers: layer → bytes of its activations at the plain peak; empty before the first card.
    """

    def __init__(
        self,
        model: Any,
        batch: Any,
        backend_of: Callable[[Target], CardBackend],
        *,
        margin: float,
        time_limit_s: float,
        seed: int,
    ):
        self._model, self._batch, self._backend_of = model, batch, backend_of
        self._train_step = model.train_step  # JAX finds its trace for as long as this lives
        self._margin, self._time_limit_s, self._seed = margin, time_limit_s, seed
        self._traced: list[TracedStep] = []  # one for all cards on which XLA sees the same ops
        self._doubled: dict[str, Graph] = {}  # by fingerprint: the same step, of twice the batch
        self.layers: dict[str, int] = {}

    def rows(self, targets: Sequence[Target], tell: Callable[[CardRow], None]) -> Iterator[CardRow]:
        """Yields the rows of cards.

        Args:
            targets: the cards.
            tell: function that is called with a row as soon as its verdict is known.

        Raises:
            UnsupportedModelError: the step cannot be traced.
        """
        with ThreadPoolExecutor(1) as compiler:
            begun = [self._begin(target, compiler) for target in targets[: _OPTIONS.ahead]]
            for at in range(len(targets)):
                judged = self._early(begun[at])
                if judged.row.verdict is not None:
                    tell(judged.row)
                if at + _OPTIONS.ahead < len(targets):  # after the answer that is ready
                    begun.append(self._begin(targets[at + _OPTIONS.ahead], compiler))
                yield judged.row if judged.row.verdict is None else self._with_batches(judged)

    def _begin(self, target: Target, compiler: ThreadPoolExecutor) -> _Begun:
        """Starts to compile Keras's own step for a card, in another thread."""
        backend = self._backend_of(target)
        usable = target.usable_bytes or target.total_bytes or 0
        row = CardRow(
            card=target.name,
            usable_bytes=usable,
            plain_bytes=None,
            verdict=None,
            remark=backend.check(self._model) or "",
        )
        traced, problem = self._on(backend)
        compiled = compiler.submit(backend.written_plain(problem))
        return _Begun(row, Limit(usable, self._margin), backend, traced, problem, compiled)

    def _early(self, begun: _Begun) -> _Begun:
        """Returns ``begun`` with the verdict in its row, or with the compiler's refusal as the
        remark."""
        try:
            begun.compiled.result()
            judged = self._judged(begun)
        except (RuntimeError, UnsupportedModelError) as error:  # whatever a compiler raises
            told = str(error).strip().splitlines() or [type(error).__name__]
            remark = f"The compiler does not take it: {told[0][:200]}"
            return replace(begun, row=replace(begun.row, remark=remark))
        if not self.layers:
            self.layers = activations_by_layer(begun.problem)
        return judged

    def _on(self, backend: CardBackend) -> tuple[TracedStep, Problem]:
        """Returns the step, and its costs on the card that a backend compiles for."""
        taken = (backend.taken_over(traced) for traced in self._traced)
        traced = next((step for step in taken if step is not None), None)
        if traced is None:
            self._batch = backend.example_batch(self._model, self._batch)
            traced = backend.trace(self._model, self._batch)
            self._traced.append(traced)
        profile = backend.estimated_profile(traced)
        return traced, Problem(traced.graph, profile, name=self._model.name)

    def _judged(self, begun: _Begun) -> _Begun:
        """Returns ``begun`` with the verdict in its row, and the numbers that it rests on."""
        row, backend, problem, limit = begun.row, begun.backend, begun.problem, begun.limit
        store_all = Schedule.store_all(problem.graph)
        plain_bytes = backend.memory.peak_bytes(problem, store_all)
        plain_s = problem.store_all_time_s
        samples = batch_size_of(self._batch)

        def rate(seconds: float) -> float | None:
            return samples / seconds if seconds > 0 else None

        row = replace(
            row,
            plain_bytes=plain_bytes,
            samples_per_s_plain=rate(plain_s),
            parts=parts_at_peak(problem, *self._resident_bytes()),
        )
        if limit.fits(plain_bytes):
            row = replace(row, verdict=FITS, overhead=0.0, samples_per_s_planned=rate(plain_s))
            return replace(begun, row=row)
        try:
            traced, plan = self._plan(begun, samples)
        except BudgetError as error:
            smallest = self._smallest_bytes(error, backend, problem, limit)
            return replace(begun, row=replace(row, verdict=DOES_NOT_FIT, smallest_bytes=smallest))
        time_s = (plan.compiled or plan.predicted).time_s
        row = replace(
            row,
            verdict=WITH_A_PLAN,
            overhead=time_s / plain_s - 1 if plain_s > 0 else 0.0,
            smallest_bytes=plan.predicted.peak_bytes,
            samples_per_s_planned=rate(time_s),
            slices=None if traced.slicing is None else traced.slicing.parts,
        )
        return replace(begun, row=row, sliced=traced.whole)

    def _plan(self, begun: _Begun, samples: int) -> tuple[TracedStep, Plan]:
        """Returns a plan that fits, with the step that it runs: in slices, where no plan of whole
        ops fits.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: neither fits.
        """
        backend = begun.backend
        request = PlanRequest.on(
            backend,
            problem=begun.problem,
            batch_size=samples,
            limit=begun.limit,
            seconds=_OPTIONS.plan_share * self._time_limit_s,
            seed=self._seed,
        )
        try:
            return begun.traced, plan_for(request)
        except BudgetError as error:
            seconds = _OPTIONS.sliced_share * self._time_limit_s
            traced, _, plan = plan_in_slices(
                begun.traced, replace(request, seconds=seconds), backend.estimated_profile, error
            )
        return traced, plan

    def _resident_bytes(self) -> tuple[int, int]:
        """Returns the bytes of the model's weights and of its optimizer's slots."""
        model = self._model
        weights = (
            *model.trainable_variables, *model.non_trainable_variables, *model.metrics_variables,
        )  # fmt: skip
        slots = model.optimizer.variables
        return batch_bytes([v.value for v in weights]), batch_bytes([v.value for v in slots])

    def _smallest_bytes(
        self, failure: BudgetError, backend: Backend, problem: Problem, limit: Limit
    ) -> int | None:
        """Returns the least peak of a schedule that was found; ``None`` without one."""
        if failure.best_peak_bytes is not None:
            return failure.best_peak_bytes
        seconds = max(_OPTIONS.least_smallest_s, _OPTIONS.smallest_share * self._time_limit_s)
        try:
            least = least_over_budget(
                problem, limit.usable_bytes, backend.memory, time_limit_s=seconds, seed=self._seed
            )
        except BudgetError:
            return None
        return least.peak_bytes

    def _with_batches(self, begun: _Begun) -> CardRow:
        """Returns the row with the largest batches, by prediction."""
        row, backend, size = begun.row, begun.backend, batch_size_of(self._batch)
        try:
            scaling = self._scaling(backend, begun.problem)
            if begun.sliced is not None:
                in_slices = scaling_in_slices(scaling, begun.sliced, size)
        except UnsupportedModelError as error:
            return _and_told(row, f"Other batches are not known: {error}")
        plain, planned, reason = self._largest(begun, scaling)
        if begun.sliced is not None:
            planned = max(planned, self._largest(begun, in_slices, in_slices.slicing.parts)[1])
        if planned and planned == plain:
            row = _and_told(row, f"No plan for a larger batch was found: {reason}.")
        return replace(row, max_batch_plain=plain, max_batch_planned=planned)

    def _largest(self, begun: _Begun, scaling: Scaling, multiple: int = 1) -> tuple[int, int, str]:
        """Returns the largest predicted batch sizes, plain and with a plan, and why none is larger.

        A size is 0 where not one sample fits.

        Args:
            multiple: number that all sizes are multiples of.
        """
        try:
            search = search_batch_size(
                scaling, batch_size_of(self._batch), begun.limit, begun.backend,
                time_limit_s=_OPTIONS.search_share * self._time_limit_s, multiple=multiple,
                seed=self._seed,
            )  # fmt: skip
        except BudgetError as error:
            return 0, 0, str(error)
        tried = [
            f"batch {probe.batch_size}: {probe.reason}" for probe in search.probes if probe.reason
        ]
        told = tried[-1] if tried else "no time was left for the search"
        return search.plain_batch_size, search.max_batch_size, told.rstrip(".")

    def _scaling(self, backend: Backend, problem: Problem) -> BatchScaling:
        size, fingerprint = batch_size_of(self._batch), problem.graph.fingerprint
        if fingerprint not in self._doubled:
            double = graph_at(backend, self._model, self._batch, 2 * size)
            self._doubled[fingerprint] = double
        double = self._doubled[fingerprint]
        if problem.graph.has_ops_of(double):
            return BatchScaling(problem, size, double, 2 * size)
        return batch_scaling(backend, self._model, problem, self._batch)  # tries other sizes


def _and_told(row: CardRow, sentence: str) -> CardRow:
    """Returns a row with one sentence more in its remark."""
    return replace(row, remark=f"{row.remark} {sentence}".lstrip())
