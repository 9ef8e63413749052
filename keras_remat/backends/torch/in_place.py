"""Finds the ops that take over the memory of a value that dies with them."""

from __future__ import annotations

import math
from typing import Any

import torch

from keras_remat.backends.torch import private
from keras_remat.backends.torch.program import PURE, WRITE, Node, Program
from keras_remat.backends.torch.recorder import Ref


def written_in_place(operator: Any) -> Any:
    """Returns the operator that writes its first argument and computes the same bits. Returns
    ``None`` if there is none, or if the operator does not work element by element."""
    if torch.Tag.pointwise not in operator.tags or operator._schema.is_mutable:
        return None
    first = operator._schema.arguments[:1]
    if not first or first[0].name != "self" or str(first[0].type) != "Tensor":
        return None
    return private.overload_like(operator, f"{private.schema_name(operator)}_")


def without_writes(operator: Any) -> Any:
    """Returns the operator that returns what another one writes into its first argument; ``None``
    if there is none."""
    name = private.schema_name(operator)
    return private.overload_like(operator, name[:-1]) if name.endswith("_") else None


def reusable(program: Program, node: Node) -> tuple[int, ...]:
    """Returns the values whose memory a node takes over if it is their last reader."""
    if node.kind == WRITE:
        return tuple(v for v in node.old.values() if v is not None and v not in program.sources)
    if node.kind != PURE or node.call is None or len(node.outputs) != 1 or node.predicate:
        return ()
    (returned,) = node.outputs
    arguments = node.call.args
    if returned is None or not arguments or not isinstance(arguments[0], Ref):
        return ()
    if written_in_place(node.call.operator) is None:
        return ()
    given = arguments[0].number
    value = node.reads[given]
    is_its_own = (
        value not in program.sources
        and program.is_whole(program.canonical(given), value)
        and program.layouts[given].is_same(program.layouts[returned[0]])
        and program.layouts[given].device == program.layouts[returned[0]].device
        and program.stored[value].nbytes == program.stored[returned[1]].nbytes
        and sum(read == value for read in node.reads.values()) == 1
        and node.call.reads.count(given) == 1
        and not _lies_as_others_do(program, node, returned[0])
    )
    return (value,) if is_its_own else ()


def _lies_as_others_do(program: Program, node: Node, returned: int) -> bool:
    """Returns whether an op computes a row or column of a matrix from several tensors.

    The strides of such a result are not known. Fake tensors and real ones differ in the strides of
    an axis of one place, and a result has the strides of one argument or of another. A matrix
    product that reads it rounds by them.
    """
    shape = program.layouts[returned].shape
    if len(shape) < 2 or math.prod(shape) != max(shape):
        return False
    return sum(program.layouts[number].shape == shape for number in node.reads) > 1
