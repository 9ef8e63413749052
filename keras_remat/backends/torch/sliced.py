"""Writes a recorded PyTorch step with some of its ops in slices.

The result is the program of a :class:`~keras_remat.core.slices.SlicedGraph`. Each op of that graph
is a node. A part is its op's call on parts of tensors, with the views between a value and its
reader made anew. The operator, run on tensors without memory, shows how a part's results lie in
memory. Slicing adds these calls to a program:

* a cut is ``clone`` of a range of the value: a view would keep all of it alive;
* a join is ``empty_strided`` and then ``copy_`` into a range of it, in place;
* a sum is ``add``, in the order of the parts; a mean is divided by their number.

A value that becomes whole again has the same tensor as before, so that all other calls stay the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from keras_remat.backends import interrupts
from keras_remat.backends.base import Whole
from keras_remat.backends.slice_modes import MEAN, SAME, SUM, Mode
from keras_remat.backends.torch import in_place, private
from keras_remat.backends.torch.program import CUDA_GRANULE, PURE, WRITE, Node, Program, Stored
from keras_remat.backends.torch.recorder import Call, Layout, Ref
from keras_remat.backends.torch.slice_analysis import Analysis, View
from keras_remat.backends.torch.slice_rules import Way, part_arguments
from keras_remat.backends.torch.trace import TorchTracedStep
from keras_remat.core.graph import Op
from keras_remat.core.slices import SlicedGraph, SliceRule, Slicing, sliced_graph
from keras_remat.errors import InvalidProblemError

aten = torch.ops.aten


@dataclass(frozen=True)
class StepSlicer:
    """Rewrites one traced step (:class:`keras_remat.backends.base.Slicer`)."""

    step: TorchTracedStep

    @property
    def granule_bytes(self) -> int:
        """Returns the bytes that sizes of slices are rounded up to a multiple of."""
        return CUDA_GRANULE if self.step.device.type == "cuda" else 1

    @cached_property
    def analysis(self) -> Analysis:
        """Returns the axes of the step's values."""
        inputs, own = self.step.program.recording.inputs, len(self.step.places.own)
        return Analysis(self.step.program, self.step.graph, set(inputs[own:]), set(inputs[:own]))

    @property
    def rules(self) -> dict[int, SliceRule]:
        """Returns op id → how it may run in slices."""
        return {op_id: rule for op_id, (rule, _) in self.analysis.found.items()}

    def sliced(self, slicing: Slicing) -> TorchTracedStep:
        """Returns the step with some ops in slices.

        Raises:
            InvalidProblemError: they cannot run so.
        """
        graph, analysis = self.step.graph, self.analysis
        axes = {v.id: analysis.axis(v.id) or 0 for v in graph.values}
        made = sliced_graph(graph, self.rules, slicing, self.granule_bytes, axes)
        return _Writer(replace(self.step, slicer=self), made, analysis).step()


class _Writer:
    """Writes the program of one sliced graph."""

    def __init__(self, step: TorchTracedStep, sliced: SlicedGraph, analysis: Analysis):
        self._step, self._sliced, self._analysis = step, sliced, analysis
        self._old = step.program
        self._parts = sliced.slicing.parts
        self._layouts = list(self._old.layouts)
        self._recipes = dict(self._old.recipes)
        self._nodes: list[Node] = []
        self._bases: dict[int, int] = {}  # value → number of a tensor that spans it
        self._seen: dict[Any, int] = {}  # a view of a part → its number
        self._made: dict[Any, tuple[Layout | None, ...]] = {}  # a call → layouts of its results
        self._fake_mode = private.fake_mode()
        for before, now in sliced.whole.items():
            self._bases[now] = self._old.base(before)

    def step(self) -> TorchTracedStep:
        """Returns the step in slices."""
        graph = self._sliced.graph
        write: Mapping[str, Callable[[Op, int, int], Node]] = {
            "whole": self._whole, "part": self._part, "cut": self._cut, "start": self._start,
            "join": self._join, "sum": self._sum, "divide": self._divide,
        }  # fmt: skip
        for op, origin in zip(graph.ops, self._sliced.origins, strict=True):
            node = write[origin.role](op, origin.source, origin.part)
            node.inputs, node.after = op.inputs, set(op.after)
            self._nodes.append(node)
        program = self._program()
        reuses = {node.id: tuple(in_place.reusable(program, node)) for node in program.nodes}
        ops = tuple(replace(op, may_reuse=reuses[op.id]) for op in graph.ops)
        graph = replace(graph, ops=ops)
        return replace(
            self._step,
            graph=graph,
            handles={node.id: node for node in program.nodes},
            program=program,
            slicer=None,
            whole=Whole(self._step, replace(self._sliced, graph=graph)),
        )

    def _program(self) -> Program:
        graph, whole = self._sliced.graph, self._sliced.whole
        return self._old.rewritten(
            nodes=self._nodes,
            stored=[Stored(self._bases[v.id], v.nbytes, v.producer) for v in graph.values],
            layouts=self._layouts,
            recipes=self._recipes,
            sources={whole[v]: source for v, source in self._old.sources.items()},
            results={n: whole[v] for n, v in self._old.results.items()},
        )

    # ---------------------------------------------------------------- tensors

    def _run(self, operator: Any, args: Any, kwargs: Any) -> tuple[Layout | None, ...]:
        """Returns the layouts of a call's results. The operator itself makes them on tensors
        without memory, once for all parts that are alike."""

        def lies(argument: Any) -> Any:
            if isinstance(argument, Ref):
                return replace(self._layouts[argument.number], offset=0, storage=0)
            if isinstance(argument, (list, tuple)):
                return tuple(map(lies, argument))
            return argument

        given, named = tuple(map(lies, args)), {k: lies(v) for k, v in kwargs.items()}
        key = operator, given, tuple(named.items())
        if key not in self._made:
            with interrupts.put_off(), self._fake_mode:
                fakes, by_name = tree_map_only(Layout, Layout.tensor, (given, named))
                made = operator(*fakes, **by_name)
            results = made if isinstance(made, (list, tuple)) else (made,)
            self._made[key] = tuple(
                Layout.of(one, 0) if isinstance(one, torch.Tensor) else None for one in results
            )
        return self._made[key]

    def _tensor(self, like: Layout | None, parent: int | None = None) -> int:
        """Returns the number of a new tensor: a view of ``parent``, or one with a storage of its
        own."""
        if like is None:
            raise LookupError("a part returns no tensor where the whole does")
        number = len(self._layouts)
        offset, storage = like.offset, -1 - number
        if parent is not None:
            offset, storage = offset + self._layouts[parent].offset, self._layouts[parent].storage
        self._layouts.append(replace(like, offset=offset, storage=storage))
        return number

    def _view(self, view: View, parent: int, key: Any) -> int:
        """Returns the number of a part's view that corresponds to a view of the whole."""
        if key not in self._seen:
            call = view.call
            arguments = part_arguments(self._analysis.operands(call), view.way, self._parts)
            arguments["self"] = Ref(parent)
            args, kwargs = private.placed(call.operator, arguments)
            made = self._run(call.operator, args, kwargs)
            numbers: list[int | None] = [None] * len(made)
            number = self._tensor(made[view.at], parent)
            numbers[view.at] = self._seen[key] = number
            made_by = replace(call, args=args, kwargs=kwargs, outputs=tuple(numbers))
            self._recipes[number] = made_by, view.at, parent
        return self._seen[key]

    def _range(self, number: int, axis: int, part: int) -> int:
        """Returns the number of the view that is one part of a whole tensor."""
        key = "range", number, axis, part
        if key not in self._seen:
            layout = self._layouts[number]
            rows = layout.shape[axis] // self._parts
            shape = (*layout.shape[:axis], rows, *layout.shape[axis + 1 :])
            start = part * rows
            like = replace(layout, shape=shape, offset=start * layout.stride[axis])
            at = self._seen[key] = self._tensor(like, number)
            args = Ref(number), axis, start, start + rows
            call = replace(self._call(aten.slice.Tensor, args), outputs=(at,))
            self._recipes[at] = call, 0, number
        return self._seen[key]

    def _read(self, number: int, value: int, mode: Mode, part: int) -> tuple[int, int]:
        """Returns the number of the tensor that a part of an op reads, and its value."""
        seen = self._analysis.seen(number, value, mode)
        if seen is None:
            raise LookupError(f"tensor {number} shows no part of value {value}")
        if seen.axis is None and mode != SAME:
            now = self._sliced.whole[value]
            if not seen.views:
                return number, now
            at = self._old.recipes[seen.views[0].number][2]
        else:
            made = self._sliced.parts.get((value, part))
            now = self._sliced.cuts[value, part] if made is None else made
            at = self._bases[now]
        for view in seen.views:
            at = self._view(view, at, (view.number, view.way.axis, now))
        return at, now

    # ---------------------------------------------------------------- ops

    def _whole(self, op: Op, source: int, part: int) -> Node:
        """Returns an op that stays whole, on the whole values."""
        node, now = self._old.nodes[source], self._sliced.whole
        state = node.state
        return replace(
            node,
            id=op.id,
            reads={n: now[v] for n, v in node.reads.items()},
            outputs=[None if pair is None else (pair[0], now[pair[1]]) for pair in node.outputs],
            old={n: None if v is None else now[v] for n, v in node.old.items()},
            new={n: now[v] for n, v in node.new.items()},
            state=None if state is None else (now[state[0]], now[state[1]]),
        )

    def _part(self, op: Op, source: int, part: int) -> Node:
        node, way = self._old.nodes[source], self._analysis.found[source][1]
        call = node.call
        assert call is not None
        ids = dict(zip(self._step.graph.ops[source].outputs, op.outputs, strict=True))
        made = Node(id=op.id, kind=node.kind, phase=op.phase)
        if node.kind == WRITE:
            target = self._target(made, node, way, part, ids)
        operands = self._analysis.operands(call)
        arguments = part_arguments(operands, way, self._parts)

        def given(argument: Any, mode: Mode) -> Any:
            if isinstance(argument, (list, tuple)):
                return [given(one, mode) for one in argument]
            if not isinstance(argument, Ref):
                return argument
            if argument.number in node.new:
                return Ref(target)
            number, value = self._read(argument.number, node.reads[argument.number], mode, part)
            made.reads[number] = value
            return Ref(number)

        for name in operands.shapes:
            arguments[name] = given(arguments[name], way.inputs.get(name))
        args, kwargs = private.placed(call.operator, arguments)
        made.call = replace(call, args=args, kwargs=kwargs)
        if node.kind == WRITE:
            made.call = replace(made.call, outputs=(target,), writes=(target,))
        else:
            self._return(made, node, way, ids)
        return made

    def _target(self, made: Node, node: Node, way: Way, part: int, ids: Mapping[int, int]) -> int:
        """Returns the number of the tensor that a part of a write is given and writes."""
        ((number, value),) = node.new.items()
        before, mode = node.old[number], way.outputs[0]
        if before is not None:
            target, old = self._read(number, before, mode, part)
            self._bases[ids[value]] = self._bases[old]
            made.reads[target] = made.old[target] = old
        else:
            (memory,) = self._run(aten.clone.default, (self._piece(value, part),), {})
            self._bases[ids[value]] = self._tensor(memory)
            target, _ = self._read(number, value, mode, part)
            made.old[target] = None
        made.new[target] = ids[value]
        return target

    def _return(self, made: Node, node: Node, way: Way, ids: Mapping[int, int]) -> None:
        """Notes the results of a part.

        Raises:
            InvalidProblemError: a result is neither a part nor a term of the whole op's result.
        """
        assert made.call is not None
        results = self._run(made.call.operator, made.call.args, made.call.kwargs)
        for pair, result, mode in zip(node.outputs, results, way.outputs, strict=True):
            if pair is None:
                made.outputs.append(None)
                continue
            number, value = pair
            wanted = self._layouts[number].shape
            if isinstance(mode, int):
                wanted = (*wanted[:mode], wanted[mode] // self._parts, *wanted[mode + 1 :])
            at = self._bases[ids[value]] = self._tensor(result)
            is_term = mode not in (SUM, MEAN) or _lie_alike(
                self._layouts[at], self._layouts[number]
            )
            if self._layouts[at].shape != wanted or not is_term:
                raise InvalidProblemError(
                    f"a part of {made.call.operator} gives {self._layouts[at].shape} in strides of "
                    f"{self._layouts[at].stride} where {wanted} in {self._layouts[number].stride} "
                    "is wanted",
                    field="slices.ops",
                )
            made.outputs.append((at, ids[value]))

    # ---------------------------------------------------------------- cuts, joins and sums

    def _piece(self, value: int, part: int) -> Ref:
        """Returns one part of a whole value, as a view; the whole value if it is one number."""
        number, axis = self._old.base(value), self._analysis.axis(value)
        return Ref(number if axis is None else self._range(number, axis, part))

    def _call(self, operator: Any, args: Any, **kwargs: Any) -> Call:
        return Call(operator, args, kwargs, (), (), "", (), 0)

    def _pure(self, op: Op, number: int, call: Call, *reads: int) -> Node:
        """Returns a node that makes a value of others.

        Args:
            number: number of the tensor that spans the value.
            reads: numbers of the tensors it reads.
        """
        (made,) = op.outputs
        self._bases[made] = number
        given = dict(zip(reads, op.inputs, strict=True))
        call = replace(call, outputs=(number,), phase=op.phase)
        return Node(
            id=op.id, kind=PURE, call=call, phase=op.phase, reads=given, outputs=[(number, made)]
        )

    def _cut(self, op: Op, value: int, part: int) -> Node:
        piece = self._piece(value, part)
        (made,) = self._run(aten.clone.default, (piece,), {})
        return self._pure(
            op, self._tensor(made), self._call(aten.clone.default, (piece,)), piece.number
        )

    def _start(self, op: Op, value: int, part: int) -> Node:
        number = self._old.base(value)
        layout = self._layouts[number]
        call = self._call(
            aten.empty_strided.default, (list(layout.shape), list(layout.stride)),
            dtype=layout.dtype, device=layout.device,
        )  # fmt: skip
        return self._pure(op, number, call)

    def _join(self, op: Op, value: int, part: int) -> Node:
        (buffer, filled), (joined,) = op.inputs, op.outputs
        target, number = self._piece(value, part), self._bases[filled]
        self._bases[joined] = self._old.base(value)
        call = replace(
            self._call(aten.copy_.default, (target, Ref(number))),
            outputs=(target.number,), writes=(target.number,), phase=op.phase,
        )  # fmt: skip
        return Node(
            id=op.id, kind=WRITE, call=call, phase=op.phase,
            reads={target.number: buffer, number: filled},
            old={target.number: buffer}, new={target.number: joined},
        )  # fmt: skip

    def _sum(self, op: Op, value: int, part: int) -> Node:
        read = tuple(self._bases[v] for v in op.inputs)
        call = self._call(aten.add.Tensor, tuple(map(Ref, read)))
        return self._pure(op, self._old.base(value), call, *read)

    def _divide(self, op: Op, value: int, part: int) -> Node:
        (read,) = (self._bases[v] for v in op.inputs)
        call = self._call(aten.div.Scalar, (Ref(read), self._parts))
        return self._pure(op, self._old.base(value), call, read)


def _lie_alike(one: Layout, other: Layout) -> bool:
    """Returns whether two tensors lie in the same way; strides of axes of size 1 do not count."""
    strides = zip(one.shape, one.stride, other.stride, strict=True)
    return (one.shape, one.offset, one.dtype) == (other.shape, other.offset, other.dtype) and all(
        size == 1 or mine == others for size, mine, others in strides
    )
