"""Walks: what is missing is recomputed, and what must not run again is not."""

from dataclasses import replace
from typing import Any

from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.solvers.orders.demand import Walk, order_of


def example(**changes: dict[str, Any]) -> Problem:
    graph = chain_example()
    ops = tuple(replace(op, **changes.get(op.name, {})) for op in graph.ops)
    return Problem(replace(graph, ops=ops), Profile((1.0,) * 5, (0,) * 5, 0))


def drop_after(drops: dict[int, list[int]]):  # type: ignore[no-untyped-def]
    def policy(walk: Walk) -> None:
        for op_id in range(5):
            walk.demand(op_id)
            walk.drop(drops.get(op_id, []))

    return policy


def test_dropped_values_come_back_with_all_they_need() -> None:
    assert order_of(example(), drop_after({1: [0]})) == [0, 1, 2, 3, 0, 4]
    assert order_of(example(), drop_after({3: [1, 2, 3]})) == [0, 1, 2, 3, 1, 2, 3, 4]
    assert order_of(example(), drop_after({3: [0, 1, 2, 3]})) == [0, 1, 2, 3, 0, 1, 2, 3, 4]


def test_an_op_that_is_not_recomputable_is_pinned() -> None:
    assert order_of(example(a={"recomputable": False}), drop_after({1: [0]})) == [0, 1, 2, 3, 4]


def test_an_op_whose_follower_ran_is_pinned() -> None:
    """S4: d must come after a, so a cannot be recomputed for e."""
    assert order_of(example(d={"after": (0,)}), drop_after({1: [0]})) == [0, 1, 2, 3, 4]
    assert order_of(example(e={"after": (0,)}), drop_after({1: [0]})) == [0, 1, 2, 3, 0, 4]


def test_demanding_a_barred_op_again_pins_its_output() -> None:
    def policy(walk: Walk) -> None:
        for op_id in range(5):
            walk.demand(op_id)
        walk.drop([4])
        if 4 not in walk.alive:
            walk.demand(4)

    assert order_of(example(e={"recomputable": False}), policy) == [0, 1, 2, 3, 4]
    assert order_of(example(), policy) == [0, 1, 2, 3, 4, 4]
