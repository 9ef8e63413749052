"""The slices benchmark demands what it says, and its table has what was measured."""

import pytest

MIB = 2**20


@pytest.fixture
def slices(benchmark_of):
    return benchmark_of("slices")


FLOOR = {
    "model": "head", "size": 8192, "batch_size": 64, "floor": 70 * MIB, "resident": 7 * MIB,
    "share": 0.2, "peak": 14 * MIB, "parts": 32, "plain_peak": 80 * MIB, "overhead": 0.1,
    "difference": 0.0, "onednn": "off", "date": "2026-11-27",
}  # fmt: skip
BATCH = {
    "model": "unet", "size": 32, "small_peak": 20 * MIB, "batch_size": 512, "parts": 64,
    "peak": 19 * MIB, "plain_peak": 900 * MIB, "difference": 1e-6, "kept": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "row", "told"),
    [
        ("floor:head", FLOOR, []),
        ("floor:head", FLOOR | {"share": 0.5}, ["0.5 of the floor, aimed at 0.2"]),
        ("floor:head", {"floor": 1}, ["1.0 of the floor"]),
        ("floor:head", {"error": "not done after 1 s"}, ["not done after 1 s"]),
        ("card:head", FLOOR | {"share": 0.3}, ["0.3 of plain's bytes, aimed at 0.2"]),
        ("batch:resnet50", BATCH, []),
        ("batch:resnet50", BATCH | {"batch_size": 64}, ["a batch of 64, aimed at 512"]),
        ("batch:unet", BATCH | {"difference": 0.1}, ["1.0e-01 off plain's"]),
        ("batch:unet", BATCH | {"kept": False, "peak": 21 * MIB}, ["21.0 MiB, over 20.0"]),
    ],
)
def test_bounds(slices, name, row, told):
    found = slices.failures(name, slices.PARTS[name], row)
    assert len(found) == len(told)
    assert all(words in line for words, line in zip(told, found, strict=True))


def test_tables(slices):
    rows = {"floor:head": FLOOR, "floor:gru": {"error": "not done"}, "batch:unet": BATCH}
    *_, line = slices.table("floor", rows)
    told = "| head | 8192 | 64 | 70.0 | 7.0 | 0.20 | 14.0 | 32 | 80.0 | 10% | 0.0e+00 | off |"
    assert line == f"{told} 2026-11-27 |"
    *_, line = slices.table("batch", rows)
    assert line.endswith("| 900.0 | – | – | – | – | 1.0e-06 | – | – | – |")
    *_, line = slices.table("floor", {"floor:head": FLOOR | {"refused": "0.1: too much"}})
    assert line == "head, oneDNN off: refused at 0.1: too much."
    assert slices.table("floor", {}) == []
