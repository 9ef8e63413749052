"""The free chunks that are told are those the allocator has."""

import gc

import pytest

from keras_remat.backends.tensorflow import pool
from keras_remat.backends.tensorflow.measure import bytes_in_use
from keras_remat.backends.tensorflow.profile import Recorder, allocation_events
from keras_remat.units import MIB


@pytest.fixture
def tf():
    return pytest.importorskip("tensorflow")


def empty(tf, mib):
    return tf.raw_ops.Empty(shape=[int(mib * MIB)], dtype=tf.uint8)


def test_a_chunk_that_is_freed_between_two_that_are_kept_is_found(tf):
    gc.collect()
    kept = [empty(tf, mib) for mib in (3.5, 21.0, 3.5, 37.0, 3.5)]
    del kept[1]
    before, used = pool.free_chunk_bytes(), bytes_in_use()
    assert len(before) > 1
    assert before == tuple(sorted(before))
    assert pool.free_chunk_bytes() == pytest.approx(before, abs=0.001 * sum(before)), "asking changes nothing"
    assert bytes_in_use() == used
    del kept[2]
    assert sum(pool.free_chunk_bytes()) == pytest.approx(sum(before) + used - bytes_in_use(), rel=0.001)


def test_fragmentation_of_what_was_found_is_what_the_allocator_says(tf):
    kept = [empty(tf, mib) for mib in (1.5, 20.0, 1.5, 9.0, 1.5)]
    del kept[3], kept[1]
    chunks = pool.free_chunk_bytes()
    recorder = Recorder()
    recorder.start()
    empty(tf, 0.3)
    freed = [stats for _, name, stats in allocation_events(recorder.stop()) if name == "MemoryDeallocation"]
    assert freed[-1]["fragmentation"] == pytest.approx(1 - max(chunks) / sum(chunks), abs=2e-3)


def test_the_users_profiler_session_is_left_alone(tf, tmp_path):
    tf.profiler.experimental.start(str(tmp_path))
    try:
        assert pool.free_chunk_bytes() == ()
    finally:
        tf.profiler.experimental.stop()
