"""The slices benchmark demands what it says, and its table has what was measured."""

from math import inf

import pytest

from keras_remat.core.deadline import Deadline
from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.slices import SliceRule, Slicing, sliced_graph
from keras_remat.planning.slice_costs import sliced_costs
from keras_remat.solvers.search import greedy

MIB = 2**20


@pytest.fixture
def slices(benchmark_of):
    return benchmark_of("slices")


FLOOR = {
    "model": "head", "size": 8192, "batch_size": 64, "floor": 70 * MIB, "resident": 7 * MIB,
    "share": 0.2, "peak": 14 * MIB, "parts": 32, "plain_peak": 80 * MIB, "overhead": 0.1,
    "difference": 0.0, "onednn": "off", "date": "2026-11-27",
}  # fmt: skip
BATCH = {
    "model": "unet", "size": 32, "small_peak": 20 * MIB, "batch_size": 512, "parts": 64,
    "peak": 19 * MIB, "plain_peak": 900 * MIB, "difference": 1e-6, "kept": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "row", "told"),
    [
        ("floor:head", FLOOR, []),
        ("floor:head", FLOOR | {"share": 0.5}, ["0.5 of the floor, aimed at 0.2"]),
        ("floor:head", {"floor": 1}, ["1.0 of the floor"]),
        ("floor:head", {"error": "not done after 1 s"}, ["not done after 1 s"]),
        ("card:head", FLOOR | {"share": 0.3}, ["0.3 of plain's bytes, aimed at 0.2"]),
        ("batch:resnet50", BATCH, []),
        ("batch:resnet50", BATCH | {"batch_size": 64}, ["a batch of 64, aimed at 512"]),
        ("batch:unet", BATCH | {"difference": 0.1}, ["1.0e-01 off plain's"]),
        ("batch:unet", BATCH | {"difference": 0.1, "reversed_difference": 0.06}, []),
        ("batch:unet", BATCH | {"kept": False, "peak": 21 * MIB}, ["21.0 MiB, over 20.0"]),
    ],
)
def test_bounds(slices, name, row, told):
    found = slices.failures(name, slices.PARTS[name], row)
    assert len(found) == len(told)
    assert all(words in line for words, line in zip(told, found, strict=True))


def test_rows_of_other_settings_are_not_shown(slices, tmp_path, monkeypatch):
    """A part that is known under these settings is not measured again."""
    asked = []

    def measured(script, words, **how):
        asked.append(words)
        return FLOOR

    monkeypatch.setattr(slices, "row_of", measured)
    line = ["--only", "floor:head", "--onednn", "0", "--json", str(tmp_path / "rows.jsonl")]
    for more in ([], [], ["--steps", "7"], ["--small"], []):
        assert slices.main(line + more) == 0
    assert len(asked) == 3


def test_tables(slices):
    rows = {"floor:head": FLOOR, "floor:gru": {"error": "not done"}, "batch:unet": BATCH}
    *_, line = slices.table("floor", rows)
    told = "| head | 8192 | 64 | 70.0 | 7.0 | 0.20 | 14.0 | 32 | 80.0 | 10% | 0.0e+00 | – | off |"
    assert line == f"{told} 2026-11-27 |"
    *_, line = slices.table("batch", rows)
    assert line.endswith("| 900.0 | – | – | – | – | 1.0e-06 | – | – | – | – |")
    *_, line = slices.table("floor", {"floor:head": FLOOR | {"refused": "0.1: too much"}})
    assert line == "head, oneDNN off: refused at 0.1: too much."
    assert slices.table("floor", {}) == []
    sizes = [{"batch_size": n, "resident": 7 * MIB, "least_added": n / 512} for n in (64, 512)]
    bound = {"model": "unet", "size": 128, "small_peak": 20 * MIB, "sizes": sizes, "cuts": 9}
    *_, one, other = slices.table("bound", {"bound:unet": bound})
    assert one.startswith("| unet | 128 | 20.0 | 64 | 7.0 | 12% | 9 |")
    assert other.startswith("| unet | 128 | 20.0 | 512 | 7.0 | 100% | 9 |")


def normalized(layers, nbytes=10**6):
    """Layers that normalize over the batch: a small op reads the sum over what each makes, and what
    the next one makes waits for it, forward and backward."""
    ops, values, rules = [], [Value(0, "x", nbytes)], {}

    def add(name, read, whole=(), kind=""):
        value = Value(len(values), name, nbytes if kind == "large" else 4, producer=len(ops))
        if kind:
            sums = frozenset({value.id} if kind == "sum" else ())
            rules[len(ops)] = SliceRule(frozenset(read), frozenset(whole), sums, divides=64)
        ops.append(Op(len(ops), name, name, (*read, *whole), (value.id,)))
        values.append(value)
        return value.id

    made, roots, outputs = [0], [], []
    for at in range(layers):
        made.append(add(f"y_{at}", made[-1:], roots[-1:], "large"))
        roots.append(add(f"r_{at}", [add(f"s_{at}", made[-1:], kind="sum")]))
    gradient = add("loss", made[-1:], roots[-1:], "large")
    for at in reversed(range(layers)):
        read = gradient, made[at + 1]
        outputs.append(add(f"q_{at}", [add(f"t_{at}", read, roots[at : at + 1], "sum")]))
        gradient = add(f"g_{at}", read, (roots[at], outputs[-1]), "large")
    graph = Graph(tuple(ops), tuple(values), (*outputs, gradient))
    times = tuple(1.0 if values[op.outputs[0]].nbytes == nbytes else 0.1 for op in ops)
    return Problem(graph, Profile(times, (0,) * len(ops), nbytes)), rules


@pytest.mark.parametrize(("large", "least"), [(3.0, 0.25), (4.0, 0.15), (12.0, 0.0)])
def test_no_schedule_in_slices_takes_less_than_the_bound(benchmark_of, large, least):
    problem, rules = normalized(layers=8)
    budget = problem.profile.resident_bytes + int(large * 10**6)
    bounds = benchmark_of("slice_bounds")
    added = bounds.least_added(problem.with_budget(budget), rules, 16, 60.0)
    assert added >= least
    sliced = sliced_graph(problem.graph, rules, Slicing(tuple(rules), 8))
    costs = sliced_costs(problem, sliced, [0] * len(sliced.graph.ops)).with_budget(budget)
    found = next(greedy.candidates(costs, deadline=Deadline(inf), max_steps=10**6))
    took = simulate(costs, Schedule(found)).time_s
    assert added <= took / problem.store_all_time_s - 1
