"""Problems on which both bounds are tried."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

from random_problems import random_features, random_problem, training_problem, with_random_budget

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from tests.solvers.brute_force import fastest


def small_problem(seed: int) -> Problem:
    """Any graph, or a training step, with any features and any budget."""
    rng = random.Random(seed)
    features = replace(random_features(rng), multi_outputs=False)
    if seed % 3 == 0:
        return with_random_budget(rng, random_problem(rng, 6, features))
    layers = rng.randint(3, 4)
    return with_random_budget(rng, training_problem(rng, layers, features, chain=seed % 3 == 1))


@cache
def least_seconds(seed: int) -> float | None:
    """Seconds of the fastest order of a small problem, by exhaustive search; ``None``: none
    fits."""
    best = fastest(small_problem(seed), any_order=True)
    return None if best is None else best[0]


def two_readers(
    budget: int,
    workspace: int = 0,
    resident: int = 0,
    *,
    recomputable: bool = True,
    may_reuse: bool = False,
) -> Problem:
    """x → y → cut of ten bytes each, and the end reads x and what the cut computes."""
    graph = Graph(
        (
            Op(0, "x", "", (), (0,), recomputable=recomputable),
            Op(1, "y", "", (0,), (1,)),
            Op(2, "cut", "", (1,), (2,), may_reuse=(1,) if may_reuse else ()),
            Op(3, "end", "", (0, 2), (3,)),
        ),
        tuple(Value(i, f"v{i}", 10, producer=i) for i in range(4)),
        (3,),
    )
    return Problem(graph, Profile((1.0,) * 4, (0, 0, workspace, 0), resident), budget)


def overwritten_output(recomputable: bool) -> Problem:
    """The cut reads x and y, and y was made of z; x is a graph output whose buffer the cut takes
    over; the end reads z and what the cut computes."""
    graph = Graph(
        (
            Op(0, "x", "", (), (0,), recomputable=recomputable),
            Op(1, "z", "", (), (1,)),
            Op(2, "y", "", (1,), (2,)),
            Op(3, "cut", "", (0, 2), (3,), may_reuse=(0,)),
            Op(4, "end", "", (1, 3), (4,)),
        ),
        tuple(Value(i, f"v{i}", (10, 10, 1, 10, 1)[i], producer=i) for i in range(5)),
        (0, 4),
    )
    return Problem(graph, Profile((1.0, 5.0, 1.0, 1.0, 1.0), (0,) * 5, 0), 21)
