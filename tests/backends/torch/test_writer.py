"""The functions that orders are written as: nothing lives longer than the graph says."""

import keras
import numpy as np
from keras import layers, ops

from keras_remat.backends.torch import backend
from keras_remat.backends.torch.writer import Writer


class Averaging(layers.Layer):
    """Takes the mean of its inputs if they are positive, from a view of a copy of them."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], trainable=False)

    def call(self, x):
        if x.device.type != "meta":
            turned = (2 * x.detach()).t()
            ops.cond(ops.sum(x.detach()) > 0, lambda: self._note(turned), lambda: None)
        return x

    def _note(self, turned):
        self.mean.assign(ops.mean(turned, axis=1))


def test_a_view_that_a_branch_makes_goes_with_the_tensor_that_it_looks_at():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(3)(Averaging()(inputs)))
    model.compile("sgd", "mse")
    on = backend()
    data = on.example_batch(model, (np.ones((8, 4), "float32"), np.ones((8, 3), "float32")))
    traced = on.trace(model, data)
    writer = Writer(traced.program, traced.graph, range(len(traced.graph.ops)))
    lines = [line.strip() for line in writer.write().splitlines()]
    (read,) = (line for line in lines if line.startswith("if q0: v"))
    view = read.partition("(")[2].partition(",")[0]
    assert view.startswith("w")
    (end,) = (line for line in lines if line.startswith("del") and view in line)
    assert f"v{view.partition('_')[2]}" in end
