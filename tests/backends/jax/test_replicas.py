"""``keras.distribution`` on four devices that the host pretends to have: less memory on each, no
more waiting for each other, the same numbers."""

from pathlib import Path

import pytest
from own_process import came_of


def outcome(*arguments):
    return came_of(Path(__file__).parent / "replicas_case.py", *arguments)


def assert_trains_with_less(came):
    plain, remat = came["plain"], came["remat"]
    assert remat["recomputes"]
    assert remat["temp"] < 0.7 * plain["temp"]
    assert remat["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert remat["shardings"] == plain["shardings"]
    assert remat["peak"] <= came["limit"]


def test_data_parallel_takes_less_on_every_device_and_adds_no_exchange():
    came = outcome("data", "keep")
    assert_trains_with_less(came)
    assert came["remat"]["all_reduces"] == came["plain"]["all_reduces"]


@pytest.mark.slow
def test_model_parallel_takes_less_on_every_device():
    """What adds parts of a layer up when it runs does so when it runs again."""
    assert_trains_with_less(outcome("model", "keep"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["data", "model"])
def test_joined_batches_train_as_plain_ones_of_the_same_samples(kind):
    came = outcome(kind, "joined")
    assert came["batch"] == 128
    assert came["steps"] == came["expected_steps"]
    assert came["difference"] < 1e-5
