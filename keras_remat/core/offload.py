"""A second, larger memory to which values go while nobody reads them, as a host's beside a device.

A value that was evicted comes back in one of two ways: its op runs again, or it is *fetched* from
the second memory. :class:`keras_remat.core.problem.Problem` makes every fetch an op: of ``n`` ops,
op ``n + i`` brings back what op ``i`` computed. It reads no value, needs no workspace, and may
follow any run of op ``i``, though that must not run again (S3, S4): what is fetched is a copy. So a
schedule with fetches is a sequence of op ids in which an id may repeat, and memory is counted as
ever.

**The model of time.** A fetch takes ``latency_s + (1 - overlap) · bytes / bytes_per_s`` seconds.
``overlap`` is the share of a transfer that other ops hide, the same for all of them, so that the
time of a schedule is still a sum over its positions. Copying out takes no time of its own: it goes
the other way of a full-duplex bus, from when the value is computed until its last read before the
fetch. POFO (Beaumont, Eyraud-Dubois, Shilova, NeurIPS 2021, *Efficient combination of
rematerialization and offloading for training DNNs*) plans both, for chains, and hides transfers
behind the computations that are there; Capuchin (Peng et al., ASPLOS 2020) fetches early by
measured times, and recomputes where a fetch cannot be hidden. Checkmate (2020) has no transfers.

Known limits: a bus that is busy all the time hides less than one that is not, so ``overlap`` must
be measured with as many transfers as a plan has; the buffer of a fetch that runs ahead is counted
only from its position on; all outputs of an op come back together. No backend runs fetches yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from keras_remat.errors import InvalidProblemError


@dataclass(frozen=True)
class Offload:
    """Says how fast values come back from the second memory.

    Args:
        bytes_per_s: of the bus; 0 where nothing can be fetched, infinite where transfers are free.
        latency_s: seconds of every fetch, whatever its size.
        overlap: the share of a transfer that other ops hide, from 0 to 1.

    Raises:
        InvalidProblemError: a number is negative, NaN, or not in its range.

    >>> Offload(10.0, latency_s=1.0, overlap=0.5).fetch_time_s(40)
    3.0
    """

    bytes_per_s: float
    latency_s: float = 0.0
    overlap: float = 0.0

    def __post_init__(self) -> None:
        highest = {"bytes_per_s": math.inf, "latency_s": 1e308, "overlap": 1.0}
        for field in fields(self):
            number = getattr(self, field.name)
            if (
                isinstance(number, bool)
                or not isinstance(number, (int, float))
                or not 0 <= number <= highest[field.name]
            ):
                raise InvalidProblemError(
                    f"must be a number from 0 to {highest[field.name]}, got {number!r}",
                    field=f"offload.{field.name}",
                    value=number,
                )
            object.__setattr__(self, field.name, float(number))

    def fetch_time_s(self, nbytes: int) -> float:
        """Returns seconds that a fetch of so many bytes takes; infinite without bandwidth."""
        if not self.bytes_per_s:
            return math.inf
        return self.latency_s + (1 - self.overlap) * nbytes / self.bytes_per_s
