"""One run of :mod:`shapes`, alone in a process: what other tests leave in the allocator comes and
goes with the garbage collector.

    python shapes_case.py LENGTHS EPOCHS BATCH SHARE SECONDS
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import shapes

import keras_remat

#: Events of plans that are made.
PLANNED = {"risk", "shape", "swap", "tighten"}


def main(lengths, epochs, batch, share, solve_s):
    """Prints what the tests ask for."""
    if not keras_remat.enable_cpu_memory_stats():
        print(json.dumps(None))
        return
    shapes.SOLVE_S, shapes.BATCH = solve_s, batch
    plain = shapes.fit(lengths, epochs, None)
    limit = int(share * max(plain.watch.peaks))
    family = shapes.fit(lengths, epochs, limit)
    peaks = family.by_length(family.watch.peaks)
    planned = [event for event in family.events if event.kind in PLANNED]
    said = {
        "limit": limit,
        "over": {n: peaks for n, peaks in peaks.items() if max(peaks) > limit},
        "losses": family.watch.losses,
        "plain_losses": plain.watch.losses,
        "orders": len(set(family.orders.values())),
        "planned_lengths": sorted(family.orders),
        "planned_late": [str(event) for event in planned if event.step >= len(lengths)],
        "events": [event.message for event in family.events],
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main(*map(json.loads, sys.argv[1:]))
