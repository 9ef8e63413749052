"""How much work a time limit stands for, so that the work and not the clock ends a search.

A search that ends by the clock gives another answer whenever the machine is busier. The heuristics
therefore count steps (ops run, moves tried, CP-SAT's deterministic time), and each has a rate of
steps per second that an idle machine of today exceeds. Work limits follow from the time limit by
these rates, and results depend on the clock only if the time limit really strikes.
"""

from __future__ import annotations


def effort_s(time_limit_s: float) -> float:
    """Returns the seconds that work limits are computed from: whole ones, so that limits that
    differ by an instant mean the same work."""
    return float(round(time_limit_s)) if time_limit_s >= 1 else time_limit_s
