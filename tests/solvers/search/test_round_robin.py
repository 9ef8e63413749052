"""Searches go round, and those that find nothing are passed over, but not for ever."""

from __future__ import annotations

from keras_remat.solvers.search.round_robin import RoundRobin


def played(finders: set[int], rounds: int) -> list[int]:
    turns, order = RoundRobin(3), []
    for _ in range(rounds):
        at = turns.next()
        order.append(at)
        turns.report(at, found=at in finders)
    return order


def test_all_have_a_turn_before_any_has_a_second_fruitless_one() -> None:
    assert played(set(), 6) == [0, 1, 2, 0, 1, 2]


def test_who_finds_something_goes_on() -> None:
    assert played({0}, 8) == [0] * 8
    order = played({1}, 30)
    assert order.count(1) > 20
    assert order.count(0) >= 2


def test_nobody_is_left_out_for_good() -> None:
    assert set(played({2}, 12)) == {0, 1, 2}
