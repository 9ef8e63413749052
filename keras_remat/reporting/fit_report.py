"""Reports what ``RematAutotune`` did and gained: events as they came, epochs as measured.

Every number has its source: ``baseline_source`` is ``"measured"`` when plain steps ran,
``"predicted"`` when they never could; ``peaks_source`` says the same of peaks.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from keras_remat.core.plan_record import PlanRecord
from keras_remat.core.schedule import Usage
from keras_remat.core.serialize import Fields, read_json, write_json
from keras_remat.errors import InvalidProblemError
from keras_remat.reporting import html, mpl, pictures
from keras_remat.reporting.records import EpochUsage, Event, ReportRecord
from keras_remat.reporting.tables import table
from keras_remat.reporting.text import epoch_rows
from keras_remat.units import GIB, byte_unit, format_bytes, format_rate, format_seconds

FORMAT, VERSION = "keras_remat.report", 1
#: Columns of everything that is printed.
WIDTH = 79
#: Kinds of events that say why a limit was not kept, the best first.
_REASONS = ("over-limit", "kept", "tighten", "measured")
#: Keys every epoch's logs get; numeric and the same from epoch 0 on.
LOG_KEYS = ("remat_speedup", "remat_batch_size", "remat_peak_gib", "remat_samples_per_s")


class AutotuneReport(ReportRecord):
    """Tells the whole story of one ``fit``.

    Attributes:
        limit_bytes: the memory limit in force; ``None`` before the first batch.
        max_batch_size: the largest batch found to fit; ``None`` when none was searched for.
        batch_size: samples per executed step now.
        baseline: seconds and peak of one plain step of ``baseline_batch_size`` samples.
        baseline_source: whether the plain step was measured or predicted.
        epochs, events: in order.
        plan: the plan in force at the end, or at the end of the newest epoch; ``None`` where the
            plain step runs.
        phase_peak_bytes: phase beside training → most bytes in use: ``"validation"`` inside
            ``fit``, and ``"between steps"``; a phase without a known peak is missing.
        predicted_phases: phases whose peak was predicted, because nothing on the device counts it.
        setup_s: seconds of set-up before the first plan trained; ``None`` where none has.
        setup_limit_s: seconds after which set-up improved no plan any more.
    """

    def epoch_logs(self, epoch: EpochUsage) -> dict[str, float]:
        """Returns the log entries of an epoch, under :data:`LOG_KEYS`."""
        numbers = (
            self.speedup(epoch),
            float(epoch.batch_size),
            epoch.peak_bytes / GIB,
            epoch.samples_per_s,
        )
        return dict(zip(LOG_KEYS, numbers, strict=True))

    @property
    def limit_kept(self) -> bool | None:
        """Returns whether the last step that ran kept to the limit; ``None`` while unknown."""
        if self.limit_bytes is None or self.peak_bytes is None:
            return None
        return self.peak_bytes <= self.limit_bytes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report: a page where the name ends in ``.html``, else JSON."""
        if Path(path).suffix.lower() in (".html", ".htm"):
            self.to_html(path)
        else:
            write_json(self.to_dict(), path)

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON object of a report file, whose plan is as in a plan file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            **vars(self),
            "baseline": None if self.baseline is None else vars(self.baseline),
            "epochs": [vars(epoch) for epoch in self.epochs],
            "events": [vars(event) | {"kind": str(event.kind)} for event in self.events],
            "plan": None if self.plan is None else self.plan.to_dict(),
        }

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one self-contained page with pictures, tables, events and versions."""
        Path(path).write_text(html.report_page(self), encoding="utf-8")

    def _repr_html_(self) -> str:
        return html.fragment(html.report_body(self))

    def plot(self, kind: str = "memory") -> Any:
        """Returns a matplotlib figure of what the ``fit`` did.

        Args:
            kind: ``"memory"``, ``"holders"`` or ``"schedule"`` as in ``Plan.plot``, or ``"speed"``
                and memory of every epoch.

        Raises:
            MissingPackageError: matplotlib is not installed.
            ValueError: another kind, or nothing to draw.
        """
        return mpl.figure(*pictures.report(self, kind))

    def verdict(self) -> str:
        """Returns plain step and final step side by side, and whether the limit was kept."""
        lines = ["                   peak     of limit     step     samples/s"]
        named = "remat" if self.plan is not None else "plain"
        many = self._has_other_size
        if self.baseline is not None and self.plan is not None:
            name = f"plain, {self.baseline_batch_size}" if many else "plain"
            rate = self.baseline_samples_per_s or 0.0
            source = self.baseline_peak_source
            is_mixed = self.baseline_source != source
            lines.append(self._row(name, self.baseline, rate, "peak " * is_mixed + source))
        if self.epochs and self.peak_bytes is not None:
            last = self.epochs[-1]
            step_s = last.step_time_s / last.steps if last.steps else 0.0
            said = {True: "limit KEPT", False: "LIMIT NOT KEPT", None: ""}[self.limit_kept]
            name = f"{named}, {last.batch_size}" if many else named
            usage = Usage(step_s, self.peak_bytes)
            lines.append(self._row(name, usage, last.samples_per_s, said))
        unmodified = [event.step for event in self.events if event.kind == "unmodified"]
        if unmodified and self.peak_bytes is None:
            lines.append(f"  from step {unmodified[-1]} on, training went on unmodified")
        if self.limit_kept is not None and self.peaks_source == "predicted":
            lines.append("  predicted, not measured: the device's allocator keeps no statistics")
        highest = max((epoch.peak_bytes for epoch in self.epochs), default=0)
        if self.limit_kept and self.limit_bytes is not None and highest > self.limit_bytes:
            before = "an earlier step" if self.plan is None else "before the last plan a step"
            lines.append(f"  {before} took {_one_decimal(highest)}")
        if self.limit_kept is False:
            lines += self._why_not_kept()
        lines += map(self._phase_row, self.phase_peak_bytes)
        lines.append(
            f"  set-up {format_seconds(self.planning_time_s)}; details: print(callback.report)"
        )
        return "\n".join(lines)

    @property
    def _has_other_size(self) -> bool:
        """Returns whether the last steps had another batch size than the plain one."""
        sizes = {self.baseline_batch_size, self.epochs[-1].batch_size if self.epochs else None}
        return len(sizes - {None, 0}) > 1

    def _row(self, name: str, usage: Usage, samples_per_s: float, said: str) -> str:
        limit = self.limit_bytes
        share = f"{100 * usage.peak_bytes / limit:.0f} %" if limit else "-"
        return (
            f"  {name:<10} {_one_decimal(usage.peak_bytes):>11}  {share:>9}  "
            f"{format_seconds(usage.time_s):>9}  {format_rate(samples_per_s):>8}"
            f"      {said}"
        ).rstrip()

    def _phase_row(self, phase: str) -> str:
        """Returns the row of a phase other than training."""
        peak, limit = self.phase_peak_bytes[phase], self.limit_bytes
        share = f"{100 * peak / limit:.0f} %" if limit else "-"
        verdict = "limit NOT KEPT" if limit and peak > limit else ""
        source = "predicted" if phase in self.predicted_phases else ""
        said = ", ".join(word for word in (verdict, source) if word)
        row = f"  {phase:<13} {_one_decimal(peak):>8}  {share:>9}  {'':>23}{said}"
        return row.rstrip()

    def _why_not_kept(self) -> list[str]:
        """Says by how much the limit was exceeded, and the last event that says why."""
        if self.peak_bytes is None or self.limit_bytes is None:
            return []
        over = self.peak_bytes - self.limit_bytes
        newest = {str(event.kind): event.message for event in self.events}
        told = (newest[kind] for kind in _REASONS if kind in newest)
        why = next(told, "no schedule that takes less was found")
        text = f"{format_bytes(over)} ({100 * over / self.limit_bytes:.1f} %) over the limit: {why}"
        return textwrap.wrap(
            text, WIDTH, initial_indent="  ", subsequent_indent="  ", max_lines=4, placeholder=" …"
        )

    def __str__(self) -> str:
        rows = epoch_rows(self)
        lines = [self.verdict().rpartition("\n")[0], "", *table(rows, right=range(len(rows[0])))]
        if self.baseline is not None:
            source = self.baseline_peak_source
            time_source = "" if source == self.baseline_source else f" ({self.baseline_source})"
            lines.append(
                f"plain step of {self.baseline_batch_size}: "
                f"{format_seconds(self.baseline.time_s)}{time_source}, "
                f"{format_bytes(self.baseline.peak_bytes)} ({source})"
            )
            if self.plan is not None and not self._has_other_size:
                in_order = format_bytes(self.plan.store_all.peak_bytes)
                lines.append(f"  with no op run again: {in_order} (predicted)")
        if self.setup_s is not None and self.setup_limit_s is not None:
            lines.append(
                f"the first plan trained after {format_seconds(self.setup_s)} of set-up "
                f"(improving it ends after {format_seconds(self.setup_limit_s)})"
            )
        for event in self.events:
            lines += textwrap.wrap(
                f"step {event.step}: {event.message}", WIDTH, subsequent_indent="  "
            )
        return "\n".join(lines)


def load_report(
    path: str | os.PathLike[str], read_plan: Callable[[object, str], PlanRecord]
) -> AutotuneReport:
    """Reads a report file.

    Args:
        read_plan: function that makes a plan from its JSON object and the file's name.

    Raises:
        InvalidProblemError: malformed; the message names the file and the field.
        OSError: the file cannot be read.
    """
    source = os.fspath(path)
    top = Fields(read_json(path, FORMAT, VERSION), source)
    baseline = top.get("baseline", (dict, type(None)), None)
    plan = top.get("plan", (dict, type(None)), None)
    phases = Fields(top.get("phase_peak_bytes", dict, {}), source, "phase_peak_bytes")

    def records(record: type[Any], key: str) -> list[Any]:
        listed = enumerate(top.get(key, list))
        return [_read(record, raw, source, f"{key}[{at}]") for at, raw in listed]

    try:
        return AutotuneReport(
            limit_bytes=top.positive("limit_bytes", None),
            max_batch_size=top.get("max_batch_size", (int, type(None)), None),
            batch_size=top.get("batch_size", (int, type(None)), None),
            baseline=None if baseline is None else _read(Usage, baseline, source, "baseline"),
            baseline_batch_size=top.get("baseline_batch_size", (int, type(None)), None),
            baseline_source=top.get("baseline_source", (str, type(None)), None),
            epochs=records(EpochUsage, "epochs"),
            events=records(Event, "events"),
            plan=None if plan is None else read_plan(plan, source),
            phase_peak_bytes={phase: phases.get(phase, int) for phase in phases.document},
            predicted_phases=top.get("predicted_phases", list, []),
            setup_s=top.get("setup_s", _KINDS["float | None"], None),
            setup_limit_s=top.get("setup_limit_s", _KINDS["float | None"], None),
        )
    except InvalidProblemError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidProblemError(f"malformed report: {error}", source=source) from error


#: The types that the fields of a report's records have in JSON.
_KINDS: dict[str, type | tuple[type, ...]] = {
    "int": int, "str": str, "float": (int, float), "float | None": (int, float, type(None)),
}  # fmt: skip


def _read(record: type[Any], document: object, source: str, prefix: str) -> Any:
    """Returns a record from a JSON object with its fields."""
    raw = Fields(document, source, prefix)
    return record(**{f.name: raw.get(f.name, _KINDS[str(f.type)]) for f in fields(record)})


def _one_decimal(nbytes: int) -> str:
    """Returns ``nbytes`` with one decimal, as in columns."""
    unit, size = byte_unit(nbytes)
    return f"{nbytes / size:.1f} {unit}" if size > 1 else f"{nbytes} B"
