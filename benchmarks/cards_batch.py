"""What closing gaps in XLA's heap is worth to the search for the largest batch on a card.

    pip install 'keras-remat[cards]'
    python benchmarks/cards_batch.py --cards T4 --models unet,MobileNetV2

The limit is ``--times`` what Keras's own step is predicted to take at the model's batch size. One
search tells both: what it has found before gaps are closed, and then. Nothing is compiled and
nothing runs, so batches are predicted. *Closing* is in seconds of the search's own thread.
"""

from __future__ import annotations

import json
import sys
import time
from unittest import mock

from rows import Failed, command_line, head, line_of, printed_by

COLUMNS = ("model", "card", "limit MiB", "plain", "with gaps", "closed", "search s", "closing s")


def row_of_case(name: str, card: str, times: float, seconds: float) -> list[object]:
    """Searches one model's largest batch, and returns a row."""
    import cards_case

    import keras_remat
    from keras_remat.backends.base import load_backends
    from keras_remat.batch_size.search import SizeSearch
    from keras_remat.cards.process import initialize_with_zeros
    from keras_remat.cards.table import card as card_of
    from keras_remat.core.problem import Problem
    from keras_remat.core.schedule import Schedule
    from keras_remat.core.simulate import simulate

    initialize_with_zeros()
    model, size = cards_case.compiled_model(name)
    (backend,) = load_backends(model, "compiled", card_of(card))
    traced = backend.trace(model, backend.example_batch(model, size))
    problem = Problem(traced.graph, backend.estimated_profile(traced))
    limit = int(times * simulate(problem, Schedule.store_all(problem.graph)).peak_bytes)
    before, took, close_gaps = [], [], SizeSearch.close_gaps

    def watched(self: SizeSearch, seconds: float) -> None:
        started = time.thread_time()
        before.append(self.largest)
        close_gaps(self, seconds)
        took.append(time.thread_time() - started)

    with mock.patch.object(SizeSearch, "close_gaps", watched):
        found = keras_remat.find_max_batch_size(
            model, size, limit, card=card, margin=0.0, time_limit_s=seconds
        )
    sizes = (found.plain_batch_size, before[0], found.max_batch_size)
    spent = (f"{found.search_time_s:.0f}", f"{took[0]:.1f}")
    return [name, card, f"{limit / 2**20:.0f}", *sizes, *spent]


def main() -> int:
    """Prints a row for every model and card, each from a process of its own."""
    words = command_line(__doc__)
    words.add_argument("--models", default="unet,MobileNetV2,gpt,residual", metavar="A,B")
    words.add_argument("--cards", default="T4", metavar="A,B")
    words.add_argument("--times", default="0.7,1,1.5", metavar="A,B")
    words.add_argument("--seconds", type=float, default=40.0, help="of one search")
    words.add_argument("--case", help="of this table, as JSON: one row")
    options = words.parse_args()
    if options.case:
        print(json.dumps({"cells": row_of_case(*json.loads(options.case))}))
        return 0
    print(head(COLUMNS, 2))
    failed = False
    for name in options.models.split(","):
        for card in options.cards.split(","):
            for times in options.times.split(","):
                case = json.dumps([name, card, float(times), options.seconds])
                variables = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
                try:
                    for row in printed_by("cards_batch.py", "--case", case, **variables):
                        print(line_of(row["cells"]), flush=True)
                except Failed as error:
                    print(f"{name} on {card}: {error}", file=sys.stderr)
                    failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
