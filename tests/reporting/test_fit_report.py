"""The report: speedup against the plain step, log entries, JSON."""

import json

import pytest

from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.errors import InvalidProblemError
from keras_remat.planning.plan import Plan, plan_from_dict
from keras_remat.reporting.fit_report import (
    LOG_KEYS,
    AutotuneReport,
    EpochUsage,
    Event,
    load_report,
)
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


def planned(measured_peak):
    solution = Solution(Schedule((0, 1, 2, 3, 0, 4)), "greedy", "feasible", 0.5)
    measured = Usage(1.0, measured_peak)
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0))
    return Plan("f" * 64, 8, solution, Usage(5.0, 11), Usage(6.0, 7), measured, problem=problem)


@pytest.mark.parametrize(
    ("epochs", "peak"),
    [
        ([(9, 1.0)], 7),  # its steps were not all under the last plan
        ([(9, 1.0), (7, 0.0)], 7),
        ([(9, 1.0), (8, 1e-4)], 8),  # later steps took more
        ([(9, 1.0), (12, 0.5)], 7),  # a plan was made in it
    ],
)
def test_the_peak_is_that_of_the_step_that_ran_in_the_end(epochs, peak):
    report = AutotuneReport(limit_bytes=7, plan=planned(7))
    report.epochs = [EpochUsage(i, 4, 1, 1.0, s, p, 4) for i, (p, s) in enumerate(epochs)]
    assert report.peak_bytes == peak
    assert report.limit_kept is (peak <= 7)


def test_nothing_is_known_before_the_first_epoch():
    report = AutotuneReport(limit_bytes=7)
    assert (report.peak_bytes, report.limit_kept) == (None, None)
    assert "details" in report.verdict()


def test_saved_report_comes_back_with_its_plan(tmp_path):
    report = AutotuneReport(
        limit_bytes=7,
        max_batch_size=9,
        batch_size=4,
        baseline=Usage(0.5, 9),
        baseline_batch_size=4,
        baseline_source="predicted",
        epochs=[EpochUsage(0, 8, 2, 1.0, 0.25, 6, 4, 3.5)],
        events=[Event(3, "swap", "swapped")],
        plan=planned(7),
    )
    report.save(tmp_path / "report.json")
    loaded = load_report(
        tmp_path / "report.json", lambda raw, name: plan_from_dict(raw, source=name)
    )
    assert loaded == report
    report.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 3),
        ("events", [{"step": "x"}]),
        ("baseline", {"time_s": 1}),
        ("baseline", {"time_s": float("nan"), "peak_bytes": 1}),
        ("limit_bytes", "7"),
        ("limit_bytes", 0),
        ("phase_peak_bytes", {"validation": "7"}),
    ],
)
def test_malformed_report_file_is_refused_by_name(field, value, tmp_path):
    AutotuneReport().save(tmp_path / "report.json")
    document = json.loads((tmp_path / "report.json").read_text()) | {field: value}
    (tmp_path / "report.json").write_text(json.dumps(document))
    with pytest.raises(InvalidProblemError, match=rf"report\.json: {field}"):
        load_report(tmp_path / "report.json", lambda raw, name: planned(7))


def test_a_changed_batch_size_is_in_the_verdict():
    report = AutotuneReport(
        limit_bytes=2**20, baseline=Usage(0.5, 2**19), baseline_batch_size=4,
        baseline_source="measured", plan=planned(2**18),
        epochs=[EpochUsage(0, 64, 4, 4.0, 0.0, 2**18, 16)],
    )  # fmt: skip
    lines = report.verdict().splitlines()
    assert lines[1].startswith("  plain, 4  ")
    assert lines[2].startswith("  remat, 16 ")


@pytest.mark.parametrize(("batch_size", "said"), [(4, True), (16, False)])
def test_what_needs_no_recomputation_is_told_for_the_batch_of_the_plain_step(batch_size, said):
    report = AutotuneReport(
        limit_bytes=8, baseline=Usage(0.5, 15), baseline_batch_size=4,
        baseline_source="measured", plan=planned(7),
        epochs=[EpochUsage(0, 64, 4, 4.0, 0.0, 7, batch_size)],
    )  # fmt: skip
    assert ("with no op run again: 11 B (predicted)" in str(report)) is said


def test_the_plain_step_alone_has_one_row():
    report = AutotuneReport(
        limit_bytes=2**20, baseline=Usage(0.5, 2**19), baseline_batch_size=4,
        baseline_source="measured", epochs=[EpochUsage(0, 64, 16, 4.0, 0.0, 2**19, 4)],
    )  # fmt: skip
    rows = report.verdict().splitlines()[1:-1]
    assert [row.split()[0] for row in rows] == ["plain"]
    assert rows[0].endswith("limit KEPT")


@pytest.mark.parametrize(
    ("plan", "said"), [(planned(6), "before the last plan a step"), (None, "an earlier step")]
)
def test_a_step_over_the_limit_before_the_last_one_is_told(plan, said):
    report = AutotuneReport(
        limit_bytes=7, plan=plan,
        epochs=[EpochUsage(0, 8, 2, 1.0, 2.0, 9, 4), EpochUsage(1, 8, 2, 1.0, 0.0, 6, 4)],
    )  # fmt: skip
    *_, row, told, _ = report.verdict().splitlines()
    assert row.endswith("limit KEPT")
    assert told == f"  {said} took 9 B"


def test_a_device_that_tells_nothing_has_no_verdict_or_a_predicted_one():
    report = AutotuneReport(limit_bytes=7, epochs=[EpochUsage(0, 8, 2, 1.0, 0.0, 0, 4)])
    assert (report.peak_bytes, report.limit_kept) == (None, None)
    report.epochs = [EpochUsage(0, 8, 2, 1.0, 0.0, 6, 4)]
    report.events.append(Event(0, "predicted", "The allocator keeps no statistics."))
    row, why = report.verdict().splitlines()[1:-1]
    assert row.endswith("limit KEPT")
    assert why == "  predicted, not measured: the device's allocator keeps no statistics"


def test_the_reason_of_a_missed_limit_is_the_one_that_says_most():
    report = AutotuneReport(limit_bytes=7, epochs=[EpochUsage(0, 8, 2, 1.0, 0.0, 9, 4)])
    report.events = [Event(1, "kept", "Nothing less was found."), Event(2, "measured", "9 B.")]
    assert "2 B (28.6 %) over the limit: Nothing less was found." in report.verdict()
    report.events.clear()
    assert "no schedule that takes less was found" in report.verdict()


@pytest.mark.parametrize(
    ("plain", "predicts", "row", "line"),
    [
        ("measured", False, "measured", "500 ms, 9 B (measured)"),
        ("measured", True, "peak predicted", "500 ms (measured), 9 B (predicted)"),
        ("predicted", False, "predicted", "500 ms, 9 B (predicted)"),
        ("predicted", True, "predicted", "500 ms, 9 B (predicted)"),
    ],
)
def test_a_peak_that_was_predicted_is_never_called_measured(plain, predicts, row, line):
    report = AutotuneReport(
        limit_bytes=7, baseline=Usage(0.5, 9), baseline_batch_size=4, baseline_source=plain,
        events=[Event(0, "predicted", "No statistics.")] * predicts, plan=planned(7),
    )  # fmt: skip
    assert report.peaks_source == ("predicted" if predicts else "measured")
    assert report.verdict().splitlines()[1].endswith(f"      {row}")
    assert f"plain step of 4: {line}" in str(report).splitlines()
    assert max(map(len, str(report).splitlines())) <= 79
