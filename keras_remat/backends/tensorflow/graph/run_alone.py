"""Ask an op itself how large its outputs are, by running it once, alone, on made-up inputs.

Shape inference cannot tell what cuDNN's recurrent layers keep for their gradient. A size of 0 would
leave their largest value out of every plan. The allocations of a recording would tell, but only
after the first plan, and only as bytes of a graph that has other bytes already. Running the op
costs one forward pass of one layer, while tracing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph.nodes import copied

logger = logging.getLogger(__name__)


def output_shapes(
    node: Any, operands: Sequence[tuple[tuple[int, ...] | None, Any]]
) -> list[tuple[int, ...]]:
    """Returns the shape of every output of a node; empty where it cannot run alone.

    Args:
        node: a ``NodeDef`` without resources among its inputs.
        operands: shape and dtype of every input.
    """
    if any(shape is None or dtype == tf.resource for shape, dtype in operands):
        return []
    document = tf.compat.v1.GraphDef()
    document.node.append(copied(node, (f"operand_{at}" for at in range(len(operands))), "alone"))

    def build(*placeholders: Any) -> list[Any]:
        named = {f"operand_{at}:0": tensor for at, tensor in enumerate(placeholders)}
        (op,) = tf.graph_util.import_graph_def(
            document, input_map=named, return_elements=["alone"], name=""
        )
        return list(op.outputs)

    # ones are lengths of sequences that can be
    inputs = [tf.ones(shape, dtype) for shape, dtype in operands]
    try:
        function = private.build_function(build, [tf.TensorSpec(*given) for given in operands])
        return [tuple(output.shape) for output in private.call_verbatim(function, inputs)]
    except (tf.errors.OpError, ValueError) as error:
        logger.warning("keras_remat: the size of %s's outputs is not known (%s)", node.op, error)
        return []
