"""Finds operations that change state, or whose result another run would not get."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.nodes import called_functions

#: Types whose effect is that of the functions they call.
_CALLS = frozenset({*kinds.STATELESS, "StatefulPartitionedCall"})


def has_effect(kind: str) -> bool:
    """Returns whether ops of a type change state, or another run would get another result."""
    return (
        private.is_stateful(kind)
        and kind not in kinds.VARIABLE_READS
        and kind not in kinds.PURE_STATEFUL | {"Placeholder"}
    )


def calls_without_effect(library: Any, negligible: Collection[str] = ()) -> Callable[[Any], bool]:
    """Returns a predicate: whether all functions that a node names are without an effect.

    TensorFlow's own answer would be no for a function that reads a variable.

    Args:
        library: the functions.
        negligible: types of ops whose effect does not count.
    """
    functions = {function.signature.name: function for function in library.function}

    @cache
    def is_pure(name: str) -> bool:
        return name in functions and all(map(is_harmless, functions[name].node_def))

    def is_harmless(node: Any) -> bool:
        if node.op in _CALLS:
            return calls_pure(node)
        return node.op in negligible or not has_effect(node.op)

    def calls_pure(node: Any) -> bool:
        return all(map(is_pure, called_functions(node)))

    return calls_pure
