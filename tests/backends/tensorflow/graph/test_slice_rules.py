"""The rules of single ops: what the parts of an op compute makes what the whole op computes."""

import numpy as np
import pytest
import tensorflow as tf

from keras_remat.backends.tensorflow.graph.nodes import numbers_of
from keras_remat.backends.tensorflow.graph.slice_rules import Operands, modes_of

RAW, PARTS = tf.raw_ops, 2
LABELS = np.array([0, 2, 1, 2], np.int32)
ROWS = np.array([[0, 2], [1, 1], [2, 0], [0, 1]], np.int32)
IMAGE, KERNEL = (4, 6, 6, 2), (3, 3, 2, 3)
CONVOLUTION = {"strides": [1] * 4, "padding": "SAME"}
POOL = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}

#: An op of tensors of these shapes, and how its outputs are made of the parts'; ``None`` where an
#: op has to stay whole. Rows of one op stand together.
OPS = [
    (lambda x, y: x + y, [(4, 3), (4, 3)], "part"),
    (lambda x, y: x * y, [(4, 3), (1, 3)], "part"),
    (lambda x, y: x - y, [(3,), (4, 3)], "part"),
    (lambda x, y: x + y, [(4, 3), (4, 4, 3)], "part"),
    (lambda x, y: x + y, [(), ()], None),
    (lambda x: RAW.ClipByValue(t=x, clip_value_min=0.2, clip_value_max=0.5), [(4, 3)], "part"),
    (lambda c, x, y: RAW.Select(condition=c > 0.5, x=x, y=y), [(4, 3)] * 3, "part"),
    (lambda c, x, y: RAW.Select(condition=c > 0.5, x=x, y=y), [(4,), (4, 3), (4, 3)], "part"),
    (lambda c, x, y: RAW.Select(condition=c > 0.5, x=x, y=y), [(), (4, 3), (4, 3)], "part"),
    (lambda x: RAW.Softmax(logits=x), [(4, 3)], "part"),
    (lambda x: RAW.LogSoftmax(logits=x), [(4,)], None),
    (lambda x, y: tf.matmul(x, y), [(4, 3), (3, 4)], "part"),
    (lambda x, y: tf.matmul(x, y, transpose_b=True), [(4, 3), (4, 3)], "part"),
    (lambda x, y: tf.matmul(x, y, transpose_a=True), [(4, 3), (4, 3)], "sum"),
    (lambda x, y: tf.matmul(x, y, True, True), [(4, 3), (2, 4)], None),
    (lambda x, y: RAW.BatchMatMulV2(x=x, y=y), [(4, 2, 3), (4, 3, 2)], "part"),
    (lambda x, y: RAW.BatchMatMulV2(x=x, y=y), [(4, 2, 3), (3, 2)], "part"),
    (lambda x, y: RAW.BatchMatMulV2(x=x, y=y), [(1, 2, 3), (4, 3, 2)], "part"),
    (lambda x, y: RAW.BatchMatMulV2(x=x, y=y), [(4, 3), (3, 4)], None),
    *(
        (lambda x, y, e=equation: RAW.Einsum(inputs=[x, y], equation=e), [(4, 4), (4, 4)], output)
        for equation, output in [
            ("ab,bc->ac", "part"), ("ab,bc->ca", None), ("ab,cb->ca", "part"), ("ab,ab->a", "part"),
            ("ba,bc->ac", "sum"), ("ab,ac->", None), ("ab,ca->bc", None), ("aa,ab->ab", None),
            ("ba,cb->ac", None),
        ]
    ),
    (lambda x: tf.reduce_sum(x, 1), [(4, 3)], "part"),
    (lambda x: tf.reduce_max(x, -1, keepdims=True), [(4, 3)], "part"),
    (lambda x: tf.reduce_sum(x, [0]), [(4, 3)], "sum"),
    (lambda x: tf.reduce_sum(x, [-2, 1], keepdims=True), [(4, 3)], "sum"),
    (lambda x: tf.reduce_mean(x, [1, 0]), [(4, 3)], "mean"),
    (lambda x: tf.reduce_mean(tf.cast(9 * x, tf.int32), 0), [(4, 3)], None),
    (lambda x: tf.reduce_max(x, 0), [(4, 3)], None),
    (lambda x: tf.reduce_prod(x, [0, 1]), [(4, 3)], None),
    (lambda x: RAW.ArgMax(input=x, dimension=1), [(4, 3)], "part"),
    (lambda x: RAW.ArgMin(input=x, dimension=-2), [(4, 3)], None),
    (lambda x: RAW.Cumsum(x=x, axis=1), [(4, 3)], "part"),
    (lambda x: RAW.Cumsum(x=x, axis=0), [(4, 3)], None),
    (lambda x: RAW.ReverseV2(tensor=x, axis=[1, 2]), [(4, 3, 2)], "part"),
    (lambda x: RAW.ReverseV2(tensor=x, axis=[1, 0]), [(4, 3, 2)], None),
    (lambda x: RAW.Split(axis=-1, value=x, num_split=2), [(4, 6)], "part"),
    (lambda x: RAW.Split(axis=0, value=x, num_split=2), [(4, 6)], None),
    (lambda x, y: RAW.ConcatV2(values=[x, y], axis=1), [(4, 3), (4, 2)], "part"),
    (lambda x, y: RAW.ConcatV2(values=[x, y], axis=-2), [(4, 3), (4, 3)], None),
    (lambda x: tf.transpose(x, [0, 2, 1]), [(4, 3, 2)], "part"),
    (lambda x: tf.transpose(x, [1, 0, 2]), [(4, 4, 2)], None),
    (lambda x: RAW.Pad(input=x, paddings=[[0, 0], [1, 2]]), [(4, 3)], "part"),
    (lambda x: RAW.PadV2(input=x, paddings=[[0, 1], [0, 0]], constant_values=9.0), [(4, 3)], None),
    (lambda x: RAW.PadV2(input=x, paddings=[[0, 0], [0, 1]], constant_values=9.0), [(4, 3)],
     "part"),
    (lambda x: RAW.MirrorPad(input=x, paddings=[[1, 0], [0, 0]], mode="REFLECT"), [(4, 3)], None),
    (lambda x: tf.tile(x, [1, 2]), [(4, 3)], "part"),
    (lambda x: tf.tile(x, [4, 2]), [(1, 3)], "part"),
    (lambda x: tf.tile(x, [2, 1]), [(2, 3)], None),
    (lambda x: tf.broadcast_to(x, [4, 3]), [(4, 1)], "part"),
    (lambda x: tf.broadcast_to(x, [4, 4]), [(4,)], "part"),
    (lambda x: tf.gather(x, ROWS), [(3, 2)], "part"),
    (lambda x: tf.gather(x, ROWS, axis=1), [(4, 3)], None),
    (lambda x: tf.gather(x, ROWS, axis=1, batch_dims=1), [(4, 3)], None),
    (lambda x: RAW.OneHot(indices=LABELS, depth=3, on_value=x, off_value=0.0), [()], "part"),
    (lambda x: RAW.OneHot(indices=LABELS, depth=3, on_value=x, off_value=0.0, axis=0), [()], None),
    (lambda x: tf.slice(x, [0, 1], [4, 2]), [(4, 3)], "part"),
    (lambda x: tf.slice(x, [0, 1], [-1, 2]), [(4, 3)], "part"),
    (lambda x: tf.slice(x, [2, 0], [2, 3]), [(4, 3)], None),
    (lambda x: tf.slice(x, [0, 0], [2, 3]), [(4, 3)], None),
    *((lambda x, cut=cut: x[cut], [(4, 3, 2)], "part") for cut in np.s_[
        (slice(None), slice(1, 2)), (..., 1), (slice(None), 1), (slice(None), None), (..., None),
    ]),
    *((lambda x, cut=cut: x[cut], [(4, 3, 2)], None) for cut in np.s_[
        1:3, ::2, ::-1, 2, None, (..., 1, 0, 1), (0, ...), (slice(0, 4), 1),
    ]),
    (lambda dy: RAW.StridedSliceGrad(shape=[4, 3], begin=[0, 1], end=[0, 3], strides=[1, 1], dy=dy,
                                     begin_mask=1, end_mask=1), [(4, 2)], "part"),
    (lambda dy: RAW.StridedSliceGrad(shape=[4, 3], begin=[1, 0], end=[3, 3], strides=[1, 1], dy=dy),
     [(2, 3)], None),
    (lambda x: RAW.Fill(dims=[4, 3], value=x), [()], "part"),
    *((make, [(4, 3)], None) for make in [
        # axes, sizes and shapes that are no constants
        lambda x: tf.reduce_sum(x, tf.abs([1])),
        lambda x: RAW.Cumsum(x=x, axis=tf.abs(1)),
        lambda x: RAW.Split(axis=tf.abs(1), value=x, num_split=3),
        lambda x: RAW.ConcatV2(values=[x, x], axis=tf.abs(1)),
        lambda x: tf.transpose(x, tf.abs([0, 1])),
        lambda x: RAW.Pad(input=x, paddings=tf.abs([[0, 0], [1, 2]])),
        lambda x: tf.tile(x, tf.abs([1, 2])),
        lambda x: tf.slice(x, tf.abs([0, 1]), [4, 2]),
        lambda x: tf.slice(x, [0, 1], tf.abs([4, 2])),
        lambda x: RAW.Fill(dims=tf.abs([4, 3]), value=x[0, 0]),
    ]),
    (lambda x: RAW.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=LABELS), [(4, 3)],
     "part"),
    (lambda x, y: RAW.SoftmaxCrossEntropyWithLogits(features=x, labels=y), [(4, 3), (4, 3)],
     "part"),
    (lambda x, y: RAW.SoftmaxCrossEntropyWithLogits(features=x, labels=y), [(4, 3), (1, 3)],
     "part"),
    (lambda x, k: RAW.Conv2D(input=x, filter=k, **CONVOLUTION), [IMAGE, KERNEL], "part"),
    (lambda k, dy: RAW.Conv2DBackpropInput(input_sizes=IMAGE, filter=k, out_backprop=dy,
                                           **CONVOLUTION), [KERNEL, (4, 6, 6, 3)], "part"),
    (lambda x, dy: RAW.Conv2DBackpropFilter(input=x, filter_sizes=KERNEL, out_backprop=dy,
                                            **CONVOLUTION), [IMAGE, (4, 6, 6, 3)], "sum"),
    (lambda x, b: RAW.BiasAdd(value=x, bias=b), [IMAGE, (2,)], "part"),
    (lambda dy: RAW.BiasAddGrad(out_backprop=dy), [IMAGE], "sum"),
    (lambda x: RAW.MaxPool(input=x, **POOL), [IMAGE], "part"),
    (lambda dy: RAW.AvgPoolGrad(orig_input_shape=IMAGE, grad=dy, **POOL), [(4, 3, 3, 2)], "part"),
    (lambda x: RAW.ResizeBilinear(images=x, size=[3, 9]), [IMAGE], "part"),
    (lambda dy: RAW.ResizeNearestNeighborGrad(grads=dy, size=[3, 3]), [IMAGE], "part"),
    (lambda dy, x: RAW.ResizeBilinearGrad(grads=dy, original_image=x), [IMAGE, (4, 3, 3, 2)],
     "part"),
]  # fmt: skip


def computed(node, operands):
    """Returns the outputs of a node of these operands."""
    document = tf.compat.v1.GraphDef()
    made = document.node.add()
    made.CopyFrom(node)
    del made.input[:]
    for at, value in enumerate(operands):
        constant = document.node.add(name=f"operand_{at}", op="Const")
        constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
        constant.attr["dtype"].type = constant.attr["value"].tensor.dtype
        made.input.append(constant.name)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        (op,) = tf.graph_util.import_graph_def(document, return_elements=[node.name], name="")
        return session.run(list(op.outputs))


def of_part(mode, operand, samples, at):
    """Returns what a part of an op reads of an operand."""
    if mode == "part":
        return np.split(operand, PARTS)[at]
    if mode == "shape" and operand[0] != -1:
        return np.array([samples // PARTS, *operand[1:]], operand.dtype)
    return operand


@pytest.mark.parametrize(("make", "shapes", "output"), OPS)
def test_the_parts_of_an_op_make_the_whole(make, shapes, output):
    random = np.random.default_rng(0)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        given = [tf.constant(random.random(shape, "float32")) for shape in shapes]
        made = make(*given)
        op = (made if tf.is_tensor(made) else made[0]).op
        operands, whole = session.run((list(op.inputs), list(op.outputs)))
    numbers = {at: numbers_of(tensor.op.node_def) for at, tensor in enumerate(op.inputs)}
    constants = {at: those for at, those in numbers.items() if those is not None}
    node, result = op.node_def, whole[0].shape
    found = modes_of(Operands(node, [operand.shape for operand in operands], result, constants))
    assert (found and found[1]) == output
    if found is None:
        return
    samples = result[0] if result else 0
    parts = []
    for at in range(PARTS):
        read = zip(found[0], operands, strict=True)
        parts.append(computed(node, [of_part(mode, x, samples, at) for mode, x in read]))
    assert "part" in found[0] or "shape" in found[0]
    for expected, *of_parts in zip(whole, *parts, strict=True):
        joined = np.concatenate(of_parts) if output == "part" else np.sum(of_parts, 0)
        joined = joined / PARTS if output == "mean" else joined
        np.testing.assert_allclose(joined, expected, rtol=1e-5, atol=1e-6)
