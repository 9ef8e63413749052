"""keras_remat: train Keras models that do not fit in device memory.

Every public name is imported on first use (PEP 562), so ``import keras_remat`` loads no framework,
and not even NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_remat.backends.statistics import enable_cpu_memory_stats
    from keras_remat.batch_size.find import find_max_batch_size
    from keras_remat.batch_size.found import BatchSearch
    from keras_remat.callback import RematAutotune
    from keras_remat.cards.report import CardReport, CardRow
    from keras_remat.cards.will_it_fit import will_it_fit
    from keras_remat.core.graph import Graph, Op, Value
    from keras_remat.core.problem import Problem
    from keras_remat.core.profile import Profile
    from keras_remat.core.schedule import Schedule, Solution, Usage
    from keras_remat.core.serialize import load_problem, save_problem
    from keras_remat.core.simulate import simulate
    from keras_remat.core.validate import validate
    from keras_remat.errors import (
        InfeasibleBudgetError,
        InvalidProblemError,
        InvalidScheduleError,
        MissingPackageError,
        PeakExceededError,
        PlanMismatchError,
        RematError,
        ScheduleNotFoundError,
        UnsupportedModelError,
    )
    from keras_remat.planning.make_plan import make_plan
    from keras_remat.planning.plan import Plan, load_plan
    from keras_remat.reporting.fit_report import AutotuneReport
    from keras_remat.solvers import SOLVERS, solve

__version__ = "0.1.0"

__all__ = [
    "SOLVERS",
    "AutotuneReport",
    "BatchSearch",
    "CardReport",
    "CardRow",
    "Graph",
    "InfeasibleBudgetError",
    "InvalidProblemError",
    "InvalidScheduleError",
    "MissingPackageError",
    "Op",
    "PeakExceededError",
    "Plan",
    "PlanMismatchError",
    "Problem",
    "Profile",
    "RematAutotune",
    "RematError",
    "Schedule",
    "ScheduleNotFoundError",
    "Solution",
    "UnsupportedModelError",
    "Usage",
    "Value",
    "__version__",
    "enable_cpu_memory_stats",
    "find_max_batch_size",
    "load_plan",
    "load_problem",
    "make_plan",
    "save_problem",
    "simulate",
    "solve",
    "validate",
    "will_it_fit",
]

_NAMES_BY_MODULE = {
    "backends.statistics": ("enable_cpu_memory_stats",),
    "batch_size.found": ("BatchSearch",),
    "batch_size.find": ("find_max_batch_size",),
    "callback": ("RematAutotune",),
    "cards.report": ("CardReport", "CardRow"),
    "cards.will_it_fit": ("will_it_fit",),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
    "core.graph": ("Graph", "Op", "Value"),
    "planning.plan": ("Plan", "load_plan"),
    "planning.make_plan": ("make_plan",),
    "core.problem": ("Problem",),
    "core.profile": ("Profile",),
    "reporting.fit_report": ("AutotuneReport",),
    "core.schedule": ("Schedule", "Solution", "Usage"),
    "core.serialize": ("load_problem", "save_problem"),
    "core.simulate": ("simulate",),
    "solvers": ("SOLVERS", "solve"),
    "core.validate": ("validate",),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
