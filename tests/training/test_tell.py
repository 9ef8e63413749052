"""What a person reads of a running fit: every sentence has its numbers, and reads like one."""

import re
from pathlib import Path

import pytest
from fake_backend import chain_problem, quick_plan, store_all_peak

from keras_remat.core.events import EventKind
from keras_remat.core.limit import Limit
from keras_remat.core.schedule import Usage
from keras_remat.errors import UnsupportedModelError
from keras_remat.training import tell
from keras_remat.units import MIB

LIMIT = Limit(100 * MIB, 0.05)
PLAN = quick_plan(chain_problem(64), store_all_peak(64))
WHY = UnsupportedModelError("an op without a kernel.")

SENTENCES = [
    (
        tell.plain_risks(32, 120 * MIB, LIMIT),
        "The plain step of 32 samples may need up to 120 MiB, over the limit of 100 MiB less 5 % "
        "margin = 95 MiB: it will not be run.",
    ),
    (
        tell.plain_exceeds(32, 120 * MIB, 90 * MIB, LIMIT),
        "The plain step of 32 samples takes 120 MiB measured (90 MiB predicted), above the "
        "limit of 100 MiB. Making a plan.",
    ),
    (
        tell.plain_fits(32, 90 * MIB, LIMIT),
        "The plain step of 32 samples takes 90 MiB measured, within 100 MiB: nothing is changed.",
    ),
    (
        tell.plain_fits(32, None, LIMIT),
        "The plain step of 32 samples is predicted to keep within 100 MiB: nothing is changed.",
    ),
    (
        tell.recorded_nothing(is_busy=True),
        "Another profiler session is running, or is going to, or no file can be written; the plan "
        "stays with estimated op times.",
    ),
    (
        tell.tightens(101 * MIB, 94 * MIB, LIMIT),
        "Measured peak 101 MiB is over the limit of 100 MiB (94 MiB predicted): planning again for "
        "6 MiB less.",
    ),
    (
        tell.measured(8, 94 * MIB, Usage(0.25, 99 * MIB), LIMIT, has_peak=True),
        "Step of 8 samples: 99 MiB measured (94 MiB predicted), within the limit of 100 MiB; 250 "
        "ms measured.",
    ),
    (
        tell.measured(8, 94 * MIB, Usage(0.25, 0), LIMIT, has_peak=False),
        "Step of 8 samples: 94 MiB predicted; 250 ms measured.",
    ),
    (
        tell.stays_over(8, 101 * MIB, LIMIT, is_plain=True, goes_on=False),
        "The plain step of 8 samples takes 101 MiB measured, over the limit of 100 MiB; no "
        "schedule that takes less was found. A smaller batch takes over.",
    ),
    (
        tell.out_of_memory(8, 94 * MIB, 80 * MIB),
        "The step of 8 samples (94 MiB predicted) ran out of memory with 80 MiB in use; what it "
        "had changed was put back, and its batch is trained again under a tighter plan.",
    ),
    (
        tell.gives_way(EventKind.COMPILATION, "compiled", "ordered", WHY),
        "No compiled step, training goes on ordered: an op without a kernel.",
    ),
    (
        tell.were_compared(
            EventKind.COMPILATION,
            {"compiled": Usage(0.25, 90 * MIB), "ordered": Usage(0.5, 80 * MIB)},
            "compiled",
        ),
        "Measured per step: compiled 250 ms and 90 MiB, ordered 500 ms and 80 MiB. Training goes "
        "on compiled.",
    ),
    (
        tell.goes_on(tell.more_fits(32, 80 * MIB), up=True),
        "By the 80 MiB that a batch of 32 measured, more fits.",
    ),
    (
        tell.goes_on(tell.is_over(32, 101 * MIB), up=False),
        "The 101 MiB that a batch of 32 measured are over the limit.",
    ),
    (
        tell.sizes_were_compared({8: 100.0, 16: 150.5}, 16),
        "Samples per second: 100 at 8, 150 at 16. The batch size is 16.",
    ),
    (
        tell.new_size(16, 8, 4),
        "The batch size is 16 from here on (8 before): 4 on each of 4 devices.",
    ),
    (tell.new_size(16, 8, 1), "The batch size is 16 from here on (8 before)."),
    (
        tell.first_batch_is_odd(3),
        "No larger batch: the first one had 3 samples, and most others do not. Give fit the batch "
        "of another size last.",
    ),
]


@pytest.mark.parametrize(("news", "sentence"), SENTENCES, ids=[one[0].kind for one in SENTENCES])
def test_a_sentence_has_its_numbers(news, sentence):
    assert news.message == sentence


def test_a_larger_batch_says_what_becomes_of_updates_and_learning_rate():
    told = tell.larger_batch(64, 16, 1000, 1.0)
    assert "16 updates in an epoch instead of 63" in told
    assert "stays as it is" in told
    assert "fewer updates" in tell.larger_batch(64, 16, None, 1.0)
    assert "multiplied by 4 " in tell.larger_batch(64, 16, None, 4.0)


def test_plans_are_told_in_full():
    for news in (tell.cached(PLAN), tell.swapped(PLAN), tell.lowered_limit(LIMIT, PLAN)):
        assert str(PLAN) in news.message


def test_no_other_module_of_training_puts_an_event_into_words():
    for path in Path(tell.__file__).parent.glob("*.py"):
        found = re.findall(r"\.(?:event|warn)\(\s*EventKind", path.read_text())
        assert not found, path.name
