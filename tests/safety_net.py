"""Prints what twelve fits, twelve plans and some lowered steps come to, so that a change that only
moves code can be seen to change nothing.

    python tests/safety_net.py --record net.json     before the change
    python tests/safety_net.py --compare net.json    after it: exit status 1 where something differs

The fits run on a backend without a framework and on a clock that counts simulated seconds, the
plans are made by solvers that count steps, and a lowered step is compared by the text of its
program. The file is one machine's: TensorFlow's graphs depend on the processor.
"""

import argparse
import hashlib
import json
import random
import sys
import warnings
from pathlib import Path

import fake_fit
import own_process
from fake_backend import FakeBackend, store_all_peak
from random_problems import Features, training_problem

import keras_remat
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.errors import RematError

SIZE = 100
PLAIN = store_all_peak(SIZE)
EVEN, ODD = [SIZE] * 8, [SIZE] * 7 + [30]


def _surplus(nbytes, of="remat"):
    return lambda what, size: nbytes if (what == "plain") == (of == "plain") else 0


def _failing(*calls):
    backend = FakeBackend()
    backend.fails_at = set(calls)
    return backend


def _two_ways(**options):
    first, second = FakeBackend(**options), FakeBackend(**options)
    second.compilation = "compiled"
    return first, second


#: Name → backends, batch sizes of an epoch, and the callback's options.
FITS = {
    "nothing to do": lambda: ([FakeBackend()], EVEN, {"memory_limit": 2 * PLAIN}),
    "tight": lambda: ([FakeBackend()], EVEN, {"memory_limit": int(0.7 * PLAIN)}),
    "odd last batch": lambda: ([FakeBackend()], ODD, {"memory_limit": int(0.7 * PLAIN)}),
    "infeasible": lambda: ([FakeBackend()], EVEN, {"memory_limit": 20_000}),
    "measured over": lambda: (
        [FakeBackend(surplus_bytes=_surplus(PLAIN // 10))],
        EVEN,
        {"memory_limit": int(0.75 * PLAIN)},
    ),
    "out of memory": lambda: ([_failing(2)], EVEN, {"memory_limit": int(0.8 * PLAIN)}),
    "two out of memory": lambda: ([_failing(2, 5)], ODD, {"memory_limit": int(0.9 * PLAIN)}),
    "two ways": lambda: (list(_two_ways()), EVEN, {"memory_limit": int(0.7 * PLAIN)}),
    "two ways, out of memory": lambda: (
        [_failing(2), _two_ways()[1]],
        EVEN,
        {"memory_limit": int(0.8 * PLAIN)},
    ),
    "largest batch": lambda: (
        [FakeBackend()],
        [SIZE] * 40,
        {"memory_limit": 2 * PLAIN, "batch_size": "max"},
    ),
    "fastest batch": lambda: (
        [FakeBackend()],
        [SIZE] * 40,
        {"memory_limit": 2 * PLAIN, "batch_size": "fastest"},
    ),
    "micro-batches": lambda: (
        [FakeBackend()],
        EVEN,
        {"memory_limit": int(0.5 * PLAIN), "micro_batches": "auto"},
    ),
}


def fit_of(name):
    """Returns what a fit came to: events, what ran, and the last plan's order."""
    backends, sizes, options = FITS[name]()
    error = None
    with fake_fit.fitted(*backends, **{"batch_size": "keep", "margin": 0.0, **options}) as (m, r):
        try:
            m.fit(sizes, 3, r)
        except RematError as raised:
            error = f"{type(raised).__name__}: {raised}"
    return {
        "events": [(event.step, str(event.kind), event.message) for event in r.report.events],
        "ran": _hash([[str(what), numbers] for one in backends for what, numbers in one.ran]),
        "steps": [one.kinds for one in backends],
        "plan": None if r.plan is None else _hash(r.plan.solution.schedule.order),
        "epochs": [(e.samples, e.steps, e.peak_bytes) for e in r.report.epochs],
        "error": error,
    }


def plans():
    """Returns name → hash of the order that a solver finds for a fixed problem."""
    found = {}
    features = Features(workspace=True, resident=True, may_reuse=True, multi_outputs=True)
    for seed in range(4):
        problem = training_problem(random.Random(seed), 12, features)
        peak = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
        budget = (problem.floor_bytes + 2 * peak) // 3
        for solver in ("greedy", "greedy_first", "chen_sqrt_n"):
            try:
                solved = keras_remat.solve(problem.with_budget(budget), solver=solver)
            except RematError as error:
                found[f"{solver} {seed}"] = type(error).__name__
            else:
                found[f"{solver} {seed}"] = _hash(solved.schedule.order)
    return found


def lowered():
    """Returns name → hash of the program that a small model's step runs under a plan, on the
    framework that Keras runs on."""
    import keras
    import numpy as np

    from keras_remat.backends.base import load_backends

    framework = keras.backend.backend()
    if framework == "tensorflow":
        keras_remat.enable_cpu_memory_stats()
    found = {}
    for activation in ("relu", "gelu"):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(64, activation=activation) for _ in range(6)]
        model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dropout(0.5)])
        model.compile("adam", "mse", jit_compile=framework == "jax")
        batch = np.zeros((4096, 64), "float32")
        (backend,) = load_backends(model)
        traced = backend.trace(model, backend.example_batch(model, (batch, batch)))
        problem = Problem(traced.graph, backend.estimated_profile(traced, 0))
        floor, peak = problem.floor_bytes, simulate(problem, traced_order(traced)).peak_bytes
        solved = keras_remat.solve(problem.with_budget((2 * floor + peak) // 3), solver="greedy")
        found[f"{framework} {activation} graph"] = traced.graph.fingerprint
        found[f"{framework} {activation} order"] = _hash(solved.schedule.order)
        found[f"{framework} {activation} step"] = _hash(_program(traced, problem, solved.schedule))
    return found


def traced_order(traced):
    """The schedule without recomputation."""
    return Schedule.store_all(traced.graph)


def _program(traced, problem, schedule):
    """Returns the text of the program that runs a schedule."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        from keras_remat.backends.jax.lower import step_function

        step = step_function(traced, schedule)
        return str(jax.make_jaxpr(step)(traced.state_specs, traced.batch_specs))
    from keras_remat.backends.tensorflow.ordered.lower import LoweredStep

    return str(LoweredStep(traced, problem, schedule)._function.graph.as_graph_def())


def lowered_on_jax():
    """Returns what :func:`lowered` does in a process whose Keras runs on JAX."""
    variables = own_process.environment(KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")
    return own_process.came_of(__file__, "--lowered", env=variables)


def _hash(what):
    return hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()[:16]


def net():
    """Returns everything that is compared."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = {"fits": {name: fit_of(name) for name in FITS}, "plans": plans()}
        return json.loads(json.dumps({**told, "lowered": lowered() | lowered_on_jax()}))


def differences(before, after, path=""):
    """Yields a line for everything that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted({*before, *after}):
            yield from differences(before.get(name), after.get(name), f"{path}/{name}")
    elif before != after:
        yield f"{path}\n  before: {before}\n  after:  {after}"


def main():
    """Records, or compares."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--record", type=Path, help="write what there is to this file")
    parser.add_argument("--compare", type=Path, help="compare with what this file has")
    parser.add_argument("--lowered", action="store_true", help="print hashes of programs only")
    options = parser.parse_args()
    if options.lowered:
        print(json.dumps(lowered()))
        return
    now = net()
    if options.record is not None:
        options.record.write_text(json.dumps(now, indent=1) + "\n")
    if options.compare is not None:
        lines = list(differences(json.loads(options.compare.read_text()), now))
        print("\n".join(lines) or "nothing differs")
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
