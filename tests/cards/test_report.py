"""Reports of cards: verdicts in words, the worst row's status, text, JSON and HTML."""

import json
import re
from dataclasses import replace

import pytest

from keras_remat.cards.breakdown import PARTS
from keras_remat.cards.report import CardReport, CardRow

GIB = 2**30
PARTS_OF = dict(zip(PARTS, (GIB, 2 * GIB, 0, 1024, 5 * GIB, 7), strict=True))


def row(card="T4", verdict="fits", **more):
    known = {"usable_bytes": 11 * GIB, "plain_bytes": 8 * GIB, "overhead": 0.0}
    return CardRow(card=card, verdict=verdict, **{**known, **more})


PLANNED = row("L4", "fits with a plan", overhead=0.062, max_batch_plain=48, max_batch_planned=190)
LACKING = row("RTX3060", "does not fit", smallest_bytes=12 * GIB, overhead=None)
UNKNOWN = row("B200", None, plain_bytes=None, overhead=None, remark="the compiler refuses it")


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (row(), "fits"),
        (PLANNED, "fits with a plan, +6% time"),
        (replace(PLANNED, slices=4), "fits with a plan in 4 slices, +6% time"),
        (LACKING, "does not fit, smallest is 12 GiB"),
        (row(verdict="does not fit"), "does not fit"),
        (UNKNOWN, "the compiler refuses it"),
    ],
)
def test_an_answer_reads_like_one(of, words):
    assert of.answer == words


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ((row(),), 0),
        ((row(), PLANNED), 5),
        ((LACKING, PLANNED, row()), 3),
        ((row(), UNKNOWN), 4),
        ((PLANNED, UNKNOWN), 5),
    ],
)
def test_the_worst_row_decides_the_exit_status(rows, status):
    assert CardReport(batch_size=64, rows=rows).exit_status == status


WHERE = """
at the plain peak     T4
weights            1 GiB
slots              2 GiB
gradients            0 B
batch              1 KiB
activations        5 GiB
workspace            7 B

layer           activations
layer_0               3 MiB
layer_1               2 MiB
layer_2               1 MiB
layer_3               1 MiB
layer_4               1 MiB
layer_5               1 MiB
layer_6               1 MiB
layer_7               1 MiB
layer_8               1 MiB
layer_9               1 MiB
2 other layers        2 MiB"""


def test_the_text_has_a_row_for_every_card_and_where_the_memory_goes():
    report = CardReport(
        batch_size=64,
        rows=(row(parts=PARTS_OF), replace(PLANNED, remark="an LSTM is a loop"), UNKNOWN),
        name="net",
        layers={f"layer_{at}": max(3 - at, 1) * 2**20 for at in range(12)},
    )
    title, head, rule, *rows, remark = str(report).removesuffix(WHERE).splitlines()
    assert title == "A train step of net, batch 64"
    assert rule == "-" * len(head)
    assert [re.split("  +", line) for line in rows] == [
        ["T4", "11 GiB", "8 GiB", "fits", "?", "?", "?", "?"],
        ["L4", "11 GiB", "8 GiB", "fits with a plan, +6% time", "48", "190", "?", "?"],
        ["B200", "11 GiB", "?", "the compiler refuses it", "?", "?", "?", "?"],
    ]
    assert remark == "L4: an LSTM is a loop", "that of an unknown verdict is its answer"


def test_json_has_the_names_of_a_row():
    document = json.loads(
        json.dumps(CardReport(batch_size=8, rows=(row(parts=PARTS_OF),)).to_dict())
    )
    assert set(document) == {"batch_size", "rows"}
    (told,) = document["rows"]
    assert told["verdict"] == "fits"
    assert told["parts"] == PARTS_OF
    assert {"card", "usable_bytes", "plain_bytes", "smallest_bytes", "overhead"} <= set(told)


def test_pages_escape_names():
    report = CardReport(batch_size=8, rows=(row("<b>", parts=PARTS_OF),), name="<script>")
    assert "<script" not in report.page()
    assert report.page().startswith("<!doctype html>")
    assert "&lt;b&gt;" in report._repr_html_()


def test_wrong_verdicts_and_parts_are_refused():
    with pytest.raises(ValueError, match="verdict must be one of"):
        row(verdict="maybe")
    with pytest.raises(ValueError, match="parts must be"):
        row(parts={"weights": 1})
