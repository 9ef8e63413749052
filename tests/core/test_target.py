"""Where a step will run."""

import pytest

from keras_remat.core.target import CPU_RATES, GPU_RATES, Target, gpu_rates, live


def test_a_live_device_has_the_rates_of_its_platform():
    assert live("cpu", "a CPU").rates is CPU_RATES
    assert live("gpu", "a GPU").rates is GPU_RATES
    assert live("gpu", "a GPU").is_live


def test_another_platform_is_refused():
    with pytest.raises(ValueError, match="'tpu'"):
        Target(platform="tpu", device="", rates=CPU_RATES)


def test_rates_of_a_data_sheet():
    rates = gpu_rates(1e13, 4e13, 1e12)
    assert rates.seconds_per_flop == pytest.approx(1e-13)
    assert rates.seconds_per_byte == pytest.approx(1e-12)
    assert rates.half_flop == pytest.approx(0.25)
    assert rates.expensive_flops == GPU_RATES.expensive_flops


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [("gpu", (7, 5), True), ("gpu", (8, 0), False), ("gpu", None, False), ("cpu", None, False)],
)
def test_a_gpu_is_from_before_ampere_where_that_is_known(platform, capability, expected):
    assert live(platform, "some device", capability).before_ampere is expected
