"""What a search tells: its numbers, its picture, its table."""

from dataclasses import replace

import pytest
from fake_backend import chain_problem, quick_plan, store_all_peak

from keras_remat.batch_size.found import (
    BatchSearch,
    SizeTrial,
    is_allowed,
    overhead_bound,
)
from keras_remat.core.schedule import Usage

LIMIT = int(0.9 * store_all_peak(64))


def plan_at(size):
    return quick_plan(chain_problem(size), LIMIT)


@pytest.fixture(scope="module")
def search():
    plain, tight = plan_at(32), plan_at(64)
    ran = replace(tight, measured=Usage(2 * tight.predicted.time_s, tight.predicted.peak_bytes))
    probes = (
        SizeTrial(32, plain),
        SizeTrial(64, tight),
        SizeTrial(128, None, "too large"),
        SizeTrial(64, ran),
    )
    return BatchSearch(LIMIT, 64, 32, probes, 1.5, 0.5)


def test_the_plan_is_the_one_that_ran(search):
    assert search.plan is search.probes[-1].plan
    assert search.step_time_errors == {64: pytest.approx(-0.5)}


def test_the_sentence_has_sizes_limit_and_what_was_measured(search):
    text = str(search)
    for part in ("Largest batch 64", "measured", "without recomputation 32", "3 sizes tried"):
        assert part in text


def test_without_statistics_peaks_are_the_predicted_ones(search):
    """The device measured 0 bytes."""
    blind = replace(search.plan, measured=Usage(1.0, 0))
    told = replace(search, probes=(*search.probes[:-1], SizeTrial(64, blind)))
    assert "KiB predicted, overhead" in str(told)
    assert " 0 B" not in told._repr_html_()


@pytest.mark.parametrize(
    ("limit_s", "told"),
    [
        (None, "in 1.5 s and run"),
        (2.0, "in 1.5 s of at most 2 s and run"),
        (1.0, "in 1.5 s, the first however long that takes, the others in at most 1 s and run"),
    ],
)
def test_the_sentence_says_what_bounds_the_search(search, limit_s, told):
    assert told in str(replace(search, time_limit_s=limit_s))


def test_a_notebook_shows_a_row_for_every_size_with_a_plan(search):
    shown = search._repr_html_()
    assert shown.count("<tr>") == 1 + 2
    assert "Largest batch 64" in shown
    assert "too large" not in shown


def test_the_picture_has_sizes_with_and_without_recomputation(search):
    above, below = search.plot().axes
    drawn = {line.get_label(): list(line.get_xdata()) for line in above.lines}
    assert drawn["without recomputation"] == [32]
    assert drawn["with recomputation"] == [64]
    assert below.get_xlabel() == "batch size"


def test_a_sum_in_another_order_is_not_over_the_bound():
    problem = chain_problem(4)
    assert is_allowed(problem, problem.store_all_time_s * (1 + 1e-14), 0.0)
    assert not is_allowed(problem, problem.store_all_time_s * (1 + 1e-6), 0.0)


def test_overhead_is_bounded_by_a_forward_pass_a_number_or_nothing():
    problem, plan = chain_problem(64), plan_at(64)
    forward = overhead_bound(problem, "forward")
    assert 0 < forward < 1
    assert is_allowed(problem, (1 + forward) * problem.store_all_time_s * 0.999, "forward")
    assert not is_allowed(problem, (1.01 + forward) * problem.store_all_time_s, "forward")
    assert not is_allowed(problem, plan.predicted.time_s, plan.overhead / 2)
    assert is_allowed(problem, plan.predicted.time_s, None)
