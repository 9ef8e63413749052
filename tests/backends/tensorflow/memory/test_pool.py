"""The pool that a recording shows, against an allocator whose pool is known."""

from itertools import pairwise
from random import Random

import pytest
from recorded_allocator import RecordedAllocator

from keras_remat.backends.tensorflow.memory.best_fit import Extent
from keras_remat.backends.tensorflow.memory.pool import _SAID, recorded_pool
from keras_remat.units import GIB, KIB, MIB


def used_pool(seed, region_bytes=0):
    """A pool in which earlier steps have left chunks, and one step was recorded three times."""
    random = Random(seed)
    recorded = RecordedAllocator(region_bytes)
    kept = [recorded.allocate(random.randrange(256 * KIB, 9 * MIB)) for _ in range(12)]
    for chunk in random.sample(kept, 6):
        recorded.release(*chunk)
    sizes = [random.randrange(256 * KIB, 20 * MIB) for _ in range(60)]
    recorded.step(sizes, Random(seed))
    recorded.events.clear()
    for _ in range(3):
        recorded.step(sizes, Random(seed))
    return recorded


def is_in(extent, pool):
    """Whether a pool has an extent, to the digits that fragmentation is written with."""
    rounding = 2e-6 * pool.region_bytes
    return any(
        other.address == extent.address and abs(other.nbytes - extent.nbytes) <= rounding
        for other in pool.extents
        if not other.requested_bytes
    )


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("region_bytes", [0, 512 * MIB])
def test_what_steps_touched_and_the_largest_chunk_are_where_they_are(seed, region_bytes):
    recorded = used_pool(seed, region_bytes)
    pool = recorded_pool(recorded.events, region_bytes)
    assert pool.region_bytes == recorded.region_bytes
    free_bytes = sum(extent.nbytes for extent in recorded.free)
    assert sum(extent.nbytes for extent in pool.extents) <= free_bytes * (1 + 1e-5)
    assert pool.seen_bytes >= 0.8 * free_bytes
    right = [extent for extent in recorded.free if is_in(extent, pool)]
    assert sum(extent.nbytes for extent in right) >= 0.8 * free_bytes
    assert max(recorded.free, key=lambda extent: extent.nbytes) in right


@pytest.mark.parametrize("seed", range(20))
def test_other_orders_take_in_it_what_they_take_in_the_allocator(seed):
    recorded = used_pool(seed)
    pool = recorded_pool(recorded.events)
    found = RecordedAllocator()
    assert found.allocator.add_regions(pool.extents, pool.region_bytes) == []
    peaks = []
    for each in (recorded, found):
        before = each.allocator.peak_bytes = each.allocator.bytes_in_use
        other = Random(seed + 1000)
        each.step([other.randrange(256 * KIB, 20 * MIB) for _ in range(60)], other)
        peaks.append(each.allocator.peak_bytes - before)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)


def test_no_part_of_a_pool_lies_in_another():
    """A chunk whose front alone was used does not go on behind where the next one begins."""
    for seed in range(200):
        random = Random(seed)
        recorded = RecordedAllocator()
        kept = [recorded.allocate(random.randrange(64 * KIB, 30 * MIB)) for _ in range(30)]
        for chunk in random.sample(kept, 20):
            recorded.release(*chunk)
        sizes = [random.randrange(64 * KIB, 12 * MIB) for _ in range(random.randrange(3, 40))]
        recorded.step(sizes, Random(seed))
        recorded.events.clear()
        recorded.step(sizes, Random(seed))
        pool = recorded_pool(recorded.events)
        assert pool is not None
        extents = sorted(pool.extents)
        assert all(a.end <= b.address for a, b in pairwise(extents)), seed


def test_regions_that_were_added_while_recording_count_and_what_was_before_does_not():
    recorded = used_pool(3)
    before = recorded.region_bytes
    sizes = [20 * MIB] * 40
    for _ in range(2):
        held = [recorded.allocate(nbytes) for nbytes in sizes]
        for chunk in held[::-1]:
            recorded.release(*chunk)
    assert recorded.region_bytes > 2 * before
    pool = recorded_pool(recorded.events)
    assert pool.region_bytes == recorded.region_bytes
    largest = max(recorded.free, key=lambda extent: extent.nbytes)
    assert is_in(largest, pool)


def test_what_is_in_use_afterwards_is_told_from_what_is_free():
    recorded = used_pool(5)
    chunk, nbytes = recorded.allocate(3 * MIB)
    pool = recorded_pool(recorded.events)
    assert Extent(chunk.address, chunk.size, nbytes) in pool.extents
    assert sum(e.nbytes for e in pool.extents if e.requested_bytes) == chunk.size


def test_a_region_as_large_as_a_cards_is_known_to_a_millionth():
    recorded = used_pool(7, 80 * GIB)
    pool = recorded_pool(recorded.events, 80 * GIB)
    assert pool.region_bytes == 80 * GIB
    assert is_in(max(recorded.free, key=lambda extent: extent.nbytes), pool)


@pytest.mark.parametrize("missing", sorted(_SAID))
def test_events_that_do_not_say_enough_tell_no_pool(missing):
    events = used_pool(1).events
    for _, _, said in events:
        del said[missing]
    assert recorded_pool(events) is None


def test_moments_at_which_the_pool_is_full_are_left_out():
    """TensorFlow then divides by no free bytes."""
    events = used_pool(1).events
    pool = recorded_pool(events)
    full = dict(events[-1][2], fragmentation=float("nan"))
    assert recorded_pool([*events, (len(events), "MemoryAllocation", full)]) == pool


def test_no_events_and_events_that_contradict_each_other_tell_no_pool():
    assert recorded_pool([]) is None
    assert recorded_pool([], 64 * MIB) is None
    events = used_pool(1).events
    assert recorded_pool(events[:1]) is None
    events[-1][2]["bytes_allocated"] += 64 * MIB
    assert recorded_pool(events) is None, "more is free than there is"


def test_regions_that_are_other_than_expected_are_found_all_the_same():
    """A GPU's pool grows where the user asks for it while the program runs."""
    recorded = used_pool(2)
    assert recorded_pool(recorded.events, 8 * GIB) == recorded_pool(recorded.events)
