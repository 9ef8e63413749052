"""Variables come back with their values, and where they were."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_remat.backends.tensorflow.memory import variables as variables_module
from keras_remat.backends.tensorflow.memory.best_fit import BestFitAllocator
from keras_remat.backends.tensorflow.memory.donated import nbytes
from keras_remat.backends.tensorflow.memory.measure import bytes_in_use
from keras_remat.units import KIB, MIB

DTYPES = ("float32", "float16", "bfloat16", "float64", "float8_e5m2", "int8", "int32", "bool")
on_cpu = pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="the pool of a GPU is not told"
)


def values_of(variables):
    return [np.array(v.numpy()).tobytes() for v in variables]


def clear(variables):
    for v in variables:
        v.assign(np.zeros(v.shape, v.numpy().dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (700, 1000)])
def test_every_bit_comes_back_as_often_as_asked(dtype, shape):
    numbers = np.random.default_rng(0).standard_normal(shape)
    variables = [
        keras.Variable(numbers > 0 if dtype == "bool" else numbers, dtype=dtype),
        keras.Variable(numbers, dtype="float32"),
    ]
    before = values_of(variables)
    put_back = variables_module.snapshot([v.value for v in variables])
    for _ in range(2):
        clear(variables)
        put_back()
        assert values_of(variables) == before
        assert all(v.value.shape == shape for v in variables)


@pytest.mark.parametrize("rows", [4, 40_000])
def test_a_variable_whose_shape_changes_comes_back(rows):
    shape = tf.TensorShape([None, 16])
    bank = tf.Variable(tf.ones([rows, 16]), shape=shape)
    put_back = variables_module.snapshot([bank])
    for _ in range(2):
        bank.assign(tf.zeros([7, 16]))
        put_back()
        assert bank.numpy().tolist() == np.ones((rows, 16)).tolist()
        assert bank.shape == shape
    assert nbytes(bank) == rows * 16 * 4


def test_signs_of_zeros_infinities_and_nan_come_back():
    numbers = np.tile(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45], np.float32), 20_000)
    variable = keras.Variable(numbers)
    put_back = variables_module.snapshot([variable.value])
    clear([variable])
    put_back()
    assert variable.numpy().tobytes() == numbers.tobytes()


@on_cpu
def test_large_variables_come_back_to_the_pool():
    """What is in use does not grow, however often; assigning an array would put them elsewhere."""
    variables = [keras.Variable(np.ones((256 + 7 * k, KIB), np.float32)) for k in range(6)]
    put_back = variables_module.snapshot([v.value for v in variables])
    put_back()
    used = bytes_in_use()
    for _ in range(3):
        put_back()
        assert bytes_in_use() == used


def test_a_chunk_that_is_larger_than_a_variable_is_split_for_it(monkeypatch):
    """The rest of it is held while the variable is placed."""
    pool, chunks = BestFitAllocator(region_bytes=15 * MIB), {}
    for _ in range(2):
        pool.allocate(4 * MIB)  # 7 are left, which a third request of 4 gets whole

    def replace(variable, tensor):
        pool.release(chunks.pop(id(variable), None))

    class Held:
        def __init__(self, shape, dtype):
            self.chunk = pool.allocate(shape[0])

        def __del__(self):
            pool.release(self.chunk)

    monkeypatch.setattr(variables_module, "_replace", replace)
    monkeypatch.setattr(variables_module, "bytes_in_use", lambda: pool.bytes_in_use)
    monkeypatch.setattr(
        variables_module,
        "_place",
        lambda v, value: chunks.update({id(v): pool.allocate(value.nbytes)}),
    )
    monkeypatch.setattr(tf.raw_ops, "Empty", Held)
    variable = tf.Variable(0.0)
    variables_module._refill(variable, np.zeros(4 * MIB, np.uint8))
    assert pool.bytes_in_use == 3 * 4 * MIB


@on_cpu
def test_pool_that_has_no_room_left_half_way_keeps_no_value_back(monkeypatch):
    variables = [keras.Variable(np.full((256, KIB), float(k), np.float32)) for k in range(4)]
    before = values_of(variables)
    put_back = variables_module.snapshot([v.value for v in variables])
    real, asked = variables_module._refill, []

    def full(variable, value):
        asked.append(value.nbytes)
        if len(asked) == 3:
            raise tf.errors.ResourceExhaustedError(None, None, "no room")
        real(variable, value)

    monkeypatch.setattr(variables_module, "_refill", full)
    for _ in range(2):
        clear(variables)
        put_back()
        assert values_of(variables) == before
        for v in variables:
            v.assign_add(np.ones(v.shape, np.float32))  # in place, and not in what was saved
    assert len(asked) == 7


@pytest.mark.parametrize(
    ("text", "is_abandoned"),
    [
        ("Out of memory while trying to allocate 4096 bytes.", True),
        ("OOM when allocating tensor with shape[1024]", False),
    ],
)
def test_only_a_compiled_step_without_memory_has_donated_values(text, is_abandoned, monkeypatch):
    told = []
    monkeypatch.setattr(variables_module, "abandon_donated", lambda *given: told.append(given))
    monkeypatch.setattr(variables_module, "bytes_in_use", iter([100, 60]).__next__)
    of, updated = [tf.Variable([1.0, 2.0])], {7}
    put_back = variables_module.snapshot(of, updated)
    clear(of)
    try:
        raise tf.errors.ResourceExhaustedError(None, None, text)
    except tf.errors.ResourceExhaustedError:
        put_back()
    assert told == [(of, updated, 40)] * is_abandoned
    assert of[0].numpy().tolist() == [1.0, 2.0]


@on_cpu
def test_interrupt_half_way_leaves_no_variable_empty(monkeypatch):
    variables = [keras.Variable(np.full((256, KIB), float(k), np.float32)) for k in range(4)]
    before = values_of(variables)
    put_back = variables_module.snapshot([v.value for v in variables])
    clear(variables)
    real, calls = variables_module._replace, []

    def interrupted(variable, tensor):
        real(variable, tensor)
        calls.append(variable)
        if len(calls) == 3:  # the second variable has given its chunk back
            raise KeyboardInterrupt

    monkeypatch.setattr(variables_module, "_replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put_back()
    assert values_of(variables) == before
