"""A functional model as the parts that others checkpoint."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import keras


def parts(model: Any, least: int) -> list[tuple[keras.Function, list[Any]]]:
    """Returns a functional model as functions that run one after the other, each with the
    operations in it."""
    operations = [o for o in model.operations if not isinstance(o, keras.layers.InputLayer)]
    last: dict[int, int] = {id(x): len(operations) for x in keras.tree.flatten(model.outputs)}
    for at, operation in enumerate(operations):
        for x in keras.tree.flatten(operation.input):
            last[id(x)] = max(at, last.get(id(x), 0))
    made = {id(x): x for x in keras.tree.flatten(model.inputs)}
    alive = dict(made)
    held: list[int] = []
    for at, operation in enumerate(operations):
        alive.update((id(x), x) for x in keras.tree.flatten(operation.output))
        alive = {key: x for key, x in alive.items() if last.get(key, 0) > at}
        held.append(sum(math.prod(x.shape[1:]) for x in alive.values()))
    cuts = [0]
    while len(operations) - cuts[-1] >= 2 * least:
        window = range(cuts[-1] + least - 1, min(cuts[-1] + 2 * least - 1, len(operations)))
        cuts.append(min(reversed(window), key=lambda at: held[at]) + 1)
    cuts = [*cuts, len(operations)] if cuts[-1] < len(operations) else cuts
    found = []
    for begin, end in pairwise(cuts):
        inside = operations[begin:end]
        written = {id(x): x for o in inside for x in keras.tree.flatten(o.output)}
        read = {id(x): x for o in inside for x in keras.tree.flatten(o.input)}
        given = [x for key, x in read.items() if key not in written]
        results = [x for key, x in written.items() if last.get(key, 0) >= end]
        found.append((keras.Function(given, results), inside))
    return found


def variables_of(operations: list[Any]) -> list[Any]:
    """Returns the variables of operations."""
    return [v for o in operations for v in getattr(o, "variables", ())]
