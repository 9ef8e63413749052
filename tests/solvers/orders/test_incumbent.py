"""The best schedule so far: only what fits, the fastest, validated on the way out."""

import pytest

from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.solvers.orders.incumbent import Incumbent

PROBLEM = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), 7)


def test_keeps_the_fastest_that_fits() -> None:
    incumbent = Incumbent(PROBLEM, "store_all", 10.0)
    assert not incumbent.offer_store_all()
    incumbent.offer([0, 1, 2, 3, 0, 0, 4])
    incumbent.offer([0, 1, 2, 3, 0, 4])
    incumbent.offer([0, 0, 1, 2, 3, 0, 4])
    solution = incumbent.solution()
    assert solution.schedule.order == (0, 1, 2, 3, 0, 4)
    assert (solution.status, solution.lower_bound_s) == ("feasible", 5.0)
    assert incumbent.least_peak_bytes == 7


def test_nothing_that_fits_is_an_error_with_the_smallest_peak() -> None:
    incumbent = Incumbent(PROBLEM, "store_all", 10.0)
    incumbent.offer_store_all()
    incumbent.reason = "because"
    with pytest.raises(ScheduleNotFoundError, match="store_all \\(because\\)") as caught:
        incumbent.solution()
    assert (caught.value.budget_bytes, caught.value.best_peak_bytes) == (7, 11)


def test_store_all_is_optimal() -> None:
    incumbent = Incumbent(PROBLEM.with_budget(11), "store_all", 10.0)
    assert incumbent.offer_store_all()
    assert incumbent.solution().status == "optimal"
