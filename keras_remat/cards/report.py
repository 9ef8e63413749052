"""Holds the answer to "will it fit?": a row for each card, and where the memory goes.

``plain_bytes`` and ``smallest_bytes`` come from a compiler's buffer assignment for that card. Batch
sizes and samples per second are predicted by the card's roofline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from keras_remat.cards.breakdown import PARTS
from keras_remat.reporting import html as page
from keras_remat.reporting.tables import counted, readable, table
from keras_remat.units import format_bytes, format_rate

FITS, WITH_A_PLAN, DOES_NOT_FIT = VERDICTS = ("fits", "fits with a plan", "does not fit")
#: Verdict → exit status of ``keras-remat will-it-fit``; the worst row's is the command's.
EXIT_STATUS = {FITS: 0, WITH_A_PLAN: 5, DOES_NOT_FIT: 3}
#: Most layers that are shown by name.
_LAYERS = 10
_HEAD = (
    "card", "usable", "plain peak", "verdict", "largest batch", "with a plan",
    "samples/s, predicted", "with a plan",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CardRow:
    """Says whether a train step fits a card; ``None`` stands for an unknown value.

    Args:
        card: name of the card, from the table of cards or the user's own.
        usable_bytes: bytes of the card's memory that a framework uses by default.
        plain_bytes: peak bytes of the step without recomputation, weights and slots included.
        verdict: one of :data:`VERDICTS`.
        smallest_bytes: smallest peak of a plan that was found, in bytes.
        overhead: overhead of the plan that fits, (time - plain time) / plain time, a ratio; 0.0
            where the plain step fits.
        max_batch_plain, max_batch_planned: samples of the largest batch without recomputation, and
            with at most one extra forward pass of recomputation.
        samples_per_s_plain, samples_per_s_planned: samples per second at the batch size that was
            asked about.
        slices: number of slices of the batch in which the plan that fits runs some ops; ``None``
            where it runs all ops whole, or where no plan fits.
        parts: one of :data:`~keras_remat.cards.breakdown.PARTS` → bytes at the plain peak.
        remark: sentences that a reader of the row has to know beside its numbers.
    """

    card: str
    usable_bytes: int
    plain_bytes: int | None
    verdict: str | None
    smallest_bytes: int | None = None
    overhead: float | None = None
    max_batch_plain: int | None = None
    max_batch_planned: int | None = None
    samples_per_s_plain: float | None = None
    samples_per_s_planned: float | None = None
    parts: Mapping[str, int] | None = None
    slices: int | None = None
    remark: str = ""

    def __post_init__(self) -> None:
        if self.verdict is not None and self.verdict not in VERDICTS:
            raise ValueError(f"verdict must be one of {VERDICTS}, got {self.verdict!r}")
        if self.parts is not None and set(self.parts) != set(PARTS):
            raise ValueError(f"parts must be {PARTS}, got {tuple(self.parts)}")

    @property
    def answer(self) -> str:
        """Returns the verdict in words, with a plan's overhead or the smallest peak."""
        if self.verdict is None:
            return self.remark or "not known"
        if self.verdict == WITH_A_PLAN and self.overhead is not None:
            how = "" if self.slices is None else f" in {self.slices} slices"
            return f"{self.verdict}{how}, {self.overhead:+.0%} time"
        if self.verdict == DOES_NOT_FIT and self.smallest_bytes is not None:
            return f"{self.verdict}, smallest is {format_bytes(self.smallest_bytes)}"
        return self.verdict

    def cells(self) -> tuple[str, ...]:
        """Returns the row of a table."""
        return (
            self.card,
            format_bytes(self.usable_bytes),
            _bytes(self.plain_bytes),
            self.answer,
            _number(self.max_batch_plain),
            _number(self.max_batch_planned),
            _number(self.samples_per_s_plain),
            _number(self.samples_per_s_planned),
        )


@dataclass(frozen=True, kw_only=True)
class CardReport:
    """Says whether a train step fits some cards.

    Args:
        batch_size: samples of the batch that was asked about.
        rows: one row for each card, in the order of the request.
        name: name of the model.
        layers: layer → bytes of its activations at the plain peak, the largest first.
        framework: the framework whose step was compiled: ``"jax"``, or ``"tensorflow"`` where the
            model runs on that alone.
    """

    batch_size: int
    rows: tuple[CardRow, ...]
    name: str = ""
    layers: Mapping[str, int] = field(default_factory=dict)
    framework: str = "jax"

    @property
    def exit_status(self) -> int:
        """Returns the status of the worst row.

        It is 0 if all fit plainly, 5 if one needs a plan, 3 if one does not fit, and 4 if the
        verdict on one is not known.
        """
        verdicts = {row.verdict for row in self.rows}
        worst = next((one for one in (DOES_NOT_FIT, WITH_A_PLAN, None) if one in verdicts), FITS)
        return 4 if worst is None else EXIT_STATUS[worst]

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON object that ``keras-remat will-it-fit --json`` prints."""
        return {"batch_size": self.batch_size, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        of = f" of {readable(self.name)}" if self.name else ""
        title = f"A train step{of}, batch {self.batch_size}"
        lines = table([_HEAD, *(row.cells() for row in self.rows)], right=(1, 2, 4, 5, 6, 7))
        rule = "-" * max(map(len, lines))
        told = [title, lines[0], rule, *lines[1:], *self._remarks()]
        parts = self._parts()
        if parts:
            rows = [
                ("at the plain peak", *parts[0]),
                *([name, *cells] for name, *cells in parts[1]),
            ]
            told += ["", *table(rows, right=range(1, len(rows[0])))]
        if self.layers:
            told += ["", *table([("layer", "activations"), *self._layer_rows()], right=(1,))]
        return "\n".join(told)

    def _remarks(self) -> list[str]:
        told = [f"{row.card}: {row.remark}" for row in self.rows if row.remark and row.verdict]
        if self.framework == "tensorflow":
            told.append("The model runs on TensorFlow only: its step is TensorFlow's, compiled.")
        return told

    def _parts(self) -> tuple[list[str], list[tuple[str, ...]]] | None:
        """Returns the cards whose parts are known, and a row for each part; ``None`` for none."""
        known = [row for row in self.rows if row.parts is not None]
        if not known:
            return None
        rows = [
            (part, *(format_bytes(row.parts[part]) for row in known if row.parts is not None))
            for part in PARTS
        ]
        return [row.card for row in known], rows

    def _layer_rows(self) -> list[tuple[str, str]]:
        named = list(self.layers.items())
        rows = [(readable(name), format_bytes(nbytes)) for name, nbytes in named[:_LAYERS]]
        rest = named[_LAYERS:]
        if rest:
            others = sum(nbytes for _, nbytes in rest)
            rows.append((f"{counted(len(rest), 'other layer')}", format_bytes(others)))
        return rows

    def page(self) -> str:
        """Returns one self-contained HTML page."""
        title = f"Will {readable(self.name) or 'the model'} fit? Batch {self.batch_size}"
        return page.titled_page(title, self._body())

    def _repr_html_(self) -> str:
        return page.fragment(self._body())

    def _body(self) -> str:
        remarks = "".join(f"<p>{page.escape_all(remark)}</p>" for remark in self._remarks())
        shown = [page.table(_HEAD, [row.cells() for row in self.rows]), remarks]
        parts = self._parts()
        if parts:
            shown += ["<h2>Where the memory goes</h2>", page.table(("", *parts[0]), parts[1])]
        if self.layers:
            shown.append(page.table(("layer", "activations"), self._layer_rows()))
        return "".join(shown)


def _bytes(nbytes: int | None) -> str:
    return "?" if nbytes is None else format_bytes(nbytes)


def _number(number: float | None) -> str:
    if number is None:
        return "?"
    return format_rate(number) if isinstance(number, float) else f"{number:,}"
