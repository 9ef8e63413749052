"""What others give for the same bytes: one model of ``cards.py --peers`` on one card.

Each peer's step is compiled for the card, and a plan is made for the bytes that it takes. FLOPs,
bytes moved and roofline time of both are counted from the compiled modules
(:mod:`keras_remat.backends.xla.module_costs`). A row is printed as soon as it is known. The peers:

* ``jax.checkpoint``, around the parts that a functional model falls into every so many layers,
  where the least is alive; nothing is kept inside of them, or products are;
* XLA's own rematerialization, which begins where a step does not fit the card: a card with less
  memory is named;
* ``keras.RematScope``, with which the model is built.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import jax
import keras
from cards_case import MODELS, compiled_model
from model_parts import parts, variables_of
from rows import version_of

from keras_remat.backends.jax import JaxBackend
from keras_remat.backends.jax import lower as lowering
from keras_remat.backends.jax.measure import added_bytes
from keras_remat.backends.xla.compiled_memory import CompiledMemory
from keras_remat.backends.xla.module_costs import Costs, costs
from keras_remat.backends.xla.ways import Written
from keras_remat.cards.process import initialize_with_zeros
from keras_remat.cards.table import card
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.target import Target
from keras_remat.errors import InfeasibleBudgetError, RematError
from keras_remat.planning.calibrated_solve import within_budget

#: Layers that a checkpointed part has at least, and what is kept inside of it.
PART_LAYERS = (4, 10)
POLICIES = {"nothing": "nothing_saveable", "dots": "dots_saveable"}
#: Of the plain step's bytes, what XLA's own pass is asked for; it counts the arguments, too, and
#: takes this share of the card.
XLA_SHARES, XLA_USES = (0.5, 0.35), 0.95
REMAT_MODES = ("full", "activations")


def checkpointed(model: Any, least: int, policy: str) -> None:
    """Has the parts of a functional model run under ``jax.checkpoint``."""
    keeps = getattr(jax.checkpoint_policies, policy)
    pieces = parts(model, least)

    def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        env = dict(zip(map(id, model.inputs), keras.tree.flatten(inputs), strict=True))
        for function, inside in pieces:
            run = jax.checkpoint(_stateless(function, inside, training), policy=keeps)
            variables = variables_of(inside)
            given = [env[id(x)] for x in keras.tree.flatten(function.inputs)]
            results, state, losses = run(given, [v.value for v in variables])
            env.update(zip(map(id, keras.tree.flatten(function.outputs)), results, strict=True))
            for variable, value in zip(variables, state, strict=True):
                if not variable.trainable:
                    variable.assign(value)
            for loss in losses:
                next(o for o in inside if isinstance(o, keras.layers.Layer)).add_loss(loss)
        outputs = [env[id(x)] for x in model.outputs]
        return outputs if len(outputs) > 1 else outputs[0]

    model.call = call


class _Part(keras.layers.Layer):
    """A part as a layer, of which those inside learn whether they train."""

    def __init__(self, function: keras.Function):
        super().__init__()
        self._run = [function.call]

    def call(self, given: Any, training: Any = None) -> Any:
        return self._run[0](given)


def _stateless(function: keras.Function, inside: list[Any], training: Any) -> Callable[..., Any]:
    """A part as a pure function of what it reads and its variables."""
    variables, part = variables_of(inside), _Part(function)

    def run(given: list[Any], values: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        state = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=state, collect_losses=True) as scope:
            results = keras.tree.flatten(part(given, training=training))
        after = [scope.get_current_value(v) for v in variables]
        return results, after, list(scope.losses)

    return run


class Step:
    """A step of Keras's, compiled for a card.

    Args:
        name: of a model.
        target: the card; its rates count.
        batch: shapes.
        change: is done to the model before it is traced.
        scope: in which the model is built.
        compile_for: another card to compile for.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        *,
        change: Callable[[Any], None] | None = None,
        scope: AbstractContextManager[Any] | None = None,
        compile_for: Target | None = None,
    ):
        with scope or nullcontext():
            model, batch_size = compiled_model(name)
            backend = JaxBackend(target)
            batch = backend.example_batch(model, batch_size)
            if change is not None:
                change(model)
            self.traced = backend.trace(model, batch)
            written = replace(self.traced, target=compile_for or target)
            compiled = lowering.lower_plain(written)
        self.added_bytes = added_bytes(compiled)
        self.costs = costs(compiled.as_text(), target.rates)


def told(prefix: str, added_bytes: int, of: Costs) -> dict[str, Any]:
    """Returns what a row says of a step."""
    numbers = {"bytes": added_bytes, "flops": of.flops, "moved": of.bytes_moved, "s": of.time_s}
    return {f"{prefix}_{key}": value for key, value in numbers.items()}


class Ours:
    """Plans of one step, for the bytes that others take."""

    def __init__(self, plain: Step, target: Target, seconds: float):
        self._traced, self._target, self._seconds = plain.traced, target, seconds
        self._plain = plain
        self._written: dict[Schedule, Written] = {}
        profile = JaxBackend(target).estimated_profile(plain.traced)
        self.problem = Problem(plain.traced.graph, profile)
        self._memory = CompiledMemory(
            self._added_bytes, on_gpu=True, rewrites=True, compiled_time_s=self._time_s
        )

    def _added_bytes(self, problem: Problem, schedule: Schedule | None) -> int:
        if schedule is None:
            return self._plain.added_bytes
        written = self._written.get(schedule)
        written = lowering.lower_within(self._traced, schedule, problem.room_bytes, written)
        self._written[schedule] = written
        return written.added_bytes

    def _time_s(self, problem: Problem, schedule: Schedule | None) -> float:
        if schedule is None:
            return self._plain.costs.time_s
        return costs(self._written[schedule].step.as_text(), self._target.rates).time_s

    def at(self, limit_bytes: int) -> dict[str, Any]:
        """Returns what a row says of a plan for so many bytes above the resident ones."""
        before, resident = len(self._written), self.problem.profile.resident_bytes
        try:
            planned = within_budget(
                self.problem,
                resident + limit_bytes,
                self._memory,
                solver="greedy",
                time_limit_s=self._seconds,
            )
        except InfeasibleBudgetError:
            return {"ours": "below the floor"}
        except RematError:
            return {"ours": "not found"}
        compilations = len(self._written) - before
        schedule = planned.schedule
        if schedule not in self._written:  # the plain step's bytes are as good
            found = told("ours", self._plain.added_bytes, self._plain.costs)
        else:
            compiled = self._written[schedule].step
            of = costs(compiled.as_text(), self._target.rates)
            found = told("ours", added_bytes(compiled), of)
        return {"ours": "kept", "compilations": compilations} | found


def peers(name: str, plain: Step, target: Target) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Yields peers: what each is called, and what compiles it."""
    for key, policy in POLICIES.items():
        for least in PART_LAYERS:
            yield (
                f"jax.checkpoint, {key} kept, {least} layers",
                lambda least=least, policy=policy: Step(
                    name, target, change=lambda model: checkpointed(model, least, policy)
                ),
            )
    resident = sum(v.nbytes for v in plain.traced.graph.values if v.producer is None)
    for share in XLA_SHARES:
        total = int((resident + share * plain.added_bytes) / XLA_USES)
        smaller = replace(target, total_bytes=total)
        yield (
            f"XLA's own pass, {share:g} asked",
            lambda smaller=smaller: Step(name, target, compile_for=smaller),
        )
    for mode in REMAT_MODES:
        yield (
            f"keras.RematScope({mode!r})",
            lambda mode=mode: Step(name, target, scope=keras.RematScope(mode=mode)),
        )


def rows(name: str, card_name: str, seconds: float, known: list[str]) -> Iterator[dict[str, Any]]:
    """Yields a row for each peer that is not known yet."""
    initialize_with_zeros()
    target = card(card_name)
    plain = Step(name, target)
    ours = Ours(plain, target, seconds)
    of_model = {"name": name, "card": card_name, "batch_size": MODELS[name][-1]}
    of_model |= told("plain", plain.added_bytes, plain.costs)
    for peer, compiled in peers(name, plain, target):
        if peer in known:
            continue
        started = time.perf_counter()
        row = of_model | {"peer": peer} | beside(compiled, plain, ours)
        row |= {"taken": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "jax": version_of("jax")}
        yield row | {"seconds": round(time.perf_counter() - started, 1)}


def beside(compiled: Callable[[], Step], plain: Step, ours: Ours) -> dict[str, Any]:
    """Returns what a row says of a peer, and of a plan for its bytes where it saves any."""
    try:
        step = compiled()
    except Exception as error:  # whatever a peer raises is its row
        return {"status": f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]}
    row = told("peer", step.added_bytes, step.costs) | {"status": "compiled"}
    return row | (ours.at(step.added_bytes) if step.added_bytes < plain.added_bytes else {})


def main() -> None:
    """Prints a JSON object for every row."""
    for row in rows(**json.loads(sys.argv[1])):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
