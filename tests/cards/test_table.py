"""Cards by name: those of the table, those of which something is different, and one's own."""

import pytest

from keras_remat.cards.table import CARDS, EXAMPLE, USABLE_SHARE, card
from keras_remat.units import GIB


def test_every_card_has_a_name_and_what_a_compiler_asks():
    for name, target in CARDS.items():
        assert card(name.lower()) is target
        assert target.on_gpu
        assert not target.is_live
        assert target.usable_bytes < target.total_bytes


def test_a_card_of_the_table_with_less_memory():
    less = card("rtx3060: memory=8GiB")
    assert less.card == "RTX3060:memory=8GiB"
    assert (less.total_bytes, less.usable_bytes) == (8 * GIB, int(USABLE_SHARE * 8 * GIB))
    assert (less.chip, less.rates) == (CARDS["RTX3060"].chip, CARDS["RTX3060"].rates)


def test_a_card_of_one_s_own():
    own = card(EXAMPLE)
    assert (own.card, own.device, own.capability) == ("RTX4070", "RTX4070", (8, 9))
    assert own.total_bytes == int(11.7 * GIB)
    assert own.chip.bytes_per_s == 504 * 10**9
    assert own.rates.seconds_per_flop == pytest.approx(1 / 29e12)
    assert own.rates.seconds_per_byte == pytest.approx(1 / 504e9)
    assert own.chip.shared_bytes_per_core == CARDS["L4"].chip.shared_bytes_per_core
    assert 20 < own.chip.cores < 60
    assert card(f"{EXAMPLE},cores=46").chip.cores == 46


def test_sixteen_bit_products_keep_their_ratio_or_are_said():
    t4 = CARDS["T4"].rates
    slow = card("T4:tflops=4").rates
    assert slow.half_flop == pytest.approx(t4.half_flop)
    assert card("T4:half_tflops=8.1").rates.half_flop == pytest.approx(1.0)


def test_a_capability_between_those_of_the_table_is_compiled_for():
    for told, capability, like in (("8.7", (8, 7), "A10G"), ("7.0", (7, 0), "V100")):
        own = card(f"Orin:memory=28GiB,capability={told},bandwidth=205,tflops=5.3")
        assert own.capability == capability
        assert own.chip.threads_per_core == CARDS[like].chip.threads_per_core


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("H10", "did you mean H100"),
        ("toaster", "known are T4"),
        ("RTX4070", "One of your own is told as 'RTX4070:memory"),
        (":memory=8GiB", "no name before the colon"),
        ("RTX4070:memory=8GiB", "also needs capability, bandwidth, tflops"),
        ("T4:", "memory, capability"),
        ("T4:memory", "must come once, with a value"),
        ("T4:memory=8GiB,memory=9GiB", "must come once"),
        ("T4:mem=8GiB", "did you mean 'memory'"),
        ("T4:memory=8", 'did you mean "8GiB"'),
        ("T4:memory=50%", "percentage"),
        ("T4:bandwidth=-1", "bandwidth must be a number from 0.001 to 1e\\+06, got '-1'"),
        ("T4:tflops=nan", "number from"),
        ("T4:tflops=1e308", "number from"),
        ("T4:capability=6.1", "at least 7.0; got '6.1'"),
        ("T4:capability=86", "such as 8.6"),
        ("T4:cores=0", "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(name, match):
    with pytest.raises(ValueError, match=match):
        card(name)
