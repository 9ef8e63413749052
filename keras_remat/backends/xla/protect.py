"""A schedule written down for a compiler that reads dependencies, not order: its recomputations are
protected from being undone.

The first run of every op is written down as it is; a repeated op must (a) not be merged with its
first run and (b) not start before its turn. Both are had by one data dependency on what the
step had computed by then: the *trigger*, one element of each value that the ops since the last
recomputation left behind.

On a CPU a trigger is read in the branch of a condition. Read by a slice, which XLA can fuse, a sum
that many ops read may have no reader left that needs it in memory; it is then computed again in
each of them, with all the sums before it.

As few guards as that needs:

* an equation whose input already depends on the current trigger needs none, unless its op has run
  since that trigger was made;
* an equation with a small result needs none: merged or early, it costs nothing;
* a view needs none, its reader gets it;
* else the cheapest input is guarded: a scalar literal, a bias, a kernel, before an activation.

The backward phase is guarded in one more way, whatever the schedule: what it computes from forward
values alone, and the small values it spreads over large ones, are kept apart from the forward
phase. XLA would merge such a value with the equal one of the forward phase, and hold that in memory
until the backward phase; in the graph a value inside a chain takes no memory.

On a CPU, values are kept in memory in the same way. XLA computes an elementwise value again in
every reader where all of them can take it into their loops, however many values it reads for that
(``ComputeGloballyUnfusible`` in ``xla/service/instruction_fusion.cc``), and all of those then live
until the last reader: a sum of residual branches that is recomputed, or read by the backward phase
only, would exist nowhere, and what it was made of everywhere. A branch takes nothing into its loop,
so what it reads exists. On a GPU an optimization barrier does the same, also for values with one
reader (:mod:`keras_remat.backends.xla.holding`).

Where ops run in slices, the parts wait for one another: what begins a later part is guarded like a
recomputation, by a trigger of all that the part before left behind. Sums and joined values are
among that, so each exists before the next part begins; XLA would add up all parts in one kernel,
which reads them all.

**Five ways to write a schedule** (:class:`~keras_remat.core.writing.Writing`). What keeps the
phases apart and holds values costs time where XLA had computed several values in one kernel. Some
steps need it, others do not. Compiled for an H100, in plain's bytes and plain's time by the
roofline:

======================================  ===========  ===========  ===========
step                                    loosely      held         strictly
======================================  ===========  ===========  ===========
a U-Net, planned for 0.5                0.591, 1.04  0.493, 1.14  0.493, 1.27
residual blocks, planned for 0.4        0.382, 1.14  0.403, 1.26  0.397, 1.39
inverted residual blocks, for 0.4       0.393, 1.03  0.388, 1.11  0.388, 1.19
======================================  ===========  ===========  ===========

So on a GPU a schedule is written loosely first, and otherwise where that does not keep to the limit
(:mod:`keras_remat.backends.xla.ways`):

* Before Ampere cuBLAS reads transposed copies of queries, keys, values and scores. Loosely, XLA
  makes them in one kernel with what they are copies of: for half on a T4 a GPT-like takes 1.07 of
  plain's time, and 1.14 where each is made when it is read.
* Next, the phases alone are kept apart. For half on an H100, ResNet50 takes 1.10 of plain's time
  so, and 1.18 with values held.
* Where gradients of dense kernels that wait for their updates may be what is over the limit,
  updates alone are brought forward instead: a GPT-like's plan for 0.16 took 302.0 MiB and 1.19 of
  plain's time loosely, 234.1 and 1.22 so, and 234.5 and 1.36 with values held.

Two things make holding quicker than writing strictly. A guard needs no trigger of its own: each
waits for what was computed just before, and of two sums of one gradient, say, the second could not
be computed beside the first. And a value that a product or a convolution reads exists without a
barrier, which only keeps other sums of it out of the kernel that makes it. Nor is a sum held where
there is room for what it is made of (:func:`keras_remat.backends.xla.holding.needed`).

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
"""Roles of ops that fill a value part by part: on a GPU the value is held, to be filled at once by
none of XLA's kernels."""

STALE_OPS = 8
"""A spread bias makes do with a trigger that is this many ops old, and so does what only has to be
of the backward phase where values are held."""


FLOAT_FILL, INTEGER_FILL = 0.8203125, 105
"""What a guard selects where its condition holds, which is never. What is guarded may be a
constant, and a select between equal constants is folded before any pass of XLA sees it. So these
are numbers that programs do not write, and that every type of at least 8 bits can hold (but for
8-bit floats, which round the first)."""


class Writer(Protocol):
    """Is a framework that writes equations down. Values are its own objects; each is told from the
    others by identity."""

    uses_branches: bool
    """Says whether the branch of a condition costs next to nothing, as on a CPU; on a GPU the host
    would wait for the condition."""

    uses_barriers: bool
    """Says whether a value behind :meth:`hold` exists, as on a GPU; XLA:CPU drops the barrier
    before it fuses."""

    copying: Collection[str] = ()
    """Are kinds of equations that may read a copy of a value, in another layout than it is held in.
    XLA makes such a copy in one kernel with what is copied, which then exists nowhere else."""

    def write(self, at: int, inputs: Sequence[Any]) -> list[Any]:
        """Writes equation number ``at`` on ``inputs`` and returns its outputs."""

    def may_trigger(self, number: int) -> bool:
        """Returns whether a number may be read for a trigger."""
        return True

    def keeps_layout(self, number: int) -> bool:
        """Returns whether a weight's gradient is laid as the weight, so that the update is in
        place; else new moments wait for a copy, and the later they are made the better."""
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
        """Returns whether an input of an equation may be something that is known only when the step
        runs."""

    def copied(self, at: int) -> Sequence[int]:
        """Returns which inputs of equation number ``at`` its kernel reads a transposed copy of."""
        return ()

    def never(self, triggers: Sequence[Any], in_branch: bool = False) -> Any:
        """Returns a boolean scalar that is false and can be known only when all ``triggers``
        (non-empty values) exist.

        Args:
            triggers: values.
            in_branch: whether they are read in a branch, which takes them from memory.
        """

    def guard(self, value: Any, condition: Any) -> Any:
        """Returns the same bits, depending on a condition from :meth:`never`."""

    def guard_made(self, value: Any, condition: Any) -> Any:
        """Returns the same of a value that exists, and is not computed again for it."""
        return self.guard(self.hold(value), condition)

    def hold(self, value: Any) -> Any:
        """Returns the same value, which no reader can compute again in its own loop."""

    def draw(
        self, equations: Sequence[int], given: dict[int, Any], wanted: Sequence[int], condition: Any
    ) -> list[Any]:
        """Writes equations in a branch that is taken when ``condition`` is false; ``given`` are all
        the values they read from outside.

        Returns:
            The values of the numbers in ``wanted``.
        """


@dataclass(frozen=True, eq=False, slots=True)
class _Value:
    """Holds a value that was written down.

    Args:
        written: the writer's object.
        late: whether it depends on a trigger of the backward phase.
        trigger: the number of a trigger that it depends on; 0 for what depends on none.
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
        early: those of them that need nothing of the batch.
        writing: how strictly.
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
        self._part, self._part_trigger = 0, 0  # what runs, and the first trigger that it waits for
        self._of_part: list[int] = []  # ops of it that ran
        self._early = set(early)
        self._updates: list[int] = []  # numbers of large new weights that nothing waits for yet
        self._gradients: set[int] = set()  # numbers of what updates have read
        self._since: list[int] = []  # ops that ran for the first time since the last trigger
        self._pins: list[Any] = []  # what the next trigger reads beside the newest results
        self._condition: Any = None
        self._condition_phase = FORWARD
        self._trigger = 1  # the newest one's number; what is drawn before any depends on it, too
        self._guards: dict[_Value, _Value] = {}  # by what is guarded with the newest trigger

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
        alone: frozenset[int] = frozenset()
        held: frozenset[int] = frozenset()
        if self._is_timely:
            updates = [op.id for op in self._graph.ops if self._overwrites(op.id)]
            order = updated_early(self._graph, order, updates)
        if self._keeps_order:
            held = self._held(order)
            alone = apart(self._graph, order, self._kinds)
        for at, op_id in enumerate(order):
            self.op(op_id, waits=at in held, is_alone=at in alone)

    def _held(self, order: Sequence[int]) -> frozenset[int]:
        """Returns the positions of an order whose result has to exist before it is read: where it
        waits, or is a sum of two large values that several ops read."""
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
            op_id: what runs.
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
        """Returns whether XLA is kept from putting things off or together on a GPU."""
        return self._writing in (Writing.HELD, Writing.STRICT) and self._writer.uses_barriers

    @property
    def _is_timely(self) -> bool:
        """Returns whether XLA is kept on a GPU from putting updates off, and from making copies
        before the kernel runs that reads them."""
        return self._writing not in (Writing.LOOSE, Writing.PHASED) and self._writer.uses_barriers

    @property
    def _phase_stale_ops(self) -> float:
        """Returns how many ops old a trigger may be that keeps the phases apart. Where nothing else
        is kept, any of the backward phase does: ResNet50's plan for half on an H100 takes 266 MiB
        and 1.10 of plain's time so, and 265 and 1.13 with one that is 8 ops old."""
        if self._writing is Writing.PHASED:
            return math.inf
        return 1 if self._writing is Writing.STRICT else STALE_OPS

    def _overwrites(self, op_id: int) -> bool:
        """Returns whether an op writes a large weight over the one that other phases read. In
        place it can do that when those are through."""
        op = self._graph.ops[op_id]
        return (
            op.phase == UPDATE
            and any(self._graph.ops[reader].phase != UPDATE for reader in op.after)
            and any(self._is_weight(self._numbers[v]) for v in op.outputs)
        )

    def _is_weight(self, number: int) -> bool:
        """Returns whether a number is as large as a weight, or a gradient, that matters, and is
        laid as the step is given it."""
        is_large = self._program.sizes[number] >= SMALL_STATE_BYTES
        return is_large and self._writer.keeps_layout(number)

    def _waits_for_update(self, op_id: int, equation: Equation, again: bool) -> bool:
        """Returns whether an equation waits for the new weights that nothing waits for yet: one of
        the backward phase whose guard is no copy of something large."""
        if not self._updates or again or self._graph.ops[op_id].phase != BACKWARD:
            return False
        sizes = self._program.sizes
        least = min(sizes[number] for number in equation.reads)
        made = max(sizes[number] for number in equation.outputs)
        return equation.kind in self._kinds.elementwise or least * 8 <= made

    def _take_update(self, op_id: int) -> None:
        """Has what follows wait for an update, and not for the gradient that it reads: XLA would
        lay that otherwise than the weight, and the update would not be in place."""
        op = self._graph.ops[op_id]
        read = (self._numbers[v] for v in op.inputs)
        self._gradients.update(filter(self._is_weight, read))
        if self._overwrites(op_id):
            self._updates += [self._numbers[v] for v in op.outputs]

    def _begin_part(self, origin: Origin) -> None:
        """Has a later part wait for all that the one before left behind."""
        if origin.role == "whole" or origin.part == self._part:
            return
        ran, self._of_part, self._part = self._of_part, [], origin.part
        if self._part:
            self._since = ran
            self._new_trigger(most=None)
            self._part_trigger = self._trigger

    def _is_later(self, op_id: int) -> bool:
        """Returns whether an op is of a part that waits for another."""
        return bool(self._origins) and self._origins[op_id].role != "whole" and self._part > 0

    def _pin(self, op_id: int, results: Mapping[int, _Value]) -> None:
        """Has a value that comes from two large ones read in a branch.

        That is the last such value on the way to the op's result: an operation on one large value,
        XLA copies into its readers anyway.

        Args:
            op_id: an op that has just run.
            results: by number, all that it computed.
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
        """Replaces what has to exist before it is read, or what a kernel reads a transposed copy
        of, which would be made beside it, by a value that exists.

        Args:
            op_id: an op that has just run.
            results: by number, all that it computed.
            waits: whether it has to exist.
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
        """Returns whether an op computes a large value by element from two that are large beside
        it, and several ops read it."""
        op, equations, sizes = self._graph.ops[op_id], self._program.equations, self._program.sizes
        if not op.outputs or len(self._graph.readers[op.outputs[0]]) < 2:
            return False
        number = self._numbers[op.outputs[0]]
        makers = [equations[at] for at in self._handles[op_id] if number in equations[at].outputs]
        large = [v for v in op.inputs if sizes[self._numbers[v]] * 8 >= sizes[number]]
        is_sum = len(large) > 1 and all(e.kind in self._kinds.elementwise for e in makers)
        return is_sum and sizes[number] >= HELD_BYTES

    def _chain(self, op_id: int, again: bool, follows: bool) -> dict[int, _Value]:
        """Runs the equations of one op, protected where they run for the second time, or where it
        follows what has run so far."""
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
        """Has the copies that a kernel reads of forward values be made for it alone, when it runs:
        XLA would make them in the forward phase, and hold each beside what it is a copy of. It
        makes them in one kernel with what they are copies of, so that is quicker."""
        for position in self._writer.copied(at):
            if not inputs[position].late:
                self._guard_input(equation, inputs, position, 1 if again else STALE_OPS)

    def _waits(self, op_id: int, inputs: Sequence[_Value]) -> bool:
        """Returns whether an op's inputs depend on the newest trigger, and did not when it ran
        last: in a second pass over the data, all that runs for the first time depends on some
        trigger."""
        is_newer = self._trigger > self._ran[op_id]
        return is_newer and any(x.trigger == self._trigger for x in inputs)

    def _literal(self, atom: Any) -> _Value:
        return self._literals.setdefault(id(atom), _Value(self._writer.literal(atom)))

    def _random(self, op_id: int) -> dict[int, _Value]:
        """Runs an op that draws random numbers, as the branch of a condition that always takes it.

        XLA:CPU starts every random loop of a step at its very beginning, since it reads nothing but
        seeds, and rather keeps the random bits for the backward phase than the mask made of them,
        four times as much. It does neither across the border of a branch; and the condition, which
        is the newest trigger, protects a recomputation as a guard does.
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
        """Returns whether it matters if an equation is merged with another or starts early; a
        transposed copy counts as made by it."""
        made = sum(self._program.sizes[o] for o in equation.outputs)
        if equation.kind in self._kinds.transposing:
            made = max(made, self._program.sizes[equation.reads[0]])
        return (
            made >= SMALL_RESULT_BYTES
            and bool(equation.reads)
            and equation.kind not in self._kinds.views
        )

    def _keep_from_forward(self, equation: Equation, inputs: list[_Value]) -> None:
        """Makes an equation of the backward phase share nothing large with the forward phase.

        One that reads forward values only is guarded. Of another, the small values it spreads over
        its result are: a bias or scale is spread in the forward phase too, and merged, the
        full-size copy would live from the one phase to the other. So would the transposed copy of
        an image that XLA:CPU makes for the gradient of a convolution's kernel, and on a GPU the
        indices of the largest elements that the gradient of pooling looks for.
        """
        if equation.kind in self._kinds.transposing and not inputs[0].late:
            self._guard_input(equation, inputs, 0, stale_ops=STALE_OPS)
        elif (
            equation.kind in self._kinds.pooling_gradients
            and not inputs[self._kinds.pooling_gradients[equation.kind]].late
        ):
            self._guard_input(equation, inputs, self._kinds.pooling_gradients[equation.kind])
        elif self._writing is Writing.LOOSE or (
            self._writing is Writing.UPDATED and not self._turns_a_weight(equation)
        ):
            return
        elif not any(x.late for x in inputs):
            self._guard_cheapest(equation, inputs, self._phase_stale_ops)
        elif self._writing is Writing.STRICT and equation.kind in self._kinds.elementwise:
            size = self._program.sizes[equation.outputs[0]]
            for at, atom in enumerate(equation.inputs):
                if (
                    isinstance(atom, int)
                    and self._program.sizes[atom] * 8 <= size
                    and not inputs[at].late
                ):
                    self._guard_input(equation, inputs, at, stale_ops=STALE_OPS)

    def _turns_a_weight(self, equation: Equation) -> bool:
        """Returns whether an equation lays out anew what the step is given, as a kernel is turned
        for the gradient of its image. XLA would make that copy in one kernel with the one that the
        forward phase reads, and hold it until then."""
        sizes = self._program.sizes
        return (
            equation.kind in self._kinds.moving
            and all(number < self._program.n_given for number in equation.reads)
            and sizes[equation.outputs[0]] <= sum(sizes[number] for number in equation.reads)
        )

    def _guard_cheapest(
        self, equation: Equation, inputs: list[_Value], stale_ops: float = 1, anew: bool = True
    ) -> None:
        """Replaces the cheapest input by its guarded self; ``stale_ops`` and ``anew`` as of
        :meth:`_guard_input`."""

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
        """Replaces one input by its guarded self; the trigger may be almost ``stale_ops`` ops old,
        and older where it shall not be made ``anew``."""
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
        """Returns whether XLA could compute an existing value again in the kernel of its guard: it
        would hold what the value is made of until then, which may be larger (the joint product of
        queries, keys and values)."""
        if not self._writer.uses_barriers or self._program.sizes[number] < HELD_BYTES:
            return False
        maker = self._makers.get(number)
        while maker is not None and maker.kind in self._kinds.reshapes:
            number = maker.reads[0]
            maker = self._makers.get(number)
        made = self._kinds.elementwise | self._kinds.cut
        return maker is not None and number in self._existing and maker.kind in made

    def _new_trigger(self, most: int | None = MAX_TRIGGERS) -> None:
        """Makes the newest results that nothing has read yet, ``most`` of them or all, the
        condition of the recomputations that follow.

        A loop's results come at once. Where one was read, the others are not waited for: they may
        be what is forgotten, and would be held for nothing.
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
        if len(allowed) < len(made):  # what is left may be just what must not be waited for
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
