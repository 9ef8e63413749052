"""Finds the Keras layer that an op belongs to, from the names that the framework gave.

A framework opens a name scope for every layer it calls, and the scopes are in the ops' names:

* TensorFlow: ``gradient_tape/unet_1/down_0_norm_1/batchnorm/mul/Mul``. A layer's scope has a
  number behind it, which is taken off. Below it come scopes of single functions (``batchnorm``,
  ``Gelu``, ``mul_1``), which have no number, begin with a capital, or are known by name.
* JAX: ``transpose(jvp(unet))/dense_1/dot_general``. Wrappers are taken off; layer names stand as
  they are.
* PyTorch: ``dense_1/mm.default`` of the forward phase; layer names stand as they are. Ops
  of the backward phase have no scope.

Nested models and layers keep their path: ``encoder/block_0/norm``. An op without a scope, such as a
sum of gradients, belongs where its first input comes from. Ops of the loss and the optimizer are
groups of their own.

Known limit: names are the only source. A layer whose name is that of a TensorFlow function
(``moments``) is not seen as a layer, and the ops of a user's ``train_step`` outside of layers are
shown under :data:`OTHER`.
"""

from __future__ import annotations

import re
from typing import Literal

from keras_remat.checks import check_among
from keras_remat.core.graph import BACKWARD, UPDATE, Graph, Op
from keras_remat.core.problem import Problem

LOSS, OPTIMIZER, OTHER = "(loss)", "(optimizer)", "(other)"

By = Literal["layer", "op", "block"]
GROUPINGS: tuple[By, ...] = ("layer", "op", "block")

_WRAPPED = re.compile(r"(?:(?:jvp|transpose|vmap)\()+([^()]*)\)+")
_NUMBER = re.compile(r"_\d+$")
#: Scopes that TensorFlow and Keras open inside of a layer, and number where they repeat.
_FUNCTIONS = frozenset({
    "add", "batchnorm", "cond", "conv_transpose", "convolution", "einsum", "floordiv",
    "logistic_loss", "matmul", "moments", "mul", "neg", "pow", "range", "rsqrt",
    "stateless_dropout", "stateless_random_normal", "stateless_random_uniform", "strided_slice",
    "sub", "transpose", "truediv", "while", "zeros_like", "ones_like",
})  # fmt: skip
_BLOCK = re.compile(r"(.*?\d+[a-z]?(?:_block\d+)?)(?:_|$)")


def layer_names(problem: Problem) -> list[str]:
    """Returns the layer of every op, in the order of the ops.

    >>> from keras_remat.core.graph import Op, Value
    >>> from keras_remat.core.profile import Profile
    >>> names = ("net_1/dense_1/MatMul", "gradient_tape/net_1/dense_1/MatMul/MatMul", "adam/Sub")
    >>> ops = tuple(Op(i, n, "", (), (i,), "update" if i == 2 else "backward")
    ...     for i, n in enumerate(names))
    >>> values = tuple(Value(i, name, 1, producer=i) for i, name in enumerate(names))
    >>> graph = Graph(ops, values, (0, 1, 2))
    >>> layer_names(Problem(graph, Profile((1.0,) * 3, (0,) * 3, 0), name="net"))
    ['dense', 'dense', '(optimizer)']
    """
    graph = problem.graph
    numbered = problem.profile.backend not in ("jax", "torch")
    scopes = [_scopes(op.name) for op in graph.ops]
    if not any(scopes):  # a graph from a file: its ops are named as layers are
        return [op.name for op in graph.ops]
    optimizers = _optimizer_scopes(graph, scopes)
    names: list[str] = []
    for op, parts in zip(graph.ops, scopes, strict=True):
        if not parts:
            names.append(_neighbour(op, graph, names))
        elif parts[0] in optimizers:
            names.append(OPTIMIZER)
        elif _plain(parts[0]) == "compile_loss":
            names.append(LOSS)
        else:
            names.append(_path(parts, problem.name, numbered))
    return names


def group_names(problem: Problem, by: By) -> list[str]:
    """Returns the group of every op: its layer, its own name, or its layer's block.

    Args:
        by: ``"layer"``, ``"op"`` or ``"block"``. A block is the first part of a nested layer's
            path, or the prefix that the names of a block's layers share: ``conv2_block1`` of
            ``conv2_block1_1_conv``.

    Raises:
        ValueError: another grouping.
    """
    check_among("by", by, GROUPINGS)
    if by == "op":
        return [op.name for op in problem.graph.ops]
    names = layer_names(problem)
    return names if by == "layer" else [_block(name) for name in names]


def _scopes(name: str) -> list[str]:
    """Returns the scopes an op's name stands in, outermost first."""
    parts = [_WRAPPED.sub(r"\1", part) for part in name.split("/")[:-1]]
    return [p for p in parts if p and p != "gradient_tape" and "(" not in p]


def _optimizer_scopes(graph: Graph, scopes: list[list[str]]) -> set[str]:
    """Returns the first scopes that have ops of the update phase and none of the backward phase."""
    seen: dict[str, set[str]] = {}
    for op, parts in zip(graph.ops, scopes, strict=True):
        if parts:
            phase = BACKWARD if "gradient_tape" in op.name or "transpose(" in op.name else op.phase
            seen.setdefault(parts[0], set()).add(phase)
    return {
        scope
        for scope, phases in seen.items()
        if UPDATE in phases and BACKWARD not in phases and _plain(scope) != "compile_loss"
    }


def _neighbour(op: Op, graph: Graph, names: list[str]) -> str:
    """Returns the layer that an op without a scope reads from."""
    producers = (graph.values[v].producer for v in op.inputs)
    return next((names[p] for p in producers if p is not None), OTHER)


def _path(parts: list[str], model: str, numbered: bool) -> str:
    """Returns the layer's path; inside of a layer, names of functions end it."""
    known = _plain(parts[0]) == model if numbered else parts[0] == model
    layers: list[str] = []
    for part in parts[known:]:
        function = part[:1].isupper() or (bool(layers) and _plain(part) in _FUNCTIONS)
        if function or (numbered and not _NUMBER.search(part)):
            break
        layers.append(_NUMBER.sub("", part) if numbered else part)
    return "/".join(layers) or (model if known else OTHER)


def _plain(scope: str) -> str:
    return _NUMBER.sub("", scope)


def _block(layer: str) -> str:
    first, _, inner = layer.partition("/")
    if inner or first.startswith("("):
        return first
    match = _BLOCK.match(first)
    return match[1] if match else first
