"""In how many pieces a batch is trained: the pure rule."""

import math
from itertools import product

import pytest

from keras_remat.training.pieces import Tried, next_pieces


@pytest.mark.parametrize(
    ("tried", "following"),
    [
        ([Tried(1, 1.0, 0.9)], 2),
        ([Tried(1, 1.0, 1.0)], 2),  # no recomputation, but the order costs: it is measured
        ([Tried(1)], 2),
        ([Tried(1), Tried(2)], 4),  # nothing has fit so far
        ([Tried(1), Tried(2, 1.0, 1.0)], 4),  # the first that fits is always the fastest
        ([Tried(1, 1.0, 0.8), Tried(2, 0.9, 0.8)], 4),  # it pays
        ([Tried(1, 1.0, 0.8), Tried(2, 0.9, 0.9)], 4),
        ([Tried(1, 1.0, 0.8), Tried(2, 1.1, 1.0)], 4),  # pieces without recomputation are missing
        ([Tried(1, 1.0, 0.8), Tried(2, 1.4, 1.3)], None),  # and would be too slow
        ([Tried(1, 1.0, 0.8), Tried(2, 1.1, 1.1)], None),  # they were measured
        ([Tried(1, 1.0, 0.8), Tried(2, 0.98, 0.98)], None),  # the same, as far as can be told
        ([Tried(1, 1.0, 0.8), Tried(2)], 4),  # over the limit: fewer samples need less
        ([Tried(2, 1.0, 0.9), Tried(4, 0.9, 0.8)], 8),
        ([Tried(4, 1.0, 0.9), Tried(8, 0.9, 0.8)], None),  # more than the most
        ([Tried(1, over_bytes=50)], 2),
        ([Tried(1, over_bytes=50), Tried(1, over_bytes=50)], 2),  # compiled, then in order
        ([Tried(1, over_bytes=50), Tried(2, over_bytes=25)], 4),  # all of it is the batch's
        ([Tried(1, over_bytes=50), Tried(2, over_bytes=26)], None),  # 1 is over with the least
        ([Tried(1, over_bytes=50), Tried(2, over_bytes=-1)], 4),
        ([Tried(1, over_bytes=-2), Tried(2, over_bytes=-1)], 4),
    ],
)
def test_what_is_tried_next(tried, following):
    assert next_pieces(tried, most=8) == following


def test_every_path_ends_at_the_fastest():
    """Whatever is measured, numbers double, and a number without recomputation is reached or too
    slow."""
    times = (0.5, 0.99, 1.0, 1.2, 2.0, math.inf)
    for measured in product(product(times, (0.7, 1.0)), repeat=4):
        tried, pieces = [], 1
        while pieces is not None:
            time_s, share = measured[len(tried)]
            tried.append(
                Tried(pieces) if math.isinf(time_s) else Tried(pieces, time_s, share * time_s)
            )
            best = min(tried[:-1], key=lambda one: one.time_s, default=None)
            pieces = next_pieces(([] if best is None else [best]) + tried[-1:], most=8)
        assert [one.pieces for one in tried] == [1, 2, 4, 8][: len(tried)]
        newest, before_s = tried[-1], min((t.time_s for t in tried[:-1]), default=math.inf)
        if len(tried) < 4:
            assert newest.least_s == newest.time_s or newest.least_s > 1.25 * before_s
            assert newest.time_s >= 0.97 * before_s
