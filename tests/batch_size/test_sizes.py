"""Which size is tried next: there is always an answer, and every path ends."""

import itertools

import pytest

from keras_remat.batch_size.sizes import (
    NOISE,
    RESOLUTION,
    UPDATES_PER_EPOCH,
    SizeFacts,
    SizeMove,
    faster_size,
    largest_wanted,
    next_size,
    worth_running,
)

SIZES = (1, 2, 3, 20, 100)
FLAGS = tuple(itertools.product((False, True), repeat=4))


def facts_of(**changes):
    given = {
        "predicted": 100,
        "at_most": 400,
        "trained": 0,
        "failed": 401,
        "failed_is_measured": True,
        "failures": 0,
        "reached": 0,
        "solves_left": 1,
        "time_to_run": True,
        "time_to_solve": True,
        "runs_left": 5,
    }
    return SizeFacts(**(given | changes))


def all_facts():
    for predicted, at_most, trained in itertools.product(SIZES, SIZES, (0, *SIZES)):
        for failed in {at_most + 1, *(size for size in SIZES if size <= at_most)}:
            if trained > at_most or failed <= trained:
                continue
            for failures, runs_left, reached in itertools.product((0, 1, 3), (0, 1), (0, *SIZES)):
                if bool(failures) > (failed <= at_most):
                    continue
                for measured, solves_left, to_run, to_solve in FLAGS:
                    yield SizeFacts(
                        predicted=predicted,
                        at_most=at_most,
                        trained=trained,
                        failed=failed,
                        failed_is_measured=measured,
                        failures=failures,
                        reached=reached,
                        solves_left=solves_left,
                        time_to_run=to_run,
                        time_to_solve=to_solve,
                        runs_left=runs_left,
                    )


def test_every_combination_of_facts_has_a_legal_answer():
    count = 0
    for facts in all_facts():
        move, size = next_size(facts)
        count += 1
        if move is SizeMove.STOP:
            assert size == 0
        else:
            assert facts.trained < size < facts.failed
            assert size <= facts.at_most
            assert facts.runs_left
            assert size in worth_running(facts)
        if move is SizeMove.SOLVE:
            assert facts.solves_left
        if move is SizeMove.RUN:
            assert size == facts.reached
            assert facts.time_to_run or not facts.trained
    assert count > 10_000


@pytest.mark.parametrize("fits", [0, 1, 2, 37, 100, 101, 333, 400])
@pytest.mark.parametrize("off", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("measures", [True, False])
def test_every_path_ends_at_the_largest_size_that_trains(fits, off, measures):
    """Orders reach ``off`` times what trains, until a measured size has told better."""
    facts, reach, ran = facts_of(runs_left=100), max(1, int(off * fits)), []
    for _ in range(1000):
        sizes = worth_running(facts)
        reached = min(reach, sizes[-1]) if sizes else 0
        facts = facts_of(**(vars(facts) | {"reached": reached}))
        move, size = next_size(facts)
        if move is SizeMove.STOP:
            break
        if move is SizeMove.SOLVE:
            reach = max(reach, size) if size <= fits else reach
            facts = facts_of(**(vars(facts) | {"solves_left": facts.solves_left - 1}))
            continue
        ran.append(size)
        changes = {"solves_left": 1, "runs_left": facts.runs_left - 1}
        if size <= fits:
            changes |= {"trained": size, "failures": 0}
        else:
            changes |= {
                "failed": size,
                "failures": facts.failures + 1,
                "failed_is_measured": measures,
            }
        if measures:
            reach = fits
        facts = facts_of(**(vars(facts) | changes))
    else:
        pytest.fail("the search does not end")
    assert len(ran) == len(set(ran))
    assert facts.trained <= fits
    assert facts.trained >= min(fits, 400) / (1 + RESOLUTION) ** 2 - 1
    assert len(ran) <= 30


@pytest.mark.parametrize(("trained", "aim"), [(23, 24), (100, 106), (4, 5)])
def test_an_order_is_made_for_a_little_above_the_least_size_that_is_worth_it(trained, aim):
    assert next_size(facts_of(trained=trained, reached=0)) == (SizeMove.SOLVE, aim)


def test_only_the_first_size_that_trains_runs_when_it_is_late():
    late = {"time_to_run": False, "time_to_solve": False}
    assert next_size(facts_of(reached=100, **late)) == (SizeMove.RUN, 100)
    assert next_size(facts_of(reached=90, failed=100, failures=1, **late)) == (SizeMove.RUN, 90)
    assert next_size(facts_of(reached=200, trained=100, **late)) == (SizeMove.STOP, 0)


def test_a_failure_of_unknown_peak_is_halved():
    unknown = facts_of(trained=100, failed=200, failed_is_measured=False)
    assert worth_running(unknown) == range(103, 151)
    assert worth_running(facts_of(trained=100, failed=200)) == range(103, 200)


@pytest.mark.parametrize(
    ("wanted", "samples", "largest"),
    [
        ("max", None, None),
        ("max", 10_000, 1000),
        ("fastest", 10_000, 1000),
        ("max", 90, 16),
        (50, None, 50),
        (50, 10_000, 50),
        (50, 30, 30),
    ],
)
def test_an_epoch_keeps_its_updates_unless_a_number_was_asked_for(wanted, samples, largest):
    assert largest_wanted(wanted, 16, samples) == largest
    if wanted == "max" and samples == 10_000:
        assert samples / largest >= UPDATES_PER_EPOCH


@pytest.mark.parametrize("largest", [1, 5, 8, 11, 64])
@pytest.mark.parametrize("best", [1, 2, 8, 64])
def test_the_fastest_size_is_found_and_is_never_slower_than_the_first(largest, best):
    def rate(size):
        return 100 * size / best if size <= best else 100 * best / size

    measured = {}
    size = 1
    while size not in measured:
        assert size <= largest
        measured[size] = rate(size)
        size = faster_size(measured, largest)
    assert measured[size] >= (1 - NOISE) * max(measured.values())
    assert measured[size] >= (1 - NOISE) * measured[1]


def test_a_larger_size_that_is_no_faster_changes_nothing():
    assert faster_size({32: 100.0}, 500) == 64
    assert faster_size({32: 100.0, 64: 101.0}, 500) == 32
    assert faster_size({32: 100.0, 64: 120.0}, 500) == 128
    assert faster_size({32: 100.0, 64: 120.0}, 100) == 100
    assert faster_size({32: 100.0, 64: 120.0, 100: 90.0}, 100) == 64
    assert faster_size({32: 100.0}, 32) == 32
