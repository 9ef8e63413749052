"""How far two runs are apart is told where one has no number, too."""

from math import inf, nan


def test_losses_that_are_no_number_are_infinitely_far_apart(benchmark_of):
    difference = benchmark_of("rows").difference
    assert difference([1.0, 2.0], [1.0, 2.5]) == 0.25
    assert difference([1.0, 2.0], [1.0, nan]) == difference([nan, 2.0], [1.0, 2.0]) == inf
