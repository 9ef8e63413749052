"""Decides in how many pieces a batch is trained, by what was measured; pure.

Fewer samples at a time need less memory, and less recomputation under a limit. But more pieces
mean more calls of smaller ops, which take longer for a sample on most devices, and less time on
some. So they are measured while training: the whole batch under its schedule, two pieces under
theirs, then four, until pieces need no recomputation, and as long as more of them pay.

Without a framework, a clock or a log: the driver is :mod:`keras_remat.training.backend_race`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from keras_remat.batch_size.sizes import NOISE

#: No step in pieces that has more ops is traced: the step is written out piece after piece.
MOST_OPS = 20_000
#: Pieces that are predicted to be this share slower, even without recomputation, end the search.
_HOPELESS_SHARE = 0.25


@dataclass(frozen=True)
class Tried:
    """Says what came of training a batch in so many pieces.

    Args:
        time_s: measured for a step; infinite where no schedule keeps to the limit.
        least_s: what it is predicted to take without recomputation; as much as measured where there
            is none.
        over_bytes: by how much one op alone is over the limit; at most 0 where none is.
    """

    pieces: int
    time_s: float = math.inf
    least_s: float = 0.0
    over_bytes: int = 0


def pays(time_s: float, best_s: float) -> bool:
    """Returns whether a step of ``time_s`` seconds is worth more pieces than one of ``best_s``."""
    return time_s < best_s * (1 - NOISE)


def next_pieces(tried: Sequence[Tried], most: int) -> int | None:
    """Returns how many pieces are tried next; ``None`` where the fastest of those tried is the
    answer.

    Args:
        tried: what was measured; at least one, the newest last.
        most: no larger number is tried.

    Example:
        >>> next_pieces([Tried(1, 2.0, 1.9)], 8)
        2
        >>> next_pieces([Tried(1, 2.0, 1.9), Tried(2, 2.0, 2.0)], 8) is None
        True
        >>> next_pieces([Tried(1, over_bytes=50), Tried(2, over_bytes=40)], 8) is None
        True
    """
    newest, following = tried[-1], 2 * tried[-1].pieces
    before = tried[-2] if len(tried) > 1 else newest
    if newest.pieces > before.pieces and 2 * newest.over_bytes > before.over_bytes > 0:
        return None  # halving what depends on the batch again and again leaves too much
    before_s = min((other.time_s for other in tried[:-1]), default=math.inf)
    recomputes = newest.least_s < newest.time_s
    hopeless = newest.least_s > before_s * (1 + _HOPELESS_SHARE)
    goes_on = (
        newest.pieces == 1
        or math.isinf(min(before_s, newest.time_s))
        or pays(newest.time_s, before_s)
        or (recomputes and not hopeless)
    )
    return following if goes_on and following <= most else None
