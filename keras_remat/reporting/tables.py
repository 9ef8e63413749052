"""Makes tables of plain text, and the table of what a schedule keeps and recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.reporting.curves import Group, groups
from keras_remat.reporting.layers import By
from keras_remat.units import format_bytes, format_seconds

MAX_NAME = 72
#: A table leaves out groups that hold less than this share of all that is kept, and run once.
SHOWN_SHARE = 0.001


class Text(str):
    """Is a string that an interactive session shows as it reads."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def printable(text: str) -> str:
    """Returns ``text`` on one line of printable characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def readable(name: str) -> str:
    """Returns ``name`` printable, shortened in the middle to ``MAX_NAME``.

    >>> readable("a\\x1b[31m\\n"), len(readable("x" * 500))
    ('a\\\\x1b[31m\\\\n', 72)
    """
    text = printable(name)
    if len(text) <= MAX_NAME:
        return text
    head = MAX_NAME // 2 - 1
    return f"{text[:head]}…{text[head + 1 - MAX_NAME :]}"


def table(
    rows: Iterable[Sequence[str]], *, indent: str = "", right: Sequence[int] = ()
) -> list[str]:
    """Returns lines with the cells of ``rows`` in columns; those in ``right`` are aligned right."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: list[str]) -> str:
        padded = [
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return (indent + "  ".join(padded)).rstrip()

    return [line(row) for row in cells]


def counted(count: int, noun: str = "run") -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def summary_text(problem: Problem, schedule: Schedule, by: By = "layer") -> str:
    """Returns a table of what a schedule keeps and recomputes, by layer, block or op.

    *Kept* are the bytes that a group holds when the backward phase begins, *saved* those that it
    would hold then without recomputation, less those kept. Groups that hold next to nothing and run
    once are left out; the last line says how many.

    Args:
        by: ``"layer"``, ``"op"`` or ``"block"``.

    >>> from keras_remat.core.graph import chain_example
    >>> from keras_remat.core.profile import Profile
    >>> problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0))
    >>> print(summary_text(problem, Schedule((0, 1, 2, 3, 0, 4))))
    layer     kept  recomputed  saved  added
    ----------------------------------------
    a          0 B  1 of 1 op     4 B    1 s
    b          1 B  -               -      -
    c          6 B  -               -      -
    ----------------------------------------
    5 layers   7 B  1 of 5 ops    4 B    1 s
    left out: 2 layers that keep next to nothing and run once
    """
    rows = groups(problem, schedule, by)
    shown = shown_groups(rows, by)
    cells = [(by, "kept", "recomputed", "saved", "added"), *map(summary_cells, shown)]
    lines = table(cells, right=(1, 3, 4))
    rule = "-" * max(map(len, lines))
    hidden = len(rows) + 1 - len(shown)
    note = f"left out: {counted(hidden, by)} that keep next to nothing and run once"
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], *[note] * bool(hidden)])


def summary_cells(row: Group) -> tuple[str, str, str, str, str]:
    """Returns the cells of one group in a table: name, kept, recomputed, saved, added."""
    again = f"{row.recomputed} of {counted(row.ops, 'op')}"
    if row.runs > row.recomputed:
        again += f", {row.runs} runs"
    return (
        readable(row.name),
        format_bytes(row.kept_bytes),
        again if row.recomputed else "-",
        format_bytes(row.saved_bytes) if row.saved_bytes else "-",
        format_seconds(row.added_s) if row.runs else "-",
    )


def shown_groups(rows: Sequence[Group], noun: str) -> list[Group]:
    """Returns the groups that keep something or run again, and the sum of all last."""
    total = Group(
        counted(len(rows), noun),
        sum(row.ops for row in rows),
        sum(row.kept_bytes for row in rows),
        sum(row.plain_bytes for row in rows),
        sum(row.recomputed for row in rows),
        sum(row.runs for row in rows),
        sum(row.added_s for row in rows),
    )
    least = max(1, SHOWN_SHARE * total.plain_bytes)
    kept = [r for r in rows if r.runs or max(r.kept_bytes, r.plain_bytes) >= least]
    return [*kept, total]
