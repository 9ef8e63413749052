"""keras_remat: train Keras models that do not fit in device memory.

Every public name is imported on first use (PEP 562), so ``import keras_remat`` loads no framework, and not even NumPy.

``simulate`` and ``validate`` are functions that live in submodules of the same name. Python sets an imported submodule as an
attribute of its package, so whichever code imports ``keras_remat.simulate`` first would turn the public function into a module.
:class:`_Package` stores the function instead. The modules stay reachable where an import needs them: ``from
keras_remat.simulate import live_bytes`` works, ``import keras_remat.simulate as name`` gives the function.

>>> import keras_remat
>>> from keras_remat.simulate import live_bytes
>>> keras_remat.simulate.__name__, callable(keras_remat.simulate)
('simulate', True)
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_remat.autotune import BatchSearch
    from keras_remat.callback import RematAutotune
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
    from keras_remat.graph import Graph, Op, Value
    from keras_remat.max_batch import find_max_batch_size
    from keras_remat.plan import Plan, load_plan
    from keras_remat.planning import make_plan
    from keras_remat.problem import Problem
    from keras_remat.profile import Profile
    from keras_remat.report import AutotuneReport
    from keras_remat.schedule import Schedule, Solution, Usage
    from keras_remat.serialize import load_problem, save_problem
    from keras_remat.simulate import simulate
    from keras_remat.solvers import SOLVERS, solve
    from keras_remat.validate import validate

__version__ = "0.1.0"

__all__ = [
    "SOLVERS",
    "AutotuneReport",
    "BatchSearch",
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
    "find_max_batch_size",
    "load_plan",
    "load_problem",
    "make_plan",
    "save_problem",
    "simulate",
    "solve",
    "validate",
]

_NAMES_BY_MODULE = {
    "autotune": ("BatchSearch",),
    "max_batch": ("find_max_batch_size",),
    "callback": ("RematAutotune",),
    "errors": (
        "InfeasibleBudgetError",
        "InvalidProblemError",
        "InvalidScheduleError",
        "MissingPackageError",
        "PeakExceededError",
        "PlanMismatchError",
        "RematError",
        "ScheduleNotFoundError",
        "UnsupportedModelError",
    ),
    "graph": ("Graph", "Op", "Value"),
    "plan": ("Plan", "load_plan"),
    "planning": ("make_plan",),
    "problem": ("Problem",),
    "profile": ("Profile",),
    "report": ("AutotuneReport",),
    "schedule": ("Schedule", "Solution", "Usage"),
    "serialize": ("load_problem", "save_problem"),
    "simulate": ("simulate",),
    "solvers": ("SOLVERS", "solve"),
    "validate": ("validate",),
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


class _Package(ModuleType):
    """The type of this package's module: an imported submodule whose name is a public function's never hides the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and _MODULE_OF.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
