"""Best fit with coalescing, against cases worked out by hand from the rules of TensorFlow's BFC
allocator."""

from keras_remat.backends.tensorflow.memory.best_fit import BestFitAllocator
from keras_remat.units import KIB, MIB


def test_requests_are_rounded_to_256_bytes():
    pool = BestFitAllocator(region_bytes=MIB)
    pool.allocate(1)
    assert pool.bytes_in_use == 256
    pool.allocate(257)
    assert pool.bytes_in_use == 256 + 512


def test_a_free_chunk_below_twice_the_request_is_handed_out_whole():
    pool = BestFitAllocator(region_bytes=64 * MIB)
    first = pool.allocate(10 * MIB)
    pool.allocate(MIB)  # keeps the first chunk from joining the rest
    pool.release(first)
    pool.allocate(6 * MIB)
    assert pool.bytes_in_use == 11 * MIB
    assert pool.peak_bytes == 11 * MIB


def test_a_free_chunk_of_twice_the_request_is_split():
    pool = BestFitAllocator(region_bytes=64 * MIB)
    first = pool.allocate(10 * MIB)
    pool.allocate(MIB)
    pool.release(first)
    pool.allocate(5 * MIB)
    pool.allocate(5 * MIB)  # the other half
    assert pool.bytes_in_use == 11 * MIB


def test_neighbours_join_when_they_are_free():
    pool = BestFitAllocator(region_bytes=12 * MIB)
    chunks = [pool.allocate(4 * MIB) for _ in range(3)]
    for chunk in (chunks[0], chunks[2], chunks[1]):
        pool.release(chunk)
    assert pool.bytes_in_use == 0
    assert pool.allocate(12 * MIB).size == 12 * MIB


def test_small_requests_are_served_elsewhere():
    pool = BestFitAllocator(smallest_bytes=256 * KIB)
    assert pool.allocate(256 * KIB - 1) is None
    assert pool.allocate(0) is None
    pool.release(None)
    assert pool.peak_bytes == 0


def test_one_region_hands_out_what_growing_ones_waste():
    """8 MiB asked for after 6: growing regions of 8 and 16 MiB, or one that is split."""
    growing, one = BestFitAllocator(), BestFitAllocator(region_bytes=64 * MIB)
    for pool in (growing, one):
        pool.allocate(6 * MIB)
        pool.allocate(8 * MIB)
    assert growing.peak_bytes == 16 * MIB
    assert one.peak_bytes == 14 * MIB


def test_an_unplaced_chunk_is_free_once_it_is_given_back():
    pool = BestFitAllocator(region_bytes=MIB)
    pool.release(pool.unplaced(8 * MIB))
    assert pool.bytes_in_use == -8 * MIB
    pool.allocate(8 * MIB)
    assert pool.bytes_in_use == 0
