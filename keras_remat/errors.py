"""Defines every exception of the package, with the numbers in its message as attributes.

A message says what is wrong, which two numbers disagree, and what to do. Plain misuse (a wrong
type, a negative limit) raises the built-in ``ValueError`` or ``TypeError`` instead.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, Self, TypeVar

from keras_remat.units import byte_unit, format_bytes, format_unequal_bytes

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

#: Text on what to do about an error, or a function that makes it when the error is shown.
Advice = str | Callable[[], str]


class RematError(Exception):
    """Base of every error this package raises on purpose.

    Errors cross process borders (a solver may run in a process of its own), so they pickle with
    message and attributes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, self.__dict__)


def _restore(
    kind: type[RematError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> RematError:
    # __init__ would want the numbers again, under other names for every class
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class ProcessFailedError(RematError):
    """Another process that trains the same model has failed, so none can go on.

    Attributes:
        process: number of the process.
    """

    def __init__(self, process: int, why: str):
        super().__init__(
            f"Process {process} has failed, so training ends in all: {why}. "
            "Mend that, and start all processes again."
        )
        self.process = process


class InvalidScheduleError(RematError, ValueError):
    """A schedule breaks one of the rules S1 to S4.

    Attributes:
        rule: the rule that is broken, ``"S1"`` to ``"S4"``.
        position: index into the order where it is broken, or ``None`` when the rule concerns the
            whole order.
        op_id: the op concerned.
    """

    def __init__(
        self, rule: str, message: str, *, position: int | None = None, op_id: int | None = None
    ):
        super().__init__(f"{rule}: {message}")
        self.rule = rule
        self.position = position
        self.op_id = op_id


class InvalidProblemError(RematError, ValueError):
    """A problem, graph or problem file is malformed or inconsistent.

    Attributes:
        source: the file the problem came from, or ``None``.
        field: the offending field, e.g. ``"ops[3].inputs"``.
        value: the value that was found there.
    """

    def __init__(
        self,
        message: str,
        *,
        source: str | None = None,
        field: str | None = None,
        value: object = None,
    ):
        where = ": ".join(part for part in (source, field) if part)
        super().__init__(f"{where}: {message}" if where else message)
        self.message = message
        self.source = source
        self.field = field
        self.value = value


class BudgetError(RematError):
    """No schedule under the budget was found: the base of the two errors that say so.

    They have their arguments as attributes, except ``advice``.

    Advice may take as long as a few plans, and most errors are caught and never shown. So it may be
    a function, which is called when the message is first asked for.

    Args:
        statement: sentence on what is wrong, with the numbers that disagree.
        advice: what to do, or a function that returns it.
        default_advice: what to do where ``advice`` is empty.
    """

    budget_bytes: int
    floor_bytes: int
    best_peak_bytes: int | None = None

    def __init__(self, statement: str, advice: Advice, default_advice: str):
        super().__init__(statement)
        self._statement, self._advice, self._default_advice = statement, advice, default_advice

    @property
    def statement(self) -> str:
        """Returns what is wrong, without advice."""
        return self._statement

    def __str__(self) -> str:
        if not isinstance(self._advice, str):
            self._advice = self._advice()
        return f"{self._statement} {self._advice or self._default_advice}"

    def __reduce__(self) -> tuple[Any, ...]:
        str(self)  # no function crosses a process border
        return super().__reduce__()

    def with_context(self, **changes: Any) -> Self:
        """Returns this error with other arguments: under the user's limit, for instance."""
        arguments = {name: value for name, value in vars(self).items() if name[0] != "_"}
        kind: Any = type(self)
        changed: Self = kind(**arguments | changes)
        return changed


def statement_of(error: Exception) -> str:
    """Returns what an error says is wrong, without the advice of a budget error."""
    return error.statement if isinstance(error, BudgetError) else str(error)


class InfeasibleBudgetError(BudgetError):
    """No schedule can meet the budget, and that is proved.

    Attributes:
        budget_bytes: the budget that was asked for.
        floor_bytes: no schedule needs less than this (resident bytes included).
        op_name: the op that sets the floor, or ``None`` where none does.
        limit_bytes: the memory limit that the budget is a part of, or ``None`` where there is none.
        by_search: whether a search proved that nothing fits. The floor is then just above the
            budget; how much more is needed is not known.
    """

    def __init__(
        self,
        budget_bytes: int,
        floor_bytes: int,
        op_name: str | None = None,
        *,
        advice: Advice = "",
        limit_bytes: int | None = None,
        by_search: bool = False,
    ):
        budget, floor = format_unequal_bytes(budget_bytes, floor_bytes)
        least = rounded_up(limit_for(floor_bytes, budget_bytes, limit_bytes))
        need = f"every schedule needs {floor} or more."
        raised = f" to at least {least}"
        if by_search:
            budget = format_bytes(budget_bytes)
            need, raised = "every schedule needs more; how much more is not known.", ""
        elif op_name:
            need = (
                f"op {op_name!r} alone needs {floor} with its inputs, outputs, workspace and the "
                "resident bytes."
            )
        super().__init__(
            f"No schedule fits {_with_limit(budget, budget_bytes, limit_bytes)}: {need}",
            advice,
            f"Raise the memory limit{raised}, or use a smaller batch.",
        )
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.op_name = op_name
        self.limit_bytes = limit_bytes
        self.by_search = by_search


class ScheduleNotFoundError(BudgetError):
    """No schedule under the budget was found, and none was proved impossible.

    Attributes:
        budget_bytes: the budget that was asked for.
        best_peak_bytes: the smallest peak any tried schedule reached, or ``None``.
        floor_bytes: no schedule needs less than this.
        limit_bytes: the memory limit that the budget is a part of, or ``None`` where there is none.
        least_over_limit: the candidate that needs ``best_peak_bytes``, if a schedule was found.
            Training can go on with it where it misses the budget by a little.
        solver: name of the solver that found none.
        reason: why a schedule that was found cannot be used, or ``""``.
    """

    def __init__(
        self,
        budget_bytes: int,
        floor_bytes: int,
        best_peak_bytes: int | None = None,
        *,
        solver: str = "",
        advice: Advice = "",
        limit_bytes: int | None = None,
        least_over_limit: Any = None,
        reason: str = "",
    ):
        budget, best = format_bytes(budget_bytes), reason or "none found"
        if best_peak_bytes is not None:
            budget, peak = format_unequal_bytes(budget_bytes, best_peak_bytes)
            best = f"the best found needs {peak}"
        super().__init__(
            f"{solver + ': ' if solver else ''}no schedule found under "
            f"{_with_limit(budget, budget_bytes, limit_bytes)} ({best}; the floor is "
            f"{format_bytes(floor_bytes)}).",
            advice,
            "Raise the memory limit, allow more solver time, or use a smaller batch.",
        )
        self.budget_bytes = budget_bytes
        self.best_peak_bytes = best_peak_bytes
        self.floor_bytes = floor_bytes
        self.solver = solver
        self.limit_bytes = limit_bytes
        self.least_over_limit = least_over_limit
        self.reason = reason


def limit_for(need_bytes: int, budget_bytes: int, limit_bytes: int | None) -> int:
    """Returns the memory limit that leaves a budget of ``need_bytes``.

    The margin stays the same share of the limit.

    >>> limit_for(95, 19, 20), limit_for(95, 19, None)
    (100, 95)
    """
    if limit_bytes is None or limit_bytes <= budget_bytes:
        return need_bytes
    return -(-need_bytes * limit_bytes // budget_bytes)


def _with_limit(budget: str, budget_bytes: int, limit_bytes: int | None) -> str:
    """Returns a budget in words: the user's limit first, then the budget that is left of it."""
    if limit_bytes is None or limit_bytes <= budget_bytes:
        return budget
    return f"your limit of {less_margin(limit_bytes, budget_bytes, budget)}"


def less_margin(limit_bytes: int, usable_bytes: int, usable: str) -> str:
    """Returns the words for a limit and for the bytes that its margin leaves.

    >>> less_margin(100, 95, "95 B"), less_margin(100, 100, "100 B")
    ('100 B less 5 % margin = 95 B', '100 B')
    """
    if limit_bytes <= usable_bytes:
        return usable
    margin = 100 * (1 - usable_bytes / limit_bytes)
    return f"{format_bytes(limit_bytes)} less {margin:.3g} % margin = {usable}"


def rounded_up(nbytes: int) -> str:
    """Returns bytes for people that are not less than ``nbytes`` when typed in again."""
    return format_bytes(nbytes + byte_unit(nbytes)[1] // 100)


def unknown_name(what: str, name: object, names: Iterable[str]) -> str:
    """Returns a message about an unknown name, with the nearest that is known.

    >>> unknown_name("solver", "gredy", ["greedy", "dtr"])
    "unknown solver 'gredy'; did you mean 'greedy'? There are greedy, dtr"
    """
    known = list(names)
    near = difflib.get_close_matches(str(name), known, n=1)
    meant = f"did you mean {near[0]!r}? There" if near else "there"
    return f"unknown {what} {name!r}; {meant} are {', '.join(known)}"


class PlanMismatchError(RematError):
    """A plan was made for another graph.

    Attributes:
        plan_fingerprint: fingerprint in the plan.
        graph_fingerprint: fingerprint of the graph at hand.

    Args:
        difference: a sentence on the difference, where that is known.
    """

    def __init__(self, plan_fingerprint: str, graph_fingerprint: str, difference: str = ""):
        super().__init__(
            f"The plan was made for graph {plan_fingerprint[:12]}, but this train step is "
            f"{graph_fingerprint[:12]}: another model, batch shape, dtype, number of devices, or "
            "version of the framework. "
            f"{difference or 'Make a new plan with make_plan.'}"
        )
        self.plan_fingerprint = plan_fingerprint
        self.graph_fingerprint = graph_fingerprint


class PeakExceededError(RematError):
    """A peak is above the budget.

    Attributes:
        peak_bytes: the peak that was simulated or measured.
        budget_bytes: the budget that the peak had to stay under.
    """

    def __init__(self, peak_bytes: int, budget_bytes: int):
        peak, budget = format_unequal_bytes(peak_bytes, budget_bytes)
        super().__init__(
            f"The schedule needs {peak}, over the budget of {budget}. Raise the memory limit or "
            "use a smaller batch."
        )
        self.peak_bytes = peak_bytes
        self.budget_bytes = budget_bytes


class UnsupportedModelError(RematError):
    """The model, its compile options or one of its ops cannot be rematerialized here; training can
    go on unmodified."""


class UnsupportedBatchError(UnsupportedModelError):
    """The model's train step cannot be carried for batches of one shape; for others it can."""


class UnknownBatchError(ValueError):
    """A batch was asked for by its size, and its arrays do not follow from the model.

    Args:
        reason: what does not follow, and why.
        advice: what to give instead.
        lacks_shapes: whether it is the shapes of the model's inputs that are missing.
    """

    def __init__(self, reason: str, advice: str, *, lacks_shapes: bool = False):
        super().__init__(reason, advice)  # so that it can be unpickled
        self.reason, self.lacks_shapes = reason, lacks_shapes

    def __str__(self) -> str:
        return ": ".join(self.args)


class MissingPackageError(RematError, ImportError):
    """An optional package is needed for what was asked.

    Attributes:
        package: the distribution that is missing.
        extra: the extra of this package that installs it, or ``None``.
    """

    def __init__(self, package: str, purpose: str, extra: str | None = None):
        how = f"pip install 'keras-remat[{extra}]'" if extra else f"pip install {package}"
        super().__init__(f"{purpose} needs the package {package!r}: {how}")
        self.package = package
        self.extra = extra


def without_inner_frames(entry: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorates what users call: this package's errors come without the frames inside of it.

    These frames say nothing that the message does not. As with Keras's,
    ``keras.config.disable_traceback_filtering()`` brings them back.
    """

    @functools.wraps(entry)
    def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return entry(*args, **kwargs)
        except RematError as error:
            keras = sys.modules.get("keras")
            if keras is not None and not keras.config.is_traceback_filtering_enabled():
                raise
            raise error.with_traceback(None) from error.__cause__

    return called
