"""The report: speedup against the plain step, log entries, JSON."""

import json

from keras_remat.core.schedule import Usage
from keras_remat.reporting.fit_report import LOG_KEYS, AutotuneReport, EpochUsage, Event
from keras_remat.units import GIB


def test_speedup_is_one_until_the_plain_step_is_known():
    report = AutotuneReport()
    epoch = EpochUsage(0, 100, 10, 2.0, 0.5, 3 * GIB, 10)
    assert report.epoch_logs(epoch) == dict(zip(LOG_KEYS, (1.0, 10.0, 3.0, 50.0), strict=True))


def test_speedup_compares_samples_per_second():
    report = AutotuneReport(
        baseline=Usage(0.5, 1), baseline_batch_size=10, baseline_source="measured"
    )
    assert report.baseline_samples_per_s == 20.0
    assert report.speedup(EpochUsage(1, 100, 10, 2.0, 0.0, 0, 10)) == 2.5
    assert report.speedup(EpochUsage(1, 100, 10, 2.0, 0.0, 0, 10, 25.0)) == 2.0
    assert report.speedup(EpochUsage(1, 0, 0, 0.0, 0.0, 0, 0)) == 1.0


def test_saved_report_has_every_number(tmp_path):
    report = AutotuneReport(
        limit_bytes=7,
        batch_size=4,
        baseline=Usage(0.5, 9),
        baseline_batch_size=4,
        baseline_source="predicted",
    )
    report.epochs.append(EpochUsage(0, 8, 2, 1.0, 0.25, 6, 4))
    report.events.append(Event(3, "swap", "swapped"))
    report.save(tmp_path / "report.json")
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["baseline"] == {"time_s": 0.5, "peak_bytes": 9}
    assert document["events"] == [{"step": 3, "kind": "swap", "message": "swapped"}]
    assert document["epochs"][0]["peak_bytes"] == 6
    assert "predicted" in str(report)
    assert "swapped" in str(report)
