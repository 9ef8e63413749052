"""One replica's step is cut out of what a strategy runs on all, where they do the same."""

import pytest
from replicas_outcome import outcome


def test_every_replica_runs_the_step_on_its_own_device():
    came = outcome("embedding")
    assert [device.rpartition(":")[2] for device in came["devices"]] == ["0", "1"]
    assert came["ours"] == pytest.approx(came["plain"], rel=1e-6)


def test_what_gathers_or_reduces_is_never_recomputed():
    came = outcome("embedding")
    assert came["collectives"] == ["CollectiveReduceV2", "CollectiveGatherV2"]
    assert came["recomputable"] == [False, False]


@pytest.mark.slow
def test_gradients_in_packs_need_less_than_in_one_and_are_the_same():
    came = outcome("packs")
    one, several, weights = came["one"], came["several"], came["bytes"]
    assert len(several["collectives"]) > 3 * len(one["collectives"])
    assert several["ours"] == one["ours"] == came["plain"]
    assert one["peak"] >= one["plain_least"] >= 2 * weights
    assert several["plain_least"] == pytest.approx(one["plain_least"], rel=0.01)
    assert several["peak"] < 0.8 * weights


@pytest.mark.slow
def test_loops_are_written_for_every_replica():
    came = outcome("recurrent")
    assert came["ours"] == pytest.approx(came["plain"], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("asks", "UnsupportedModelError: Replica 1 does not compute what the first one does"),
        ("follows", "what one replica computes from its part of the batch decides on another"),
        ("uneven", "UnsupportedBatchError: A batch of 32 samples does not divide evenly among 2"),
    ],
)
def test_replicas_that_differ_are_refused_with_the_reason(name, said):
    assert said in outcome("refusals")[name]
