"""Makes layered random graphs, the family on which the order of ops itself decides.

The recipe is that of the public set of MOCCASIN (Bartan et al. 2023, arXiv 2304.14463), which takes
it from Gagrani et al. (NeurIPS 2022, *Neural topological ordering for computation graphs*): ops in
layers of very different widths, edges between neighbouring layers so that every op is read, and
skip connections. The parameters have the names of that set's files (``n``, ``w``, ``nlv``, ``ed``,
``scd``). The sizes of values are drawn from a mixture of normal distributions, times uniformly.

Known limits: told again from the papers, not their code; the same parameters give graphs alike in
widths, degrees and sizes, not the same graphs.
"""

from __future__ import annotations

import random
from itertools import pairwise

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile

SIZES = (
    (0.3, 500.0, 200.0),
    (0.3, 1_000.0, 500.0),
    (0.2, 3_000.0, 1_000.0),
    (0.2, 5_000.0, 1_000.0),
)
"""Weight, mean and standard deviation in bytes of the parts of the mixture."""
WIDTHS = {100: 0.27, 250: 0.43, 500: 0.36, 1000: 0.31}
"""The exponent of the width for the numbers of ops in the public set."""


def layered(
    ops: int,
    seed: int,
    *,
    width: float | None = None,
    spread: float = 0.75,
    edges: float = 0.2,
    skips: float = 0.14,
) -> Problem:
    """Returns a layered random problem without a budget.

    Args:
        ops: how many.
        seed: of every choice.
        width: layers have ``ops ** width`` ops on average (``w``); as in the public set, or 0.35.
        spread: by which share of the average widths differ from it at most (``nlv``).
        edges: the probability of an edge between ops of neighbouring layers (``ed``).
        skips: the share of edges that leave out layers (``scd``).
    """
    rng = random.Random(f"layered {ops} {seed}")
    average = ops ** (WIDTHS.get(ops, 0.35) if width is None else width)
    layers: list[list[int]] = [[0]]
    count = 1
    while count < ops - 1:
        size = max(1, round(average * rng.uniform(1 - spread, 1 + spread)))
        size = min(size, ops - 1 - count)
        layers.append(list(range(count, count + size)))
        count += size
    layers.append([ops - 1])
    reads: list[set[int]] = [set() for _ in range(ops)]
    for above, below in pairwise(layers):
        for op_id in below:
            reads[op_id] = {source for source in above if rng.random() < edges}
            reads[op_id] |= set() if reads[op_id] else {rng.choice(above)}
        for source in set(above).difference(*(reads[op_id] for op_id in below)):
            reads[rng.choice(below)].add(source)
    place = {op_id: at for at, layer in enumerate(layers) for op_id in layer}
    plain = sum(map(len, reads))
    for _ in range(round(plain * skips / (1 - skips))):
        while True:
            source, target = sorted(rng.sample(range(ops), 2))
            if place[target] > place[source] + 1 and source not in reads[target]:
                break
        reads[target].add(source)
    return Problem(
        Graph(
            tuple(Op(i, f"op{i}", "Random", tuple(sorted(reads[i])), (i,)) for i in range(ops)),
            tuple(Value(i, f"v{i}", _size(rng), producer=i) for i in range(ops)),
            (ops - 1,),
        ),
        Profile(tuple(rng.random() * 1e-3 for _ in range(ops)), (0,) * ops, 0),
        name=f"layered_n{ops}_s{seed}",
    )


def _size(rng: random.Random) -> int:
    """The bytes of a value."""
    _, mean, deviation = rng.choices(SIZES, [weight for weight, _, _ in SIZES])[0]
    return max(10, 10 * round(rng.gauss(mean, deviation) / 10))
