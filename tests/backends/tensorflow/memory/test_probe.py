"""The free chunks that are told are those the allocator has."""

import gc
from itertools import pairwise

import keras
import keras_models
import numpy as np
import pytest

from keras_remat.backends.base import load_backend
from keras_remat.backends.batches import repeated_batch
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.memory import probe
from keras_remat.backends.tensorflow.memory.measure import bytes_in_use
from keras_remat.backends.tensorflow.profiler.events import allocation_events
from keras_remat.backends.tensorflow.profiler.recorder import Recorder
from keras_remat.core.profile import Chunk
from keras_remat.units import MIB


@pytest.fixture
def tf():
    return pytest.importorskip("tensorflow")


def empty(tf, mib):
    return tf.raw_ops.Empty(shape=[int(mib * MIB)], dtype=tf.uint8)


def all_but_the_largest(tf, mib):
    """Holds every free chunk but the largest, which has room for ``mib``."""
    gc.collect()
    room = empty(tf, mib)
    del room
    return [
        tf.raw_ops.Empty(shape=[chunk.nbytes - 256], dtype=tf.uint8)
        for chunk in probe.free_chunks()[:-1]
    ]


def total(chunks):
    return sum(chunk.nbytes for chunk in chunks)


def test_a_chunk_that_is_freed_between_two_that_are_kept_is_found(tf):
    gc.collect()
    kept = [empty(tf, mib) for mib in (3.5, 21.0, 3.5, 37.0, 3.5)]
    del kept[1]
    before, used = probe.free_chunks(), bytes_in_use()
    assert len(before) > 1
    assert [chunk.nbytes for chunk in before] == sorted(chunk.nbytes for chunk in before)
    assert probe.free_chunks() == before, "asking changes nothing"
    assert bytes_in_use() == used
    hole = probe._address(kept[1])
    del kept[1]
    after = probe.free_chunks()
    assert total(after) == total(before) + used - bytes_in_use()
    assert any(chunk.address <= hole < chunk.address + chunk.nbytes for chunk in after)
    assert not any(chunk.address <= hole < chunk.address + chunk.nbytes for chunk in before)


def largest_free(tf):
    gc.collect()
    return max((chunk.nbytes for chunk in probe.free_chunks()), default=0)


def test_what_is_reserved_is_one_free_chunk_and_counts_nothing(tf):
    wanted, used = largest_free(tf) + 30 * MIB, bytes_in_use()
    assert probe.reserve(wanted)
    assert largest_free(tf) >= wanted
    assert bytes_in_use() == used
    assert tf.config.experimental.get_memory_info("CPU:0")["peak"] <= used + MIB, (
        "nor is it in the peak that is measured next"
    )
    reserved = largest_free(tf)
    probe.reserve(wanted)
    assert largest_free(tf) == reserved, "it is there already"


def test_what_cannot_be_reserved_is_left(tf, monkeypatch):
    before = largest_free(tf)
    assert not probe.reserve(2**50)
    assert not probe.reserve(-5)
    assert largest_free(tf) == before
    monkeypatch.setattr(probe.host, "address_space_is_limited", lambda: True)
    assert not probe.reserve(before + 30 * MIB)
    assert largest_free(tf) == before


def test_a_single_chunk_is_found(tf):
    """All others are held; what is left is what the allocator then hands out whole."""
    held = all_but_the_largest(tf, 50)
    used = bytes_in_use()
    (only,) = probe.free_chunks()
    assert bytes_in_use() == used
    whole = tf.raw_ops.Empty(shape=[only.nbytes - 256], dtype=tf.uint8)
    assert (probe._address(whole), bytes_in_use() - used) == (only.address, only.nbytes)
    del held


def test_where_a_variable_is_that_an_op_takes_a_buffer_for(tf):
    """Lion assigns its momentum; the chunks lie between the free ones, and none overlaps
    another."""
    model, batch = keras_models.mlp(width=512)
    model.compile(keras.optimizers.Lion(), "mse", jit_compile=False)
    load_backend().example_batch(model, batch)
    traced = load_backend().trace(model, batch)
    free = probe.free_chunks()
    homes = dict(probe.Residents(traced, free).homes())
    assert homes
    assert set(homes) <= {op.name for op in traced.graph.ops if op.kind == "AssignVariableOp"}
    at = sorted((*free, *homes.values()), key=lambda chunk: chunk.address)
    assert all(a.address + a.nbytes <= b.address for a, b in pairwise(at))


def test_resource_that_is_no_variable_is_nowhere(tf):
    """A lookup table in the train step, and a weight of 1 MiB that is one."""
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [3, 4]), -1)

    class Lookup(keras.layers.Layer):
        def call(self, x):
            return tf.cast(table.lookup(tf.cast(x, tf.int32)), tf.float32)

    model = keras.Sequential([keras.Input((512,)), Lookup(), keras.layers.Dense(512)])
    model.compile("sgd", "mse", jit_compile=False)
    batch = load_backend().example_batch(
        model, (np.ones((4, 512), np.float32), np.ones((4, 512), np.float32))
    )
    traced = load_backend().trace(model, batch)
    assert any(private.variable_spec(external) is None for external in traced.captures.values())
    residents = probe.Residents(traced, probe.free_chunks())
    assert len(residents._chunk) == 1
    assert not list(residents.homes()), "SGD subtracts in place"


def test_batch_is_looked_for_in_a_gap_of_its_size(tf):
    """Between chunks of 40 MiB lie 3, then 9; nothing that the step holds is as large."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    batch = (np.ones((2, 1), np.float32), np.ones((2, 1), np.float32))
    traced = load_backend().trace(model, load_backend().example_batch(model, batch))
    residents = probe.Residents(traced, [Chunk(at * MIB, 40 * MIB) for at in (0, 43, 92)])
    assert list(residents.gaps([3 * MIB])) == [Chunk(40 * MIB, 3 * MIB)]
    assert list(residents.gaps([2 * MIB, 5 * MIB])) == [
        Chunk(40 * MIB, 3 * MIB),
        Chunk(83 * MIB, 9 * MIB),
    ]
    assert not list(residents.gaps([]))


def test_fragmentation_of_what_was_found_is_what_the_allocator_says(tf):
    kept = [empty(tf, mib) for mib in (1.5, 20.0, 1.5, 9.0, 1.5)]
    del kept[3], kept[1]
    chunks = [chunk.nbytes for chunk in probe.free_chunks()]
    recorder = Recorder()
    recorder.start()
    empty(tf, 0.3)
    freed = [
        stats
        for _, name, stats in allocation_events(recorder.stop().planes)
        if name == "MemoryDeallocation"
    ]
    assert freed[-1]["fragmentation"] == pytest.approx(1 - max(chunks) / sum(chunks), abs=2e-3)


def test_the_users_profiler_session_is_left_alone(tf, tmp_path):
    tf.profiler.experimental.start(str(tmp_path))
    try:
        assert probe.free_chunks() == ()
    finally:
        tf.profiler.experimental.stop()


def test_a_batch_that_is_made_gets_a_chunk_of_its_size(tf):
    held = all_but_the_largest(tf, 64)
    kept = [empty(tf, mib) for mib in (30.0, 1.0)]
    backend, batch = load_backend(), (tf.ones([4, 1024, 1024]), tf.zeros([4], tf.int32), None)
    del kept[0]  # less than twice the batch that is made: handed out whole otherwise
    before = bytes_in_use()
    x, y, nothing = repeated_batch(backend, batch, 5)
    assert bytes_in_use() - before == pytest.approx(5 * 4 * MIB, abs=512)
    assert (tuple(x.shape), tuple(y.shape), nothing) == ((5, 1024, 1024), (5,), None)
    del x, y
    assert bytes_in_use() == before
    assert held
    assert kept
