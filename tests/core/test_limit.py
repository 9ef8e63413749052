"""What may be in use: predictions leave the margin free, measurements need not."""

import dataclasses

import pytest

from keras_remat.core.limit import Limit
from keras_remat.errors import InfeasibleBudgetError


def test_the_margin_is_a_share_of_the_limit_that_predictions_leave_free():
    limit = Limit(1000, 0.25)
    assert limit.usable_bytes == 750
    assert [limit.fits(nbytes) for nbytes in (750, 751)] == [True, False]
    assert [limit.holds(nbytes) for nbytes in (1000, 1001)] == [True, False]
    assert Limit(1000).usable_bytes == 1000


@pytest.mark.parametrize(("to_bytes", "total"), [(800, 800), (1000, 1000), (2000, 1000), (-5, 1)])
def test_a_lowered_limit_keeps_its_margin_and_never_rises(to_bytes, total):
    limit = Limit(1000, 0.25)
    assert limit.lowered(to_bytes) == Limit(total, 0.25)
    assert limit == Limit(1000, 0.25), "it is another one"


def test_what_lies_beside_a_step_is_taken_off_what_it_may_be_predicted_to_need():
    limit = Limit(1000, 0.25).reserving(50).reserving(100)
    assert limit.usable_bytes == 600
    assert limit.holds(1000)
    assert limit.reserving(-200).usable_bytes == 800, "predictions may have been too high"
    assert limit.reserving(10**6).usable_bytes == 1
    assert limit.lowered(800).usable_bytes == 450


def test_it_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Limit(1000).total_bytes = 2


def test_reports_and_errors_say_the_same():
    limit = Limit(200, 0.05)
    assert str(limit) == "200 B less 5 % margin = 190 B"
    error = InfeasibleBudgetError(limit.usable_bytes, 290, "conv", limit_bytes=limit.total_bytes)
    assert f"your limit of {limit}:" in str(error)
    assert str(Limit(200)) == "200 B"
    assert str(limit.reserving(50)) == str(limit)
