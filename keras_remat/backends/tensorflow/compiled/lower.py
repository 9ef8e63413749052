"""A schedule as one compiled step: :mod:`keras_remat.backends.xla.protect` on TensorFlow.

The policy writes ``NodeDef``\\ s; they are imported once into a ``tf.function(jit_compile=True)``
that reads every variable before and assigns the changed ones after.

The guard of a value ``x`` is ``select(condition, 0, x)`` with a condition from
:mod:`keras_remat.backends.tensorflow.barrier`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.barrier import UNSIGNED, joined_bits
from keras_remat.backends.tensorflow.compiled.flatten import FlatProgram, Literal, nbytes
from keras_remat.backends.tensorflow.compiled.kinds import KINDS
from keras_remat.backends.tensorflow.compiled.trace import CompiledStep
from keras_remat.backends.tensorflow.profiler.device import on_gpu
from keras_remat.backends.xla.protect import Run
from keras_remat.core.schedule import Schedule


class _Tensor:
    """A tensor that was written down."""

    __slots__ = ("dtype", "name", "shape")

    def __init__(self, name: str, dtype: Any, shape: tuple[int, ...] | None):
        self.name, self.dtype, self.shape = name, dtype, shape


class _Writer:
    """TensorFlow as :class:`keras_remat.backends.xla.protect.Writer`."""

    def __init__(self, program: FlatProgram, uses_branches: bool):
        self._program = program
        self.uses_branches = uses_branches
        self.document = tf.compat.v1.GraphDef(versions=program.versions, library=program.library)
        self._literals: dict[str, _Tensor] = {}
        self._constants: dict[Any, _Tensor] = {}
        self.functions: list[
            Any
        ] = []  # an executable looks its branches up by name for as long as it lives
        self._branches: dict[tuple[Any, ...], list[str]] = {}
        self._names: set[str] = set()
        self.given = [
            _Tensor(f"{name}:0", program.dtypes[at], program.shapes[at])
            for at, name in enumerate(program.given)
        ]
        self._names.update(program.given)

    # ---------------------------------------------------------------- equations

    def write(self, at: int, inputs: Sequence[Any]) -> list[Any]:
        equation = self._program.equations[at]
        name = self._fresh(equation.source.name)
        self.document.node.append(_copied(equation.source, name, [x.name for x in inputs]))
        return [
            _Tensor(f"{name}:{i}", self._program.dtypes[o], self._program.shapes[o])
            for i, o in enumerate(equation.outputs)
        ]

    def literal(self, atom: Any) -> Any:
        known = self._literals.get(atom.name)
        if known is None:
            node = self._program.constants[atom.name]
            self._names.add(atom.name)
            self.document.node.append(_copied(node, atom.name, ()))
            shape = tuple(d.size for d in node.attr["value"].tensor.tensor_shape.dim)
            known = self._literals[atom.name] = _Tensor(f"{atom.name}:0", atom.dtype, shape)
        return known

    array = literal

    def literal_bytes(self, atom: Any) -> int:
        assert isinstance(atom, Literal)
        return atom.nbytes

    def is_inexact(self, value: Any) -> bool:
        return bool(value.dtype.is_floating or value.dtype.is_complex)

    def may_guard(self, equation: Any, value: Any) -> bool:
        """XLA wants shapes, axes and permutations when it compiles: integers, and no random
        keys."""
        if equation.kind in KINDS.elementwise:
            return True
        return bool(
            value.dtype.is_floating
            or value.dtype.is_complex
            or value.dtype.is_bool
            or value.dtype.is_unsigned
        )

    # ---------------------------------------------------------------- guards

    def never(self, triggers: Sequence[Any], in_branch: bool = False) -> Any:
        if in_branch:
            small = min(triggers, key=lambda x: nbytes(x.shape, x.dtype))
            return self._equals_zero(self._bits_in_branch(triggers, self.never([small])))
        bits = self._constant(1, tf.uint32)
        for x in triggers:
            bits = self._node("BitwiseOr", [bits, self._first_bits(x)], tf.uint32, (), T=tf.uint32)
        return self._equals_zero(bits)

    def _equals_zero(self, bits: _Tensor) -> _Tensor:
        return self._node("Equal", [bits, self._constant(0, tf.uint32)], tf.bool, (), T=tf.uint32)

    def _bits_in_branch(self, triggers: Sequence[_Tensor], condition: _Tensor) -> _Tensor:
        """The bits of the triggers, taken in the branch for a condition that is false."""
        key = tuple((x.shape, x.dtype) for x in triggers)
        if key not in self._branches:
            branches = (
                lambda *operands: tf.constant(1, tf.uint32),
                lambda *operands: _summed(joined_bits(operands)),
            )
            specs = [tf.TensorSpec(x.shape, x.dtype) for x in triggers]
            self._branches[key] = [self._define(branch, specs) for branch in branches]
        return self._if(
            "remat_trigger", condition, triggers, [(tf.uint32, ())], self._branches[key]
        )[0]

    def guard(self, value: Any, condition: Any) -> Any:
        return self._node(
            "SelectV2",
            [condition, self._constant(False if value.dtype == tf.bool else 0, value.dtype), value],
            value.dtype,
            value.shape,
            T=value.dtype,
        )

    def _first_bits(self, x: _Tensor) -> _Tensor:
        """The first element of a tensor as ``uint32`` (wider elements keep their low half)."""
        if x.shape:
            rank = len(x.shape)
            begin, size = (self._constant([number] * rank, tf.int32) for number in (0, 1))
            x = self._node(
                "Slice", [x, begin, size], x.dtype, (1,) * rank, T=x.dtype, Index=tf.int32
            )
            x = self._node(
                "Reshape",
                [x, self._constant([], tf.int32)],
                x.dtype,
                (),
                T=x.dtype,
                Tshape=tf.int32,
            )
        if x.dtype.is_complex:
            real = tf.float32 if x.dtype == tf.complex64 else tf.float64
            x = self._node("Real", [x], real, (), T=x.dtype, Tout=real)
        if x.dtype.is_floating:
            unsigned = UNSIGNED[x.dtype.size]
            x = self._node("Bitcast", [x], unsigned, (), T=x.dtype, type=unsigned)
        return (
            x
            if x.dtype == tf.uint32
            else self._node("Cast", [x], tf.uint32, (), SrcT=x.dtype, DstT=tf.uint32)
        )

    def _constant(self, value: Any, dtype: Any) -> _Tensor:
        key = (repr(value), dtype)
        if key not in self._constants:
            node = self.document.node.add(name=self._fresh("remat_constant"), op="Const")
            node.attr["dtype"].type = dtype.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
            self._constants[key] = _Tensor(
                f"{node.name}:0", dtype, () if not isinstance(value, list) else (len(value),)
            )
        return self._constants[key]

    def _node(
        self, kind: str, inputs: Sequence[_Tensor], dtype: Any, shape: Any, **types: Any
    ) -> _Tensor:
        node = self.document.node.add(name=self._fresh(f"remat_{kind.lower()}"), op=kind)
        node.input.extend(x.name for x in inputs)
        for attribute, of in types.items():
            node.attr[attribute].type = of.as_datatype_enum
        return _Tensor(f"{node.name}:0", dtype, shape)

    def _fresh(self, wanted: str) -> str:
        name, count = wanted, len(self._names)
        while name in self._names:
            name, count = f"{wanted}/remat_{count}", count + 1
        self._names.add(name)
        return name

    # ---------------------------------------------------------------- random numbers

    def draw(
        self, equations: Sequence[int], given: dict[int, Any], wanted: Sequence[int], condition: Any
    ) -> list[Any]:
        program = self._program
        names = self._branches.get(tuple(equations))
        if names is None:
            branches = (
                self._nothing_branch(wanted),
                self._drawing_branch(equations, list(given), wanted),
            )
            specs = [
                tf.TensorSpec(program.shapes[number], program.dtypes[number]) for number in given
            ]
            names = self._branches[tuple(equations)] = [
                self._define(branch, specs) for branch in branches
            ]
        results = [(program.dtypes[n], program.shapes[n]) for n in wanted]
        return self._if("remat_draw", condition, list(given.values()), results, names)

    def _if(
        self,
        name: str,
        condition: _Tensor,
        operands: Sequence[_Tensor],
        results: Sequence[tuple[Any, Any]],
        branches: Sequence[str],
    ) -> list[_Tensor]:
        """Writes a condition; ``results`` are dtypes and shapes, ``branches`` the functions for
        true and false."""
        node = self.document.node.add(name=self._fresh(name), op="StatelessIf")
        node.input.extend([condition.name, *(x.name for x in operands)])
        node.attr["Tcond"].type = tf.bool.as_datatype_enum
        node.attr["Tin"].list.type.extend(x.dtype.as_datatype_enum for x in operands)
        node.attr["Tout"].list.type.extend(dtype.as_datatype_enum for dtype, _ in results)
        for attribute, branch in zip(("then_branch", "else_branch"), branches, strict=True):
            node.attr[attribute].func.name = branch
        return [
            _Tensor(f"{node.name}:{i}", dtype, shape) for i, (dtype, shape) in enumerate(results)
        ]

    def _nothing_branch(self, wanted: Sequence[int]) -> Callable[..., list[Any]]:
        program = self._program
        return lambda *operands: [
            tf.zeros(program.shapes[number], program.dtypes[number]) for number in wanted
        ]

    def _drawing_branch(
        self, equations: Sequence[int], given: Sequence[int], wanted: Sequence[int]
    ) -> Callable[..., list[Any]]:
        program = self._program

        def draw(*operands: Any) -> list[Any]:
            inner = _Writer(program, uses_branches=False)
            known = {
                number: _Tensor(
                    f"operand_{number}:0", program.dtypes[number], program.shapes[number]
                )
                for number in given
            }
            mapped = {
                known[number].name: operand for number, operand in zip(given, operands, strict=True)
            }
            for at in equations:
                equation = program.equations[at]
                inputs = [
                    known[a] if isinstance(a, int) else inner.literal(a) for a in equation.inputs
                ]
                known.update(zip(equation.outputs, inner.write(at, inputs), strict=True))
            names = [known[number].name for number in wanted]
            return list(tf.graph_util.import_graph_def(inner.document, mapped, names, name=""))

        return draw

    def _define(self, branch: Callable[..., list[Any]], specs: Sequence[Any]) -> str:
        """Adds a function to the library and returns its name."""
        function = tf.function(branch, autograph=False).get_concrete_function(*specs)
        definition = private.function_definition(function)
        self.document.library.function.add().CopyFrom(definition)
        self.functions.append(function)
        return str(definition.signature.name)


def _summed(bits: Any) -> Any:
    """An odd number made of ``bits`` by a running sum.

    XLA computes both branches of a condition and selects where they hold only what it thinks cheap,
    and what they read is fused with its source; a running sum, even of two numbers, is not cheap.
    """
    sums = tf.cumsum(tf.bitcast(tf.stack([bits, tf.constant(1, tf.uint32)]), tf.int32))
    return tf.bitcast(sums[1], tf.uint32) | tf.constant(1, tf.uint32)


def _copied(source: Any, name: str, inputs: Sequence[str]) -> Any:
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(source)
    node.name = name
    del node.input[:]
    node.input.extend(inputs)
    for attribute in ("_output_shapes", "_class"):
        if attribute in node.attr:
            del node.attr[attribute]
    return node


class LoweredStep:
    """A compiled step that runs one schedule; call it with a batch of the traced shape.

    Attributes:
        traced: what it was made from.
        schedule: the order it stands for.
    """

    def __init__(self, traced: CompiledStep, schedule: Schedule):
        self.traced, self.schedule = traced, schedule
        stateless, program = traced.stateless, traced.program
        writer = _Writer(program, uses_branches=not on_gpu())
        early = range(stateless.batch, program.n_given)
        run = Run(
            program,
            KINDS,
            traced.graph,
            traced.handles,
            traced.numbers,
            writer,
            writer.given,
            early,
        )
        for op_id in schedule.order:
            run.op(op_id)
        returned = [run.output(atom).name for atom in stateless.returned]
        written = {number: run.output(atom).name for number, atom in stateless.written.items()}
        names = [x.name for x in writer.given]
        batch = stateless.batch

        def remat_step(*leaves: Any) -> Any:
            variables = [
                tf.raw_ops.ReadVariableOp(resource=handle, dtype=program.dtypes[batch + at])
                for at, handle in enumerate(stateless.handles)
            ]
            captured = map(private.capture, stateless.captured)
            given = dict(zip(names, [*leaves, *variables, *captured], strict=True))
            own = [n for n in dict.fromkeys([*returned, *written.values()]) if n not in given]
            used = {i for node in writer.document.node for i in node.input}
            mapped = {name: tensor for name, tensor in given.items() if name in used}
            found = (
                dict(
                    zip(
                        own,
                        tf.graph_util.import_graph_def(writer.document, mapped, own, name=""),
                        strict=True,
                    )
                )
                | given
            )
            for number, name in written.items():
                tf.raw_ops.AssignVariableOp(
                    resource=stateless.handles[number - batch], value=found[name]
                )
            return [found[name] for name in returned]

        specs = [tf.TensorSpec(program.shapes[at], program.dtypes[at]) for at in range(batch)]
        self._functions = writer.functions
        function = tf.function(remat_step, input_signature=specs, autograph=False, jit_compile=True)
        self._function = function.get_concrete_function()

    def __call__(self, batch: Any) -> Any:
        """Runs one step; returns what ``train_step`` returns."""
        leaves = [
            tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(batch) if not _is_none(leaf)
        ]
        outputs = iter(self._function(*leaves))
        structure = self.traced.output_structure
        flat = [
            next(outputs) if isinstance(leaf, tf.Tensor) else leaf
            for leaf in tf.nest.flatten(structure)
        ]
        return tf.nest.pack_sequence_as(structure, flat)


def _is_none(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, tf.experimental.Optional)


def lower(traced: CompiledStep, schedule: Schedule) -> LoweredStep:
    """Returns a step that runs a schedule; it is compiled when it is called first.

    Args:
        traced: from :func:`~keras_remat.backends.tensorflow.compiled.trace.trace`.
        schedule: a legal order for ``traced.graph``.
    """
    return LoweredStep(traced, schedule)
