"""Writes a schedule down for XLA, so that XLA does not undo its recomputations.

XLA reads dependencies, not order. The first run of every op is written down as it is. A repeated op
must (a) not be merged with its first run and (b) not start before its turn. A *guard* ensures both:
it makes one input of the op depend on the *trigger*, which is one element of each value that the
ops since the last recomputation left behind.

On a CPU, the branch of a condition reads the trigger. A slice would not do, because XLA can fuse
it. A sum that many ops read may then have no reader left that needs it in memory, and XLA computes
it again in each reader, with all the sums before it.

There are no more guards than that needs:

* an equation whose input already depends on the current trigger needs none, unless its op has run
  since that trigger was made;
* an equation with a small result needs none: merged or early, it costs nothing;
* a view needs none, its reader gets it;
* else the cheapest input is guarded: a scalar literal, a bias, a kernel, before an activation.

The backward phase has one more kind of guard, whatever the schedule. It keeps two kinds of values
apart from the forward phase: those that the backward phase computes from forward values alone, and
small ones that it spreads over large ones. XLA would merge such a value with the equal one of the
forward phase, and hold that in memory until the backward phase. In the graph the value takes no
memory, because it is inside a chain.

On a CPU, a branch also keeps values in memory. XLA computes an elementwise value again in every
reader if all readers can take it into their loops, however many values it reads for that
(``ComputeGloballyUnfusible`` in ``xla/service/instruction_fusion.cc``). All those values then live
until the last reader. So a sum of residual branches that is recomputed, or that only the backward
phase reads, would not exist, and its summands would live instead. A branch takes nothing into its
loop, so the values it reads exist. On a GPU an optimization barrier does the same, also for values
with one reader (:mod:`keras_remat.backends.xla.holding`).

Where ops run in slices, each part waits for the one before. The first equations of a later part are
guarded like a recomputation, by a trigger made of all values that the part before left behind. Sums
and joined values are among these, so each exists before the next part begins. Otherwise XLA would
add up all parts in one kernel that reads them all.

**Five ways to write a schedule** (:class:`~keras_remat.core.writing.Writing`). Keeping the phases
apart and holding values costs time where XLA would have computed several values in one kernel. Some
steps need it, others do not. Each pair in this table is a share of plain's bytes and a multiple of
plain's time, by the roofline, as compiled for an H100:

======================================  ===========  ===========  ===========
step                                    loosely      held         strictly
======================================  ===========  ===========  ===========
a U-Net, planned for 0.5                0.591, 1.04  0.493, 1.14  0.493, 1.27
residual blocks, planned for 0.4        0.382, 1.14  0.403, 1.26  0.397, 1.39
inverted residual blocks, for 0.4       0.393, 1.03  0.388, 1.11  0.388, 1.19
======================================  ===========  ===========  ===========

So on a GPU a schedule is first written loosely, and in other ways if that exceeds the limit
(:mod:`keras_remat.backends.xla.ways`):

* Before Ampere cuBLAS reads transposed copies of queries, keys, values and scores. Written loosely,
  XLA makes each copy in one kernel with its original. Planned for half on a T4, a GPT-like takes
  1.07 of plain's time so, and 1.14 if each copy is made when it is read.
* The next way only keeps the phases apart. Planned for half on an H100, ResNet50 takes 1.10 of
  plain's time so, and 1.18 with values held.
* Gradients of dense kernels that wait for their updates may be what exceeds the limit. Then only
  the updates are brought forward instead. A GPT-like's plan for 0.16 took 302.0 MiB and 1.19 of
  plain's time loosely, 234.1 and 1.22 so, and 234.5 and 1.36 with values held.

Three things make holding quicker than writing strictly:

* A guard needs no trigger of its own. Its own trigger would make it wait for the values computed
  just before: of two sums of one gradient, the second could not be computed beside the first.
* A value that a product or a convolution reads exists without a barrier. The barrier would only
  keep other sums of the value out of the kernel that makes it.
* A sum is not held where there is room for its summands
  (:func:`keras_remat.backends.xla.holding.needed`).

On CPU an op that draws random numbers becomes the branch of a condition (:meth:`Run._random` says
why).

Equal equations on equal inputs are written once, so a chain that stands in several clusters does
not blow the program up.

XLA decides the order inside these bounds. What it makes of the plan is measured.

One file, though long: every rule looks at what one run has written so far.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from keras_remat.backends.xla.fused_graph import SMALL_STATE_BYTES, FusedStep
from keras_remat.backends.xla.fusion import HELD_BYTES, Equation, Kinds
from keras_remat.backends.xla.holding import apart, needed, read_from_memory, updated_early, waiting
from keras_remat.core.graph import BACKWARD, FORWARD, UPDATE
from keras_remat.core.slices import Origin
from keras_remat.core.writing import Writing

SMALL_RESULT_BYTES = 16384
"""An equation with a smaller result is not guarded: keeping it costs no more than this."""

MAX_TRIGGERS = 6
"""Most values a trigger is made of; the newest are taken."""

_FILLS = ("join", "sum")
"""Roles of ops that fill a value part by part. On a GPU the value is held, so that no kernel of
XLA's fills it at once."""

STALE_OPS = 8
"""Age in ops that a trigger may have for the guard of a spread bias. Where values are held, it is
also the age for guards that only keep the phases apart."""


FLOAT_FILL, INTEGER_FILL = 0.8203125, 105
"""Numbers that a guard selects where its condition holds, which is never. The guarded value may be
a constant, too, and a select between equal constants is folded before any pass of XLA sees it. So
these are numbers that programs do not write, and that every type of at least 8 bits can hold (8-bit
floats round the first)."""


class Writer(Protocol):
    """Writes equations down in one framework. Values are the framework's own objects, told apart by
    identity."""

    uses_branches: bool
    """Says whether the branch of a condition costs next to nothing, as on a CPU; on a GPU the host
    would wait for the condition."""

    uses_barriers: bool
    """Says whether a value behind :meth:`hold` exists, as on a GPU; XLA:CPU drops the barrier
    before it fuses."""

    copying: Collection[str] = ()
    """Names the kinds of equations that may read a copy of a value in another layout. XLA makes
    such a copy in one kernel with the value itself, which then exists only as that copy."""

    def write(self, at: int, inputs: Sequence[Any]) -> list[Any]:
        """Writes equation number ``at`` on ``inputs`` and returns its outputs."""

    def may_trigger(self, number: int) -> bool:
        """Returns whether a trigger may read a value, given by its number."""
        return True

    def keeps_layout(self, number: int) -> bool:
        """Returns whether a weight's gradient has the weight's layout, so that the update is in
        place. Otherwise new moments wait for a copy, and the later they are made the better."""
        return True

    def literal(self, atom: Any) -> Any:
        """Returns a literal as an input of its equation."""

    def array(self, atom: Any) -> Any:
        """Returns a literal as a value of its own, which can be guarded."""

    def literal_bytes(self, atom: Any) -> int:
        """Returns the size of a literal."""

    def is_inexact(self, value: Any) -> bool:
        """Returns whether a value's elements are floating-point numbers."""

    def may_guard(self, equation: Equation, value: Any) -> bool:
        """Returns whether an input of an equation may be a value that is known only when the step
        runs."""
        return True

    def copied(self, at: int) -> Sequence[int]:
        """Returns which inputs of equation number ``at`` its kernel reads a transposed copy of."""
        return ()

    def never(self, triggers: Sequence[Any], in_branch: bool = False) -> Any:
        """Returns a boolean scalar that is false and can be known only when all ``triggers``
        (non-empty values) exist.

        Args:
            triggers: values.
            in_branch: whether a branch reads them; it reads them from memory.
        """

    def guard(self, value: Any, condition: Any) -> Any:
        """Returns the same bits, depending on a condition from :meth:`never`."""

    def guard_made(self, value: Any, condition: Any) -> Any:
        """Returns the same for a value that exists, so that XLA does not compute it again for the
        guard."""
        return self.guard(self.hold(value), condition)

    def hold(self, value: Any) -> Any:
        """Returns the same value, which no reader can compute again in its own loop."""

    def draw(
        self, equations: Sequence[int], given: dict[int, Any], wanted: Sequence[int], condition: Any
    ) -> list[Any]:
        """Writes equations in a branch that is taken when ``condition`` is false.

        ``given`` holds all values they read from outside, by number.

        Returns:
            The values of the numbers in ``wanted``.
        """


@dataclass(frozen=True, eq=False, slots=True)
class _Value:
    """Holds a value that was written down.

    Args:
        written: the writer's object.
        late: whether it depends on a trigger of the backward phase.
        trigger: number of the newest trigger it depends on; 0 if it depends on none.
    """

    written: Any
    late: bool = False
    trigger: int = 0


class Run:
    """Executes one schedule symbolically."""

    def __init__(
        self,
        traced: FusedStep,
        kinds: Kinds,
        writer: Writer,
        given: Sequence[Any],
        early: Iterable[int],
        *,
        writing: Writing = Writing.STRICT,
    ):
        """Args:
        traced: the step.
        kinds: the framework's names.
        writer: the framework.
        given: the program's inputs, in the order of their numbers.
        early: numbers of the inputs that do not depend on the batch.
        writing: how strictly the schedule is written.
        """
        self._writing = writing
        self._program, self._graph = traced.program, traced.graph
        self._handles, self._numbers = traced.handles, traced.numbers
        self._kinds, self._writer = kinds, writer
        self._env = {number: _Value(value) for number, value in enumerate(given)}
        self._literals: dict[int, _Value] = {}  # by id
        self._written: dict[Any, list[_Value]] = {}  # by equation and inputs
        self._ran: dict[int, int] = {}  # op → the trigger that was the newest when it ran last
        self._existing = frozenset(self._numbers)
        self._makers = {out: e for e in self._program.equations for out in e.outputs}
        self._copied = self._copied_values()
        self._origins = () if traced.whole is None else traced.whole.sliced.origins
        self._part, self._part_trigger = 0, 0  # the part that runs, and the trigger it waits for
        self._of_part: list[int] = []  # ops of the part that ran
        self._early = set(early)
        self._updates: list[int] = []  # numbers of large new weights that nothing waits for yet
        self._gradients: set[int] = set()  # numbers of values that updates have read
        self._since: list[int] = []  # ops that ran for the first time since the last trigger
        self._pins: list[Any] = []  # read by the next trigger beside the newest results
        self._condition: Any = None
        self._condition_phase = FORWARD
        self._trigger = 1  # the newest one's number; values drawn before any trigger have it, too
        self._guards: dict[_Value, _Value] = {}  # value → the same, guarded by the newest trigger

    def _copied_values(self) -> frozenset[int]:
        """Returns numbers of the values that a kernel reads a transposed copy of."""
        found = set()
        for at, equation in enumerate(self._program.equations):
            for number in (equation.inputs[position] for position in self._writer.copied(at)):
                while number in self._makers and self._makers[number].kind in self._kinds.views:
                    number = self._makers[number].reads[0]
                found.add(number)
        return frozenset(found)

    def order(self, order: Sequence[int]) -> None:
        """Runs a whole order."""
        held, alone = frozenset[int](), frozenset[int]()
        if self._is_timely:
            updates = [op.id for op in self._graph.ops if self._overwrites(op.id)]
            order = updated_early(self._graph, order, updates)
        if self._keeps_order:
            held = self._held(order)
            alone = apart(self._graph, order, self._kinds)
        for at, op_id in enumerate(order):
            self.op(op_id, waits=at in held, is_alone=at in alone)

    def _held(self, order: Sequence[int]) -> frozenset[int]:
        """Returns the positions of an order whose results have to exist before they are read. These
        are results that wait, and sums of two large values that several ops read."""
        graph, kinds = self._graph, self._kinds
        waits = waiting(graph, order, kinds)
        sums = frozenset(at for at, op_id in enumerate(order) if self._is_read_sum(op_id))
        if self._writing is Writing.STRICT:
            return waits | sums
        copying = self._writer.copying
        sums = sums.difference(read_from_memory(graph, order, kinds, copying))
        return needed(graph, order, kinds, waits | sums, copying)

    def op(self, op_id: int, *, waits: bool = False, is_alone: bool = False) -> None:
        """Runs one position of an order.

        Args:
            op_id: the op.
            waits: whether its result has to exist before it is read.
            is_alone: whether it must not run in one kernel with an earlier op.
        """
        op = self._graph.ops[op_id]
        again = op_id in self._ran
        if self._origins and not again:
            self._begin_part(self._origins[op_id])
        early = all(self._numbers[v] in self._early for v in op.inputs)
        kinds = {self._program.equations[at].kind for at in self._handles[op_id]}
        if self._writer.uses_branches and not kinds.isdisjoint(self._kinds.random):
            results = self._random(op_id)
        else:
            follows = is_alone or (self._is_timely and self._overwrites(op_id))
            results = self._chain(op_id, again, follows)
            if self._writer.uses_barriers:
                fills = bool(self._origins) and self._origins[op_id].role in _FILLS
                self._hold(op_id, results, waits=waits or fills)
            else:
                self._pin(op_id, results)
        for value_id in op.outputs:
            number = self._numbers[value_id]
            self._env[number] = results[number]
            if early:
                self._early.add(number)
        if not again and op.phase != UPDATE and not early:
            self._since.append(op_id)
            self._of_part.append(op_id)
        if op.phase == UPDATE and self._is_timely:
            self._take_update(op_id)
        self._ran[op_id] = self._trigger

    @property
    def _keeps_order(self) -> bool:
        """Returns whether XLA on a GPU is kept from delaying ops, and from running several in one
        kernel."""
        return self._writing in (Writing.HELD, Writing.STRICT) and self._writer.uses_barriers

    @property
    def _is_timely(self) -> bool:
        """Returns whether XLA on a GPU is kept from putting updates off, and from making copies
        before the kernel that reads them runs."""
        return self._writing not in (Writing.LOOSE, Writing.PHASED) and self._writer.uses_barriers

    @property
    def _phase_stale_ops(self) -> float:
        """Returns how many ops old a trigger that keeps the phases apart may be. If only the phases
        are kept apart, any trigger of the backward phase will do. ResNet50's plan for half on an
        H100 takes 266 MiB and 1.10 of plain's time so, and 265 MiB and 1.13 with a trigger 8 ops
        old."""
        if self._writing is Writing.PHASED:
            return math.inf
        return 1 if self._writing is Writing.STRICT else STALE_OPS

    def _overwrites(self, op_id: int) -> bool:
        """Returns whether an op overwrites a large weight that other phases read. It can do so in
        place only when those phases have read it."""
        op = self._graph.ops[op_id]
        return (
            op.phase == UPDATE
            and any(self._graph.ops[reader].phase != UPDATE for reader in op.after)
            and any(self._is_weight(self._numbers[v]) for v in op.outputs)
        )

    def _is_weight(self, number: int) -> bool:
        """Returns whether a number has a weight's layout, and is large enough to matter as a weight
        or a gradient."""
        is_large = self._program.sizes[number] >= SMALL_STATE_BYTES
        return is_large and self._writer.keeps_layout(number)

    def _waits_for_update(self, op_id: int, equation: Equation, again: bool) -> bool:
        """Returns whether an equation has to wait for the new weights that nothing waits for yet.
        Only an equation of the backward phase does, and only if its guard copies nothing large."""
        if not self._updates or again or self._graph.ops[op_id].phase != BACKWARD:
            return False
        sizes = self._program.sizes
        least = min(sizes[number] for number in equation.reads)
        made = max(sizes[number] for number in equation.outputs)
        return equation.kind in self._kinds.elementwise or least * 8 <= made

    def _take_update(self, op_id: int) -> None:
        """Makes later ops wait for an update, and not for the gradient that it reads. Waiting for
        the gradient, XLA would lay it out unlike the weight, and the update would not be in
        place."""
        op = self._graph.ops[op_id]
        read = (self._numbers[v] for v in op.inputs)
        self._gradients.update(filter(self._is_weight, read))
        if self._overwrites(op_id):
            self._updates += [self._numbers[v] for v in op.outputs]

    def _begin_part(self, origin: Origin) -> None:
        """Makes a later part wait for all values that the part before left behind."""
        if origin.role == "whole" or origin.part == self._part:
            return
        ran, self._of_part, self._part = self._of_part, [], origin.part
        if self._part:
            self._since = ran
            self._new_trigger(most=None)
            self._part_trigger = self._trigger

    def _is_later(self, op_id: int) -> bool:
        """Returns whether an op belongs to a part that waits for another."""
        return bool(self._origins) and self._origins[op_id].role != "whole" and self._part > 0

    def _pin(self, op_id: int, results: Mapping[int, _Value]) -> None:
        """Makes a branch read a value that comes from two large ones, so that it exists.

        It is the last such value on the way to the op's result. An operation on one large value is
        copied by XLA into its readers anyway.

        Args:
            op_id: an op that has just run.
            results: number → value, for all values it computed.
        """
        op = self._graph.ops[op_id]
        if not self._writer.uses_branches or not op.outputs:
            return
        number = self._numbers[op.outputs[0]]
        equations, sizes = self._program.equations, self._program.sizes
        size = sizes[number]
        if size < SMALL_RESULT_BYTES or len(self._graph.readers[op.outputs[0]]) < 2:
            return
        makers: dict[int, int] = {}
        large = {
            self._numbers[v] for v in op.inputs if sizes[self._numbers[v]] * 8 >= size
        }  # or made from such
        for at in self._handles[op_id]:
            makers.update((out, at) for out in equations[at].outputs)
            if not large.isdisjoint(equations[at].reads):
                large.update(equations[at].outputs)
        while number in makers:
            equation = equations[makers[number]]
            if equation.kind not in self._kinds.elementwise | self._kinds.reshapes:
                return
            operands = large.intersection(equation.reads)
            if len(operands) > 1:
                self._pins.append(self._writer.never([results[number].written], in_branch=True))
            if len(operands) != 1:
                return
            (number,) = operands

    def _hold(self, op_id: int, results: dict[int, _Value], *, waits: bool) -> None:
        """Holds an op's result if it has to exist before it is read.

        It is also held if a kernel reads a transposed copy of it, which XLA would make beside it.

        Args:
            op_id: an op that has just run.
            results: number → value, for all values it computed.
            waits: whether the result has to exist before it is read.
        """
        op = self._graph.ops[op_id]
        if not op.outputs:
            return
        number = self._numbers[op.outputs[0]]
        is_copied = self._program.sizes[number] >= HELD_BYTES and number in self._copied
        if waits or (is_copied and self._is_timely):
            held = results[number]
            results[number] = replace(held, written=self._writer.hold(held.written))

    def _is_read_sum(self, op_id: int) -> bool:
        """Returns whether several ops read an op's result, and the result is large and computed
        elementwise from two values of about its size."""
        op, equations, sizes = self._graph.ops[op_id], self._program.equations, self._program.sizes
        if not op.outputs or len(self._graph.readers[op.outputs[0]]) < 2:
            return False
        number = self._numbers[op.outputs[0]]
        makers = [equations[at] for at in self._handles[op_id] if number in equations[at].outputs]
        large = [v for v in op.inputs if sizes[self._numbers[v]] * 8 >= sizes[number]]
        is_sum = len(large) > 1 and all(e.kind in self._kinds.elementwise for e in makers)
        return is_sum and sizes[number] >= HELD_BYTES

    def _chain(self, op_id: int, again: bool, follows: bool) -> dict[int, _Value]:
        """Runs the equations of one op. They are guarded if the op runs for the second time, or if
        it has to follow what has run so far."""
        phase = self._graph.ops[op_id].phase
        inner: dict[int, _Value] = {}
        for at in self._handles[op_id]:
            equation = self._program.equations[at]
            inputs = [
                inner.get(a) or self._env[a] if isinstance(a, int) else self._literal(a)
                for a in equation.inputs
            ]
            if self._guardable(equation):
                if follows or self._waits_for_update(op_id, equation, again):
                    self._guard_cheapest(equation, inputs)
                    follows = False
                if self._is_timely and (again or phase == BACKWARD):
                    self._keep_copies_apart(at, equation, inputs, again)
                if again and not self._waits(op_id, inputs):
                    self._guard_cheapest(equation, inputs)
                elif not again and self._is_later(op_id):
                    if not any(x.trigger >= self._part_trigger for x in inputs):
                        self._guard_cheapest(equation, inputs, anew=False)
                elif not again and phase == BACKWARD:
                    self._keep_from_forward(equation, inputs)
            outputs = self._run(at, equation, inputs)
            inner.update(zip(equation.outputs, outputs, strict=True))
        return inner

    def _keep_copies_apart(
        self, at: int, equation: Equation, inputs: list[_Value], again: bool
    ) -> None:
        """Has the copies of forward values that a kernel reads made for that kernel alone, when it
        runs. XLA would make them in the forward phase, and hold each copy beside its original. That
        would be quicker: it makes them in one kernel with the originals."""
        for position in self._writer.copied(at):
            if not inputs[position].late:
                self._guard_input(equation, inputs, position, 1 if again else STALE_OPS)

    def _waits(self, op_id: int, inputs: Sequence[_Value]) -> bool:
        """Returns whether an op's inputs depend on the newest trigger, and did not when it ran
        last. (In a second pass over the data, every op that runs for the first time depends on some
        trigger.)"""
        is_newer = self._trigger > self._ran[op_id]
        return is_newer and any(x.trigger == self._trigger for x in inputs)

    def _literal(self, atom: Any) -> _Value:
        return self._literals.setdefault(id(atom), _Value(self._writer.literal(atom)))

    def _random(self, op_id: int) -> dict[int, _Value]:
        """Runs an op that draws random numbers, as the branch of a condition that always takes it.

        XLA:CPU starts every random loop of a step at the very beginning, since the loop reads
        nothing but seeds. And for the backward phase it keeps the random bits instead of the mask
        made of them, which are four times as large. It does neither across the border of a branch.
        The condition is the newest trigger, so it protects a recomputation as a guard does.
        """
        op = self._graph.ops[op_id]
        given = {n: self._env[n].written for n in (self._numbers[v] for v in op.inputs)}
        if self._since:
            self._new_trigger()
        condition = self._condition
        if condition is None:
            condition = self._writer.never([*given.values()])
        wanted = [self._numbers[v] for v in op.outputs]
        results = self._writer.draw(self._handles[op_id], given, wanted, condition)
        late = op.phase != FORWARD or op_id in self._ran
        values = [_Value(x, late, self._trigger) for x in results]
        return dict(zip(wanted, values, strict=True))

    def output(self, atom: Any) -> Any:
        """Returns the value of one program output."""
        return self._env[atom].written if isinstance(atom, int) else self._writer.array(atom)

    def _run(self, at: int, equation: Equation, inputs: list[_Value]) -> list[_Value]:
        """Writes an equation down, or finds it written for the same inputs."""
        key = (at, *inputs)
        if key not in self._written:
            read = () if equation.separates else inputs
            late, trigger = any(x.late for x in read), max((x.trigger for x in read), default=0)
            outputs = self._writer.write(at, [x.written for x in inputs])
            self._written[key] = [_Value(x, late, trigger) for x in outputs]
        return self._written[key]

    def _guardable(self, equation: Equation) -> bool:
        """Returns whether it matters if an equation is merged with another or starts early. A
        transposed copy that it needs counts as made by it."""
        made = sum(self._program.sizes[o] for o in equation.outputs)
        if equation.kind in self._kinds.transposing:
            made = max(made, self._program.sizes[equation.reads[0]])
        return (
            made >= SMALL_RESULT_BYTES
            and bool(equation.reads)
            and equation.kind not in self._kinds.views
        )

    def _keep_from_forward(self, equation: Equation, inputs: list[_Value]) -> None:
        """Keeps an equation of the backward phase from sharing large values with the forward phase.

        If the equation reads only forward values, it is guarded. If not, the small values that it
        spreads over its result are guarded. The forward phase spreads a bias or scale, too, and the
        merged full-size copy would live from one phase to the other. So would the transposed copy
        of an image that XLA:CPU makes for the gradient of a convolution's kernel, and on a GPU the
        indices of the largest elements that the gradient of pooling looks for.
        """
        image = self._kinds.pooling_gradients.get(equation.kind)
        if equation.kind in self._kinds.transposing and not inputs[0].late:
            self._guard_input(equation, inputs, 0, stale_ops=STALE_OPS)
        elif image is not None and not inputs[image].late:
            self._guard_input(equation, inputs, image)
        elif self._writing is Writing.LOOSE or (
            self._writing is Writing.UPDATED and not self._turns_a_weight(equation)
        ):
            return
        elif not any(x.late for x in inputs):
            self._guard_cheapest(equation, inputs, self._phase_stale_ops)
        elif self._writing is Writing.STRICT and equation.kind in self._kinds.elementwise:
            size = self._program.sizes[equation.outputs[0]]
            for at, atom in enumerate(equation.inputs):
                is_small = isinstance(atom, int) and self._program.sizes[atom] * 8 <= size
                if is_small and not inputs[at].late:
                    self._guard_input(equation, inputs, at, stale_ops=STALE_OPS)

    def _turns_a_weight(self, equation: Equation) -> bool:
        """Returns whether an equation changes the layout of an input of the step, as a kernel is
        turned for the gradient of its image. XLA would make that copy in one kernel with the copy
        that the forward phase reads, and hold it until the backward phase."""
        sizes = self._program.sizes
        return (
            equation.kind in self._kinds.moving
            and all(number < self._program.n_given for number in equation.reads)
            and sizes[equation.outputs[0]] <= sum(sizes[number] for number in equation.reads)
        )

    def _guard_cheapest(
        self, equation: Equation, inputs: list[_Value], stale_ops: float = 1, anew: bool = True
    ) -> None:
        """Guards the cheapest input. ``stale_ops`` and ``anew`` are as in :meth:`_guard_input`."""

        def cost(at: int) -> tuple[bool, int]:
            atom = equation.inputs[at]
            if not isinstance(atom, int):
                return False, self._writer.literal_bytes(atom)
            return not self._writer.is_inexact(inputs[at].written), self._program.sizes[atom]

        literals = equation.kind in self._kinds.elementwise
        usable = [
            at
            for at, atom in enumerate(equation.inputs)
            if (literals or isinstance(atom, int))
            and self._writer.may_guard(equation, inputs[at].written)
        ]
        if usable:
            self._guard_input(equation, inputs, min(usable, key=cost), stale_ops, anew)

    def _guard_input(
        self,
        equation: Equation,
        inputs: list[_Value],
        at: int,
        stale_ops: float = 1,
        anew: bool = True,
    ) -> None:
        """Guards one input. The trigger may be almost ``stale_ops`` ops old. If ``anew`` is false,
        no new trigger is made, and it may be older."""
        if (anew and (self._since or self._updates)) and (
            self._condition is None
            or self._condition_phase == FORWARD
            or len(self._since) >= stale_ops
            or self._updates
        ):
            self._new_trigger()
        if self._condition is None:
            return  # nothing has run yet: nothing to merge with, nothing to wait for
        atom, value = equation.inputs[at], inputs[at]
        if value not in self._guards:
            original = value.written if isinstance(atom, int) else self._writer.array(atom)
            guard = self._writer.guard
            if isinstance(atom, int) and self._is_made_again(atom):
                guard = self._writer.guard_made
            guarded = guard(original, self._condition)
            self._guards[value] = _Value(guarded, late=True, trigger=self._trigger)
        inputs[at] = self._guards[value]

    def _is_made_again(self, number: int) -> bool:
        """Returns whether XLA could compute an existing value again in the kernel of its guard.
        Until then it would hold what the value is made of, which may be larger (the joint product
        of queries, keys and values)."""
        if not self._writer.uses_barriers or self._program.sizes[number] < HELD_BYTES:
            return False
        maker = self._makers.get(number)
        while maker is not None and maker.kind in self._kinds.reshapes:
            number = maker.reads[0]
            maker = self._makers.get(number)
        made = self._kinds.elementwise | self._kinds.cut
        return maker is not None and number in self._existing and maker.kind in made

    def _new_trigger(self, most: int | None = MAX_TRIGGERS) -> None:
        """Makes a trigger for the next recomputations, of the newest unread results.

        It takes ``most`` of them, or all if that is ``None``. A loop's results all come at once. If
        one was read, the trigger does not wait for the others: the schedule may let go of them, and
        the trigger would hold them for nothing.
        """
        read = {v for op_id in self._since for v in self._graph.ops[op_id].inputs}
        numbers = {self._numbers[v] for v in read} | self._gradients
        for at in (at for op_id in self._since for at in self._handles[op_id]):
            outputs = self._program.equations[at].outputs
            if not numbers.isdisjoint(outputs):
                numbers.update(outputs)
        made = [
            v
            for op_id in self._since
            for v in self._graph.ops[op_id].outputs
            if self._graph.values[v].nbytes > 0
        ]
        allowed = [v for v in made if self._writer.may_trigger(self._numbers[v])]
        left = [v for v in allowed if self._numbers[v] not in numbers]
        if len(allowed) < len(made):  # the unread ones may be just what no trigger may read
            left = left or allowed[-1:]
        if left or self._updates:
            newest = [self._env[self._numbers[v]].written for v in left[-(most or len(left)) :]]
            updated = [self._writer.hold(self._env[number].written) for number in self._updates]
            triggers = [*newest, *updated, *self._pins]
            self._condition = self._writer.never(triggers, in_branch=self._writer.uses_branches)
            self._pins, self._updates = [], []
            if self._since:
                self._condition_phase = self._graph.ops[self._since[-1]].phase
            self._guards, self._trigger = {}, self._trigger + 1
        self._since = []
