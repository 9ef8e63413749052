"""What a look at the pool shows: all that is free, as it is, and nothing is changed."""

from random import Random
from types import SimpleNamespace

import pytest
import tensorflow as tf
from recorded_allocator import RecordedAllocator

from keras_remat.backends.tensorflow import backend
from keras_remat.backends.tensorflow.memory import look
from keras_remat.backends.tensorflow.memory.best_fit import ONEDNN_SMALL_BYTES
from keras_remat.backends.tensorflow.memory.pool import recorded_pool
from keras_remat.units import GIB, KIB, MIB


class Piece:
    """A tensor whose bytes are given back when nobody holds it."""

    def __init__(self, allocator, nbytes):
        self.allocator, self.asked = allocator, allocator.allocate(nbytes)

    def __del__(self):
        self.allocator.release(*self.asked)


@pytest.fixture
def looked(monkeypatch):
    """Returns what a look at an allocator shows, up to so many bytes."""

    def seen(allocator, most_bytes, held_bytes=(), *, starts=True, has_bytes=GIB):
        def empty(shape, dtype):
            if allocator.allocator.bytes_in_use + shape[0] > has_bytes:
                raise tf.errors.ResourceExhaustedError(None, None, "no more")
            return Piece(allocator, shape[0])

        recorder = SimpleNamespace(
            start=lambda: allocator.events.clear() or starts,
            stop=lambda: SimpleNamespace(allocations=[*allocator.events]),
        )
        monkeypatch.setattr(look, "Recorder", lambda: recorder)
        monkeypatch.setattr(look, "bytes_in_use", lambda: allocator.allocator.bytes_in_use)
        monkeypatch.setattr(look.tf.raw_ops, "Empty", empty)
        return look.seen_allocations(held_bytes, most_bytes, ONEDNN_SMALL_BYTES)

    return seen


def used_allocator(random):
    """An allocator that has served requests, and what of them is still in use."""
    allocator, held = RecordedAllocator(), []
    for _ in range(random.randrange(1, 30)):
        held.append(allocator.allocate(random.randrange(256, 6 * KIB) * KIB))
        if random.random() < 0.6:
            allocator.release(*held.pop(random.randrange(len(held))))
    allocator.events.clear()
    return allocator


@pytest.mark.parametrize("seed", range(20))
def test_orders_take_in_what_is_seen_what_they_take_in_the_allocator(seed, looked):
    random = Random(seed)
    allocator = used_allocator(random)
    in_use = allocator.allocator.bytes_in_use
    most_bytes = allocator.region_bytes + random.randrange(32, 64) * MIB
    pool = recorded_pool(looked(allocator, most_bytes))
    assert allocator.allocator.bytes_in_use == in_use
    assert allocator.allocator.peak_bytes <= max(most_bytes, in_use)
    found = RecordedAllocator()
    found.allocator.add_regions(pool.extents, pool.region_bytes)
    peaks = []
    for each in (allocator, found):
        before = each.allocator.peak_bytes = each.allocator.bytes_in_use
        other = Random(seed + 1000)
        each.step([other.randrange(256, 4 * KIB) * KIB for _ in range(40)], other)
        peaks.append(each.allocator.peak_bytes - before)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)


def test_the_allocator_adds_the_regions_that_it_would_add_anyhow(looked):
    looked_at, plain = RecordedAllocator(), RecordedAllocator()
    looked(looked_at, 300 * MIB)
    for _ in range(300):
        plain.allocate(MIB)
    assert looked_at.region_bytes == plain.region_bytes


def test_a_pool_that_has_less_is_seen_whole(looked):
    allocator = RecordedAllocator()
    pool = recorded_pool(looked(allocator, GIB, has_bytes=62 * MIB))
    assert allocator.allocator.bytes_in_use == 0
    assert sum(extent.nbytes for extent in pool.extents) == pool.region_bytes == 62 * MIB


def test_what_a_step_will_hold_is_not_seen_as_free(looked):
    allocator = RecordedAllocator()
    allocator.release(*allocator.allocate(64 * MIB))
    pool = recorded_pool(looked(allocator, 64 * MIB, [20 * MIB, 4 * MIB]))
    assert allocator.allocator.bytes_in_use == 0
    assert pool.region_bytes == 64 * MIB
    assert sum(extent.nbytes for extent in pool.extents) == 40 * MIB


def test_nothing_is_seen_while_the_users_profiler_runs(looked):
    allocator = RecordedAllocator()
    assert not looked(allocator, GIB, [MIB], starts=False)
    assert allocator.allocator.bytes_in_use == 0


def test_the_devices_own_pool_is_left_as_it_was():
    device = backend().device
    if not device.has_statistics:
        pytest.skip("the allocator keeps no statistics")
    in_use = device.in_use_bytes()
    device.begin_watch()
    seen = look.seen_allocations([], in_use + 32 * MIB, ONEDNN_SMALL_BYTES)
    assert device.in_use_bytes() == in_use
    assert len(seen) >= 16
    assert device.watched_peak_bytes() <= in_use + 32 * MIB
