"""Finds the bytes of the elements in tensor lists, which loops pass on as handles.

A loop keeps the values its gradient needs in lists, and so does a ``TensorArray``. A list is a
scalar of type variant; each element has its own buffer. The op that makes the list gives the number
and the size of its elements. The loop's body shows whose buffers they are: a variable that is read
in every iteration is pushed on a list without a copy.

Reference: ``while_v2.py`` (the accumulators) and ``list_kernels.cc`` of TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from graphlib import TopologicalSorter
from math import prod
from typing import Any, NamedTuple

import tensorflow as tf

from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.nodes import (
    data_inputs,
    node_of,
    numbers_of,
    outputs_of,
    split_input,
    tensor_key,
)
from keras_remat.backends.tensorflow.memory.best_fit import rounded

#: Ops that put their last input into a list.
WRITES = ("TensorListPushBack", "TensorListSetItem")
_RESERVES = ("EmptyTensorList", "TensorListReserve")
_BEGINS = (*_RESERVES, "TensorListFromTensor")
#: Ops that make a list whose elements are like those of their first input.
_PASSES_ON = ("Identity", "ZerosLike", "AddN", "AddV2", *WRITES, "TensorListPopBack")


class _TensorList(NamedTuple):
    """Describes the list behind a tensor: bytes of an element, number of elements, and bytes of the
    elements that were made with the list."""

    element_bytes: int
    length: int
    held_bytes: int = 0

    def full(self) -> _TensorList:
        return self._replace(held_bytes=self.element_bytes * self.length)


_UNKNOWN = _TensorList(0, 0)


def held_bytes(
    nodes: Mapping[str, Any],
    library: Any,
    shapes: Mapping[str, tuple[tuple[int, ...] | None, Any]],
    smallest_bytes: int = 0,
) -> dict[str, int]:
    """Returns tensor name → bytes of the elements that were made with the list.

    A buffer in two lists is counted in one of them. Lists of unknown length or element shape are
    left out, and so are lists inside a loop's body, which are workspace.

    Args:
        nodes: nodes of a graph, by name.
        library: its functions.
        shapes: tensor name → static shape and dtype.
        smallest_bytes: bytes of the smallest element that counts, as in the allocator.
    """
    lists = _Lists(nodes, {f.signature.name: f for f in library.function}, shapes)
    return {
        tensor: of.held_bytes
        for tensor, of in lists.known.items()
        if of.held_bytes and of.element_bytes >= smallest_bytes
    }


def elements_of(
    nodes: Mapping[str, Any],
    shape_of: Callable[[str], tuple[int, ...] | None],
    tensor: str,
) -> tuple[Any, Any] | None:
    """Returns the shape of a list's elements, as far as known, and their dtype; ``None`` where
    another graph makes the list.

    Args:
        nodes: nodes of a graph, by name.
        shape_of: returns the static shape of a tensor, given its name.
        tensor: the list.
    """
    name, index = split_input(tensor)
    node = nodes.get(name)
    while node is not None and node.op not in _BEGINS:
        each = "While" in node.op or node.op == "IdentityN"  # output i continues input i
        if not each and node.op not in _PASSES_ON:
            return None
        name, index = split_input(data_inputs(node)[index if each else 0])
        node = nodes.get(name)
    if node is None:
        return None
    dtype = tf.as_dtype(node.attr["element_dtype"].type)
    read = tensor_key(node.input[0])
    if node.op == "TensorListFromTensor":
        shape = shape_of(read)
        return tf.TensorShape(shape[1:] if shape else None), dtype
    numbers = nodes.get(node_of(read))
    if numbers is None or numbers.op != "Const":
        return tf.TensorShape(None), dtype
    sizes = tf.make_ndarray(numbers.attr["value"].tensor)
    known = [None if n < 0 else int(n) for n in sizes] if sizes.ndim else None
    return tf.TensorShape(known), dtype


class _Lists:
    """Follows lists through a graph.

    Attributes:
        known: tensor name → the list behind it.
    """

    def __init__(self, nodes: Mapping[str, Any], functions: Mapping[str, Any], shapes: Any):
        self._nodes, self._functions, self._shapes = nodes, functions, shapes
        self.known: dict[str, _TensorList] = {}
        sources = {name: list(map(node_of, node.input)) for name, node in nodes.items()}
        for name in TopologicalSorter(sources).static_order():
            if name not in nodes:  # a captured tensor has no node
                continue
            for at, tensor in enumerate(outputs_of(name, shapes)):
                if shapes[tensor][1] == tf.variant:
                    self.known[tensor] = self._made(nodes[name], at)

    def _made(self, node: Any, index: int) -> _TensorList:
        """Returns the list that a node makes of its inputs."""
        lists = [self.known.get(tensor_key(i), _UNKNOWN) for i in data_inputs(node)]
        if node.op in _RESERVES:
            return self._reserved(node)
        if node.op == "TensorListFromTensor":
            shape, dtype = self._shapes.get(tensor_key(node.input[0]), (None, None))
            return _UNKNOWN if not shape else _TensorList(_bytes(shape[1:], dtype), shape[0]).full()
        if "While" in node.op:
            return self._after_loop(node, index, lists)
        source = next((of for of in lists if of.length), _UNKNOWN)
        if node.op in kinds.VIEWS:
            return source._replace(held_bytes=0)
        return source.full()

    def _reserved(self, node: Any) -> _TensorList:
        shape, count = (self._numbers(node.input[at]) for at in (0, 1))
        if shape is None or count is None or min((*shape, *count), default=0) < 0:
            return _UNKNOWN
        dtype = tf.as_dtype(node.attr["element_dtype"].type)
        return _TensorList(_bytes(shape, dtype), count[0])

    def _numbers(self, tensor: str) -> list[int] | None:
        node = self._nodes.get(node_of(tensor))
        return None if node is None else numbers_of(node)

    def _after_loop(self, node: Any, index: int, lists: list[_TensorList]) -> _TensorList:
        body = self._functions.get(node.attr["body"].func.name)
        known = [at for at, of in enumerate(lists) if of.length]
        if body is not None and index in _Body(body).filled(known):
            return lists[index].full()
        return lists[index]._replace(held_bytes=0)


class _Body:
    """Finds the lists of a loop's body that get new buffers."""

    def __init__(self, function: Any):
        self._nodes = {node.name: node for node in function.node_def}
        self._arguments = {arg.name: at for at, arg in enumerate(function.signature.input_arg)}
        self._returned = [function.ret[arg.name] for arg in function.signature.output_arg]

    def filled(self, known: Sequence[int]) -> set[int]:
        """Returns the known lists that have new buffers after the loop; one of several lists that
        share their buffers."""
        first: dict[str, int] = {}
        for at in sorted(known, key=self._is_set):
            element = self._element(at)
            if element is not None:
                first.setdefault(element, at)
        return set(first.values())

    def _is_set(self, at: int) -> bool:
        """Sorts lists by how the body writes them: pushed ones (accumulators, which live longer)
        before set ones."""
        node = self._nodes.get(node_of(self._origin(self._returned[at])))
        return node is not None and node.op == "TensorListSetItem"

    def _element(self, at: int) -> str | None:
        """Returns the name of the tensor that an iteration adds to a list; ``None`` where it adds
        none, or one that existed before."""
        node = self._nodes.get(node_of(self._origin(self._returned[at])))
        if node is None or node.op == "TensorListPopBack":
            return None
        if node.op not in WRITES:
            return str(node.name)  # such as a sum of lists, which makes a new list
        element = self._origin(node.input[1 if node.op == "TensorListPushBack" else 2])
        if element in self._arguments:  # the last iteration's result
            element = self._origin(self._returned[self._arguments[element]])
        made = self._nodes.get(node_of(element))
        is_shared = made is None or made.op in kinds.VARIABLE_READS | {"Const", "TensorListGetItem"}
        return None if is_shared else element

    def _origin(self, tensor: str) -> str:
        """Returns the tensor whose buffer a tensor shares."""
        node = self._nodes.get(node_of(tensor))
        while node is not None and node.op in kinds.VIEWS and node.input:
            tensor = str(node.input[0])
            node = self._nodes.get(node_of(tensor))
        return tensor


def _bytes(shape: Sequence[int], dtype: Any) -> int:
    return rounded(prod(shape) * int(dtype.size))
