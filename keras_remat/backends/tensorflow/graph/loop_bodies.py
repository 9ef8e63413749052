"""Finds how the body of a TensorFlow loop runs on a slice of the batch.

A body is written into a graph at two batch sizes. The table of ops (:mod:`.slice_rules`) gives, op
by op, the modes of the outputs from those of the inputs. A tensor that the loop carries from round
to round must keep its mode. The shapes at both sizes must agree with the modes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from keras_remat.backends.tables import names
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.effects import has_effect
from keras_remat.backends.tensorflow.graph.lists import elements_of
from keras_remat.backends.tensorflow.graph.nodes import (
    data_inputs,
    node_of,
    numbers_of,
    shape_of,
    tensor_key,
)
from keras_remat.backends.tensorflow.graph.slice_rules import (
    RESHAPING,
    Operands,
    modes_of,
    views_to,
)
from keras_remat.backends.tensorflow.graph.step import TensorFlowStep

#: Mode of a tensor in a part of the loop. ``"whole"``: the same in all parts. ``"part"``: a share
#: along the first axis. ``"sum"``: a term of a sum. ``"size"``: ints that depend on the batch size.
#: ``"parts"``, ``"wholes"`` and ``"sizes"`` are lists of such tensors; ``"list"`` is a list whose
#: elements' mode is not known yet.
BodyMode = Literal["whole", "part", "sum", "size", "list", "parts", "wholes", "sizes"]
_WHOLE: BodyMode = "whole"
_PART: BodyMode = "part"
_SUM: BodyMode = "sum"
#: Mode of a list → mode of its elements.
ELEMENTS: Mapping[Any, BodyMode] = {"parts": "part", "wholes": "whole", "sizes": "size"}
#: Linear ops: they turn terms of a sum into terms of a sum.
_LINEAR = names("""
    Add AddV2 AddN Sub Neg Identity Reshape Squeeze ExpandDims Transpose ConcatV2 Pad StridedSlice
    StridedSliceGrad Slice Split
""")
#: Most visits of a body until the carried modes no longer change.
_MOST_ROUNDS = 4


class StaysWholeError(Exception):
    """Reports why a group of ops does not run in slices."""


class Bodies:
    """Writes the functions of loops into graphs at both batch sizes, and finds the modes of their
    tensors."""

    def __init__(self, step: TensorFlowStep, half: TensorFlowStep):
        self._steps = step, half

    def carried(
        self, node: Any, given: Sequence[BodyMode], is_zero: Sequence[bool]
    ) -> tuple[BodyMode, ...]:
        """Returns the modes of the tensors that a loop carries from round to round.

        Args:
            node: the loop.
            given: modes of its inputs.
            is_zero: for every input whether it is floating-point and all zeros.

        Raises:
            StaysWholeError: a round changes a mode, or the number of rounds depends on a part.
        """
        body = self._function(node, "body")
        # a tensor that begins with zeros may be a sum
        modes: tuple[BodyMode, ...] = tuple(
            "sum" if mode == "whole" and starts else mode
            for mode, starts in zip(given, is_zero, strict=True)
        )
        for _ in range(_MOST_ROUNDS):
            carried = _after_round(modes, body.returned(modes))
            if carried == modes:
                break
            modes = carried
        else:
            raise StaysWholeError(f"what {node.name} carries is not the same in every round")
        if self._function(node, "cond").returned(modes) != ("whole",):
            raise StaysWholeError(f"{node.name} ends by what it computes")
        return modes

    def _function(self, node: Any, attribute: str) -> _Function:
        written = [self._written(step, step.nodes[node.name], attribute) for step in self._steps]
        return _Function(*written)

    def _written(self, step: TensorFlowStep, node: Any, attribute: str) -> _Written:
        name, captures = node.attr[attribute].func.name, step.replicas[0].captures
        definition = next(f for f in step.library.function if f.signature.name == name)
        dtypes = [tf.as_dtype(number) for number in node.attr["T"].list.type]
        found: list[_Written] = []

        def operand(tensor: str, dtype: Any) -> Any:
            owner = views_to(step, tensor)[-1]
            external = captures.get(node_of(owner))
            if external is not None and external.dtype == tf.resource:
                return private.capture(external)
            if dtype == tf.variant:
                elements = elements_of(step.nodes, step.tensor_shapes.get, owner)
                if elements is None:
                    raise StaysWholeError(f"the elements of {owner} are not known")
                return private.list_placeholder(*elements)
            return tf.compat.v1.placeholder(dtype, step.tensor_shapes.get(tensor))

        def build() -> list[Any]:
            tf.graph_util.import_graph_def(tf.compat.v1.GraphDef(library=step.library), name="")
            read = zip(map(tensor_key, data_inputs(node)), dtypes, strict=True)
            given = [operand(tensor, dtype) for tensor, dtype in read]
            operations, returned = private.import_body(definition, given, attribute)
            found.append(_Written(given, operations, returned))
            return []

        private.build_function(build, [])
        return found[0]


def _after_round(
    given: Sequence[BodyMode], made: Sequence[BodyMode | None]
) -> tuple[BodyMode, ...]:
    """Returns the carried modes after one more round.

    A tensor that turns out not to be a sum becomes ``"whole"``. The other modes then stay for now,
    because this round derived them from the wrong one.

    Args:
        given: modes at the beginning of the round.
        made: modes at its end.
    """
    pairs = list(zip(given, made, strict=True))
    if any(before == "sum" != after for before, after in pairs):
        return tuple("whole" if before == "sum" != after else before for before, after in pairs)
    return tuple(_merged(before, after) for before, after in pairs)


def _merged(before: BodyMode, after: BodyMode | None) -> BodyMode:
    if after == before or (after == "list" and before in ELEMENTS):
        return before
    if before == "list" and after in ELEMENTS and after is not None:
        return after
    raise StaysWholeError(f"a round makes {after} of {before}")


@dataclass(frozen=True)
class _Written:
    """Holds a function written into a graph.

    Args:
        given: tensors of its arguments.
        operations: all of its operations.
        returned: tensors that it returns.
    """

    given: Sequence[Any]
    operations: Sequence[Any]
    returned: Sequence[Any]


class _Function:
    """Finds the modes of a function's tensors.

    Args:
        whole, half: the function at both batch sizes.

    Raises:
        StaysWholeError: the function has other ops at half the batch.
    """

    def __init__(self, whole: _Written, half: _Written):
        self._whole = whole
        self._ops = {op.name: op for op in whole.operations}
        self._half = {op.name: op for op in half.operations}
        if _wiring(self._ops) != _wiring(self._half):
            raise StaysWholeError("a loop has other ops at half the batch")

    def returned(self, given: Sequence[BodyMode]) -> tuple[BodyMode | None, ...]:
        """Returns the modes of the function's results; ``None`` for an unknown one.

        Args:
            given: modes of the arguments.
        """
        known: dict[str, BodyMode | None] = {
            tensor.name: mode for tensor, mode in zip(self._whole.given, given, strict=True)
        }
        sources = {
            name: [t.op.name for t in op.inputs if t.op.name in self._ops]
            for name, op in self._ops.items()
        }
        for name in TopologicalSorter(sources).static_order():
            op, half = self._ops[name], self._half.get(name)
            if half is None:  # a constant that has been merged with another at half the batch
                raise StaysWholeError(f"{name} is not there at half the batch")
            made = _made(op, half, [known[tensor.name] for tensor in op.inputs])
            for at, mode in enumerate(made):
                known[op.outputs[at].name] = mode
        return tuple(known[tensor.name] for tensor in self._whole.returned)


def _wiring(ops: Mapping[str, Any]) -> dict[str, tuple[str, list[str]]]:
    """Returns name of an op → its type and its inputs; constants are left out."""
    return {
        name: (
            op.type,
            [t.name for t in op.inputs if t.op.name in ops and t.op.type != "Const"],
        )
        for name, op in ops.items()
        if op.type != "Const"
    }


def _made(op: Any, half: Any, given: Sequence[BodyMode | None]) -> Sequence[BodyMode | None]:
    """Returns the modes of the outputs of a body's op; ``None`` for unknown ones.

    Args:
        op, half: the op at both batch sizes.
        given: modes of its inputs.
    """
    found: Sequence[BodyMode | None] = ()
    if op.type == "Const":
        found = (_constant_mode(op, half),)
    elif None in given or op.type in kinds.CONTROL_FLOW:
        pass
    elif (of_lists := _list_modes(op.type, given)) is not None:
        return of_lists
    elif has_effect(op.type):
        pass
    elif set(given) <= {"whole"}:
        found = [_WHOLE] * len(op.outputs)
    elif op.type in ("Shape", "ShapeN"):
        found = ["size" if mode == "part" else "whole" for mode in given]
    elif "sum" in given:
        found = _sum_modes(op, given)
    elif op.type in RESHAPING:
        found = (given[0],) if given[0] in ("part", "whole") else ()
    else:
        found = _table_modes(op, given)
    checked = (
        _has_mode(a, b, mode) for a, b, mode in zip(op.outputs, half.outputs, found, strict=False)
    )
    return found if found and all(checked) else (None,) * len(op.outputs)


def _constant_mode(op: Any, half: Any) -> BodyMode | None:
    one, other = (tf.make_ndarray(of.node_def.attr["value"].tensor) for of in (op, half))
    if np.array_equal(one, other):
        return "whole"
    if one.ndim == 1 and one.shape == other.shape and np.issubdtype(one.dtype, np.integer):
        return "size"
    is_uniform = one.size and other.size and np.all(one == other.flat[0])
    return "part" if is_uniform and np.all(other == one.flat[0]) else None


def _list_modes(kind: str, given: Sequence[BodyMode | None]) -> Sequence[BodyMode | None] | None:
    """Returns the modes of the outputs of an op on lists; ``None`` if the op has no list."""
    of_list: Mapping[Any, BodyMode] = {mode: of for of, mode in ELEMENTS.items()}
    if kind in ("EmptyTensorList", "TensorListReserve"):
        return ("list",)
    if not given or given[0] not in ("list", *ELEMENTS):
        return None
    if kind == "TensorListGetItem":
        return (ELEMENTS.get(given[0]),)
    if kind in ("TensorListElementShape", "TensorListLength"):
        return ("size",) if kind == "TensorListElementShape" else ("whole",)
    if kind == "TensorListPopBack":
        return given[0], ELEMENTS.get(given[0])
    if kind in ("TensorListPushBack", "TensorListSetItem"):
        written = of_list.get(given[1 if kind == "TensorListPushBack" else 2])
        return (written if given[0] in ("list", written) else None,)
    kinds_of_lists = set(given) - {"list"}
    if kind in ("Identity", "ZerosLike", "AddN") and len(kinds_of_lists) < 2:
        return (next(iter(kinds_of_lists), "list"),)
    return (None,)


def _sum_modes(op: Any, given: Sequence[BodyMode | None]) -> Sequence[BodyMode | None]:
    """Returns the modes of the outputs of an op on terms of a sum; empty for unknown ones."""
    scales = {"Mul": (["sum", "whole"], ["whole", "sum"]), "RealDiv": (["sum", "whole"],)}
    if list(given) in scales.get(op.type, ()):
        return ("sum",)
    if op.type not in _LINEAR:
        return ()
    others = [t for t, mode in zip(op.inputs, given, strict=True) if mode != "sum"]
    if any(mode not in ("sum", "whole") for mode in given):
        return ()
    if any(tensor.dtype.is_floating and not _is_zero(tensor) for tensor in others):
        return ()
    return [_SUM] * len(op.outputs)


def _is_zero(tensor: Any) -> bool:
    node = tensor.op.node_def
    return bool(
        tensor.op.type == "ZerosLike"
        or (tensor.op.type == "Const" and not np.any(tf.make_ndarray(node.attr["value"].tensor)))
    )


def _table_modes(op: Any, given: Sequence[BodyMode | None]) -> Sequence[BodyMode | None]:
    """Returns the modes of an op's outputs by the table of ops; empty for unknown ones."""
    shapes = [shape_of(tensor) for tensor in op.inputs]
    result = shape_of(op.outputs[0]) if op.outputs else None
    if result is None or None in shapes:
        return ()
    constants = {at: known for at, t in enumerate(op.inputs) if (known := _numbers(t))}
    found = modes_of(Operands(op.node_def, [shape or () for shape in shapes], result, constants))
    if found is None or found[1] == "mean":
        return ()
    allowed: Mapping[str, tuple[BodyMode, ...]]
    allowed = {"part": ("part",), "whole": ("whole",), "shape": ("size", "whole"), "counter": ()}
    if any(mode not in allowed[asked] for mode, asked in zip(given, found[0], strict=True)):
        return ()
    return [_SUM if found[1] == "sum" else _PART] * len(op.outputs)


def _numbers(tensor: Any) -> list[int] | None:
    """Returns the numbers of a small integer constant or of a shape; ``None`` for others."""
    op = tensor.op
    if op.type in ("Shape", "ShapeN"):
        shape = shape_of(op.inputs[tensor.value_index])
        return None if shape is None else list(shape)
    return numbers_of(op.node_def)


def _has_mode(whole: Any, half: Any, mode: BodyMode | None) -> bool:
    """Returns whether a tensor's shapes at both batch sizes agree with its mode."""
    one, other = shape_of(whole), shape_of(half)
    if mode != "part":
        return one == other
    return one is not None and bool(other) and one == _doubled(other)


def _doubled(shape: Any) -> tuple[int, ...]:
    return (2 * shape[0], *shape[1:])
