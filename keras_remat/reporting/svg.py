"""Pictures of a page as SVG text: sharp at any size, in the reader's light or dark theme, with
names on hover.

Drawn by hand rather than by matplotlib, which is optional, knows no themes and shows nothing on
hover. Text is large in the picture's own units, so that it can be read where the page is as narrow
as a phone.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from keras_remat.reporting import colors
from keras_remat.reporting.curves import Curve, intervals
from keras_remat.reporting.tables import counted, readable
from keras_remat.units import byte_unit, format_bytes, format_seconds

MAX_POINTS = 1000
#: Columns that say on hover what runs and who holds most.
_COLUMNS, _ROWS = 120, 48
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 360, 96, 12, 12, 40


def escape(text: str) -> str:
    """Returns ``text`` on one line, with all escaped that HTML or SVG would read."""
    return html.escape(readable(text), quote=True)


def memory(
    curves: Mapping[str, Curve], limits: Mapping[str, int], measured_bytes: int | None = None
) -> str:
    """Returns bytes alive over the time of a step.

    Args:
        curves: by name, which is ``"plain"`` or ``"plan"`` and gives the colour; the last one gives
            the phases and what is told on hover.
        limits: name → bytes of a dashed line.
        measured_bytes: the peak that was measured under the last curve.
    """
    last = list(curves.values())[-1]
    highest = max(
        [1, *limits.values(), measured_bytes or 0, *(c.peak_bytes for c in curves.values())]
    )
    frame = _Frame(max(curve.starts_s[-1] for curve in curves.values()), 1.08 * highest)
    parts = [
        _open("Bytes alive over the time of one step"),
        *frame.bands(last),
        *frame.grid(highest),
    ]
    resident = last.problem.profile.resident_bytes
    parts.append(frame.line("resident", resident, f"resident {format_bytes(resident)}", below=True))
    for name, curve in curves.items():
        if not curve.live:
            continue
        path = frame.path(curve)
        parts.append(f'<path class="area {name}" d="{path}V{frame.y(0):.1f}H{frame.x(0):.1f}Z"/>')
        parts.append(f'<path class="line {name}" d="{path}"/>')
    parts += [frame.line("limit", n, f"{name} {format_bytes(n)}") for name, n in limits.items()]
    if measured_bytes is not None:
        x = frame.x(last.starts_s[last.peak_position])
        label = f"measured peak {format_bytes(measured_bytes)}"
        parts.append(
            f'<circle class="measured" cx="{x:.1f}" cy="{frame.y(measured_bytes):.1f}" r="6">'
            f"<title>{label}</title></circle>"
        )
    return "".join([*parts, *frame.hover(last), "</svg>"])


def holders(rows: Mapping[str, Mapping[str, int]]) -> str:
    """Returns one bar per name, stacked by who holds its bytes.

    Args:
        rows: name → group → bytes, with the same groups in each.
    """
    groups = list(next(iter(rows.values())))
    color = colors.layer_colors(groups)
    highest = max(1, *(sum(row.values()) for row in rows.values()))
    height = 58
    parts = [_open("Who holds the peak", height * len(rows) + 8)]
    for at, (name, row) in enumerate(rows.items()):
        left, top = float(_LEFT), at * height + 8
        parts.append(_text(_LEFT - 8, top + 27, "end", escape(name)))
        for group in groups:
            width = (_WIDTH - _LEFT - _RIGHT) * row[group] / highest
            label = f"{escape(group)}: {format_bytes(row[group])}"
            parts.append(_rect(f'fill="{color[group]}"', left, top, width, 40, label))
            left += width
    return "".join([*parts, "</svg>"])


def stays(curve: Curve) -> str:
    """Returns when the largest values are in memory, one row each."""
    found = intervals(curve, _ROWS)
    rows = {value: at for at, value in enumerate(dict.fromkeys(s.value_id for s in found))}
    frame = _Frame(curve.starts_s[-1], max(1, len(rows)))
    parts = [_open("When the largest values are in memory"), *frame.bands(curve), *frame.seconds()]
    step = (_HEIGHT - _TOP - _BOTTOM) / max(1, len(rows))
    for stay in found:
        value = curve.problem.graph.values[stay.value_id]
        left = frame.x(curve.starts_s[stay.begin])
        width = max(1.0, frame.x(curve.starts_s[stay.end + 1]) - left)
        kind = "again" if stay.again else "first"
        label = f"{escape(value.name)}: {format_bytes(value.nbytes)}"
        label += ", computed again" if stay.again else ""
        top = _TOP + rows[stay.value_id] * step
        parts.append(_rect(f'class="{kind}"', left, top, width, 0.8 * step, label))
    parts.append(
        f'<text transform="rotate(-90)" x="{-(_TOP + _HEIGHT - _BOTTOM) / 2}" y="24" '
        f'text-anchor="middle">the {len(rows)} largest values</text>'
    )
    return "".join([*parts, "</svg>"])


def speed(samples_per_s: Sequence[float], plain: float | None, first: int = 0) -> str:
    """Returns every epoch's samples per second as bars, the plain step's as a line; the epochs are
    numbered from ``first``."""
    highest = max([*samples_per_s, plain or 0.0, 1e-9])
    frame = _Frame(len(samples_per_s), 1.1 * highest)
    parts = [_open("Samples per second of every epoch")]
    for height in _ticks(highest, 4):
        parts += frame.rule(height, f"{height:g}")
    for at, value in enumerate(samples_per_s):
        left, top = frame.x(at + 0.15), frame.y(value)
        width, height = frame.x(at + 0.85) - left, frame.y(0) - top
        label = f"epoch {first + at}: {value:.1f} samples/s"
        parts.append(_rect('class="first"', left, top, width, height, label))
    if plain is not None:
        parts.append(frame.line("resident", plain, f"plain {plain:.3g}/s"))
    below = f"samples/s of {counted(len(samples_per_s), 'epoch')}"
    parts.append(_text(_WIDTH / 2, _HEIGHT - 8, "middle", below))
    return "".join([*parts, "</svg>"])


class _Frame:
    """Axes from 0 to ``width`` seconds (or things) and 0 to ``height`` bytes (or things)."""

    def __init__(self, width: float, height: float):
        self.width, self.height = width or 1.0, height or 1.0

    def x(self, amount: float) -> float:
        """Returns where seconds (or things) are, from the left."""
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * amount / self.width

    def y(self, amount: float) -> float:
        """Returns where bytes (or things) are, from the top."""
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * amount / self.height

    def bands(self, curve: Curve) -> list[str]:
        """Draws the phases as coloured ground."""
        return [
            self._column(f'class="band {phase}"', curve, begin, end, phase)
            for phase, begin, end in curve.bands
        ]

    def _column(self, look: str, curve: Curve, begin: int, end: int, title: str) -> str:
        """Draws a column over the positions from ``begin`` to ``end``."""
        left, right = self.x(curve.starts_s[begin]), self.x(curve.starts_s[end])
        return _rect(look, left, _TOP, right - left, _HEIGHT - _TOP - _BOTTOM, title)

    def grid(self, highest: int) -> list[str]:
        """Lines at round numbers of bytes, and seconds below."""
        name, unit = byte_unit(highest)
        rules = [self.rule(k * unit, f"{k:g} {name}") for k in _ticks(highest / unit, 5)]
        return [part for rule in rules for part in rule] + self.seconds()

    def rule(self, amount: float, label: str) -> list[str]:
        """Draws a thin line with its number on the left."""
        y = self.y(amount)
        return [
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
            _text(_LEFT - 8, y + 6, "end", label),
        ]

    def seconds(self) -> list[str]:
        """Draws round numbers of seconds below the axis."""
        ticks = _ticks(0.93 * self.width, 5)
        return [_text(self.x(k), _HEIGHT - 10, "middle", format_seconds(k)) for k in ticks]

    def line(self, kind: str, amount: float, label: str, *, below: bool = False) -> str:
        """Draws a line across with its name at the right end."""
        y = self.y(amount)
        return (
            f'<line class="{kind}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="{kind} label" x="{_WIDTH - _RIGHT - 4}" '
            f'y="{y + (18 if below else -6):.1f}" text-anchor="end">{escape(label)}</text>'
        )

    def path(self, curve: Curve) -> str:
        """Draws a step curve."""
        edges, heights = curve.thinned(MAX_POINTS)
        before = f"{self.y(heights[0]):.1f}"
        parts = [f"M{self.x(0):.1f} {before}"]
        for nbytes, end in zip(heights, edges[1:], strict=True):
            height = f"{self.y(nbytes):.1f}"
            parts.append("" if height == before else f"V{height}")
            parts.append(f"H{self.x(end):.1f}")
            before = height
        return "".join(parts)

    def hover(self, curve: Curve) -> list[str]:
        """Draws invisible columns that tell the layers at their highest position."""
        parts, at, n = [], 0, len(curve.live)
        total_s = curve.starts_s[-1]
        while at < n:
            stop_s = curve.starts_s[at] + total_s / _COLUMNS
            end = next((k for k in range(at + 1, n + 1) if curve.starts_s[k] >= stop_s), n)
            top = max(range(at, end), key=curve.live.__getitem__)
            held = list(curve.holders(top).items())[:3]
            most = ", ".join(f"{escape(name)} {format_bytes(nbytes)}" for name, nbytes in held)
            op = escape(curve.problem.ops[curve.schedule.order[top]].name)
            told = f"{format_bytes(curve.live[top])} while {op} runs; most: {most}"
            parts.append(self._column('class="hover"', curve, at, end, told))
            at = end
        return parts


def _rect(look: str, x: float, y: float, width: float, height: float, title: str) -> str:
    """Draws a rectangle that says ``title`` on hover; ``look`` is its class or its colour."""
    return (
        f'<rect {look} x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
        f"<title>{title}</title></rect>"
    )


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _open(label: str, height: int = _HEIGHT) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">'


def _ticks(highest: float, most: int) -> list[float]:
    """Returns round numbers from 0 to ``highest``, in at most ``most`` steps."""
    if highest <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(highest / most))
    step = next(m * power for m in (1, 2, 5, 10) if highest / (m * power) <= most * (1 + 1e-9))
    return [k * step for k in range(int(highest / step * (1 + 1e-9)) + 1)]
