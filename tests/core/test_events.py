"""Kinds of events are words in a report's file, and each is said somewhere."""

import json
import re
from pathlib import Path

import keras_remat
from keras_remat.core.events import EventKind
from keras_remat.reporting.fit_report import AutotuneReport, Event

SOURCES = "\n".join(path.read_text() for path in Path(keras_remat.__file__).parent.rglob("*.py"))


def test_a_kind_is_its_text_in_a_report(tmp_path):
    report = AutotuneReport(events=[Event(3, EventKind.OUT_OF_MEMORY, "message")])
    report.save(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved["events"] == [{"step": 3, "kind": "out-of-memory", "message": "message"}]


def test_every_kind_is_a_word_that_is_said():
    for kind in EventKind:
        assert re.fullmatch("[a-z]+(-[a-z]+)*", kind), kind
        assert f"EventKind.{kind.name}" in SOURCES or SOURCES.count(f'"{kind}"') > 1, kind
