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
    assert remat["temp"] <= 0.8 * plain["temp"]
    assert remat["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert remat["shardings"] == plain["shardings"]
    assert remat["peak"] <= came["limit"]
    assert remat["reduced_arrays"] <= plain["reduced_arrays"], "nothing is exchanged twice"
    assert came["in_use"][0] == came["in_use"][1], "parts that were read are in the same memory"


def test_data_parallel_takes_less_on_every_device_and_adds_no_exchange():
    came = outcome("data", "keep")
    assert_trains_with_less(came)
    assert came["remat"]["all_reduces"] == came["plain"]["all_reduces"]


@pytest.mark.slow
def test_model_parallel_takes_less_on_every_device():
    """Fewer arrays are reduced at a time: a plain step has all gradients at once."""
    assert_trains_with_less(outcome("model", "keep"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["data", "model"])
def test_joined_batches_train_as_plain_ones_of_the_same_samples(kind):
    came = outcome(kind, "joined")
    assert came["batch"] == 128
    assert came["steps"] == came["expected_steps"]
    assert came["difference"] < 1e-5
