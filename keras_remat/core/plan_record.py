"""Holds the numbers of a plan: those that reports show, and those in its file.

:class:`keras_remat.planning.plan.Plan` adds what people use: saving, reading and pictures.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from keras_remat.checks import check_among
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Solution, Usage
from keras_remat.core.serialize import problem_to_dict
from keras_remat.core.simulate import live_bytes
from keras_remat.core.slices import Slicing
from keras_remat.core.writing import Writing

FORMAT, VERSION = "keras_remat.plan", 1


@dataclass(frozen=True, repr=False)
class PlanRecord:
    """Holds the fields of :class:`keras_remat.planning.plan.Plan`, which explains them."""

    fingerprint: str
    budget_bytes: int
    solution: Solution
    store_all: Usage
    predicted: Usage
    measured: Usage | None = None
    profile_source: Literal["measured", "estimated"] = "measured"
    device: str = ""
    name: str = ""
    problem: Problem | None = field(default=None, repr=False)
    compiled: Usage | None = None
    card: str | None = None
    slicing: Slicing | None = field(default=None, repr=False)
    smallest_bytes: int = 0
    writing: Writing | None = None

    def __post_init__(self) -> None:
        check_among("profile_source", self.profile_source, ("measured", "estimated"))

    @property
    def overhead(self) -> float:
        """Returns (predicted time − store-all time) / store-all time, a ratio.

        The time is that of the compiled step, where a compiler was asked.
        """
        base_s = self.store_all.time_s
        time_s = (self.compiled or self.predicted).time_s
        return (time_s - base_s) / base_s if base_s > 0 else 0.0

    @property
    def known_peak(self) -> tuple[int, Literal["measured", "predicted"]]:
        """Returns the step's peak in bytes and where it comes from.

        A device without statistics measures 0: then the predicted peak is all that is known.
        """
        if self.measured is not None and self.measured.peak_bytes:
            return self.measured.peak_bytes, "measured"
        return self.predicted.peak_bytes, "predicted"

    @property
    def recomputes(self) -> bool:
        """Returns whether any op runs more than once."""
        return bool(self.solution.schedule.recomputed)

    @property
    def uncounted_bytes(self) -> int:
        """Returns the bytes of arrays that are too small for the device to count.

        Peaks leave them out. 0 where the device counts all arrays, or the plan was saved without
        its problem.
        """
        if not self.smallest_bytes or self.problem is None:
            return 0
        inputs = (v.nbytes for v in self.problem.graph.values if v.producer is None)
        alive = live_bytes(self.problem, self.solution.schedule, self.smallest_bytes)
        return sum(n for n in inputs if n < self.smallest_bytes) + int(max(alive, default=0))

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as the JSON object of a plan file."""
        solution, usage = self.solution, self.solution.usage
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "fingerprint": self.fingerprint,
            "budget_bytes": self.budget_bytes,
            "profile_source": self.profile_source,
            "device": self.device,
            "card": self.card,
            "store_all": asdict(self.store_all),
            "predicted": asdict(self.predicted),
            "compiled": None if self.compiled is None else asdict(self.compiled),
            "measured": None if self.measured is None else asdict(self.measured),
            "solution": {
                "solver": solution.solver,
                "status": solution.status,
                "solve_time_s": solution.solve_time_s,
                "lower_bound_s": solution.lower_bound_s,
                "usage": None if usage is None else asdict(usage),
                "order": list(solution.schedule.order),
                **({"keeps_order": True} if solution.keeps_order else {}),
            },
            "problem": None if self.problem is None else problem_to_dict(self.problem),
            **({} if self.slicing is None else {"slices": asdict(self.slicing)}),
            **({"smallest_bytes": self.smallest_bytes} if self.smallest_bytes else {}),
            **({} if self.writing is None else {"writing": self.writing.value}),
        }
