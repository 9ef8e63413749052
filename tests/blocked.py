"""A fit in a process in which other frameworks cannot be imported."""

BLOCKED = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if sys._getframe(2).f_code.co_name == "find_spec":
            return None  # PyTorch only asks where it lies
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
import keras
import numpy as np
import keras_remat

layers = keras.layers
model = keras.Sequential([keras.Input((8,)), layers.Dense(16), layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones((32, 8), "float32"), np.ones((32, 1), "float32")
remat = keras_remat.RematAutotune("8GiB", 32, verbose=0)
model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[remat])
assert remat.report.batch_size == 32, remat.report
assert len(keras_remat.make_plan(model, (x, y), "8GiB", solver="greedy").solution.schedule) > 0
assert not set(sys.modules) & set({blocked})
"""
