"""What the benchmark of a busy machine demands of its rows."""

import pytest


@pytest.fixture
def busy(benchmark_of):
    return benchmark_of("busy")


def row(count, batch, over=0, **more):
    return {"task": "max", "allocator": "BFC", "busy": count, "batch": batch, "over": over, **more}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(0, 60), row(4, 57), row(8, 63)], []),
        ([row(0, 60), row(4, 56)], ["max, BFC beside 4: a batch of 56, and 60 alone"]),
        ([row(0, 60, over=2)], ["max, BFC beside 0: 2 steps over the limit"]),
        ([row(4, 20)], []),
        (
            [
                row(0, 60),
                row(4, None, error="not done after 9 s"),
            ],
            ["max, BFC beside 4: not done after 9 s"],
        ),
    ],
)
def test_a_busy_machine_finds_what_it_finds_alone(busy, rows, said):
    assert busy.failures(rows) == said


def test_processes_that_keep_the_machine_busy_end_with_the_row(busy):
    with busy.beside(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.poll() is not None for process in processes)
