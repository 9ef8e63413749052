"""Checks the arguments of ``RematAutotune``; errors say what was given and what is accepted."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from typing import Any

from keras_remat.backends.base import COMPILATIONS
from keras_remat.checks import check_among, check_int, check_name, check_seconds, check_share
from keras_remat.planning.plan import Plan, load_plan
from keras_remat.reporting.fit_report import AutotuneReport
from keras_remat.solvers import SOLVERS
from keras_remat.units import check_memory_limit

#: Words for a batch size; see ``RematAutotune``.
BATCH_SIZES = ("max", "fastest", "keep")


@dataclass(frozen=True)
class FitOptions:
    """Holds the arguments of ``RematAutotune`` that decide how a ``fit`` trains; see there."""

    memory_limit: int | str | None = None
    _: KW_ONLY
    batch_size: int | str = "max"
    solver: str = "auto"
    solver_time_limit_s: float = 30.0
    profile_steps: int = 3
    margin: float = 0.05
    seed: int = 0
    plan: Plan | None = None
    cache_dir: str | os.PathLike[str] | None = None
    micro_batches: int = 1
    learning_rate_scaling: str | None = None
    compilation: str = "auto"
    chooses_micro_batches: bool = False

    @property
    def shared(self) -> dict[str, str]:
        """Returns the options that all processes that train a model must share: all but the
        limit."""
        return {name: repr(value) for name, value in vars(self).items() if name != "memory_limit"}


def checked_options(
    *,
    memory_limit: int | str | None,
    batch_size: int | str,
    solver: str,
    solver_time_limit_s: float,
    profile_steps: int,
    margin: float,
    learning_rate_scaling: str | None,
    micro_batches: int | str | None,
    plan: Plan | str | os.PathLike[str] | None,
    cache_dir: str | os.PathLike[str] | None,
    seed: int,
    compilation: str,
) -> FitOptions:
    """Returns the arguments in one record.

    Raises:
        ValueError, TypeError: a wrong argument; the message has the accepted forms.
        OSError: the plan's file cannot be read.
    """
    check_memory_limit(memory_limit)
    check_name("solver", solver, SOLVERS)
    check_seconds("solver_time_limit_s", solver_time_limit_s)
    check_int("profile_steps", profile_steps, least=1)
    check_share("margin", margin)
    check_int("seed", seed, least=0)
    check_among("learning_rate_scaling", learning_rate_scaling, (None, "linear", "sqrt"))
    check_name("compilation", compilation, COMPILATIONS)
    if isinstance(batch_size, str):
        check_among("batch_size", batch_size, BATCH_SIZES, "a positive int")
    else:
        check_int("batch_size", batch_size, least=1, names=BATCH_SIZES)
    chooses_micro_batches = micro_batches == "auto"
    if isinstance(micro_batches, str):
        check_among("micro_batches", micro_batches, ("auto", None), "a positive int")
    elif micro_batches is not None:
        check_int("micro_batches", micro_batches, least=1)
    check_path("plan", plan, or_plan=True)
    check_path("cache_dir", cache_dir)
    if plan is not None and not isinstance(plan, Plan):
        plan = load_plan(plan)
    if not isinstance(batch_size, str):
        batch_size = int(batch_size)
    elif chooses_micro_batches:
        batch_size = "keep"
    return FitOptions(
        memory_limit=memory_limit, solver=solver, solver_time_limit_s=float(solver_time_limit_s),
        profile_steps=profile_steps, margin=float(margin), seed=seed, plan=plan,
        cache_dir=cache_dir, batch_size=batch_size, learning_rate_scaling=learning_rate_scaling,
        micro_batches=1 if chooses_micro_batches or micro_batches is None else int(micro_batches),
        compilation=compilation, chooses_micro_batches=chooses_micro_batches,
    )  # fmt: skip


def check_path(name: str, value: Any, *, or_plan: bool = False) -> None:
    """Raises ``TypeError`` for a value that is no path, ``ValueError`` for a path with a null.

    ``None`` is accepted.
    """
    if value is None or (or_plan and isinstance(value, Plan)):
        return
    if not isinstance(value, str | os.PathLike):
        accepted, got = "a path or a Plan" if or_plan else "a path", repr(value)
        if isinstance(value, AutotuneReport):
            got = "a report: give its .plan" if or_plan else "a report"
        raise TypeError(f"{name} must be {accepted}, got {got}")
    if "\0" in os.fsdecode(value):
        raise ValueError(f"{name} must be a path without a null character, got {value!r}")
