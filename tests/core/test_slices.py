"""Sliced graphs: invariants, what is computed, and how low a schedule can get."""

import random

import pytest
from random_problems import mixed_problem
from random_schedules import random_schedule

from keras_remat.core.graph import Graph, Op, Value, chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.slices import CUT, JOIN, START, SUM, SliceRule, Slicing, sliced_graph
from keras_remat.core.validate import executed_peak_bytes, validate
from keras_remat.errors import InvalidProblemError
from tests.solvers.brute_force import fastest


def random_rules(rng, graph, share=0.8):
    """Rules for most of the ops: each input sliced or whole, each output made or summed up."""
    rules = {}
    for op in graph.ops:
        if not op.outputs or rng.random() > share:
            continue
        sliced = {v for v in op.inputs if rng.random() < 0.7}
        whole = {v for v in op.inputs if v not in sliced or rng.random() < 0.1}
        sums = {v for v in op.outputs if rng.random() < 0.25}
        means = {v for v in sums if rng.random() < 0.5}
        rules[op.id] = SliceRule(*map(frozenset, (sliced, whole, sums, means)))
    return rules


def randomly_sliced(seed):
    """A problem of the test suite, and the same in slices."""
    rng = random.Random(seed)
    problem = mixed_problem(seed, budget=False)
    rules = random_rules(rng, problem.graph)
    if not rules:
        return None
    chosen = [op_id for op_id in rules if rng.random() < 0.8] or list(rules)[:1]
    slicing = Slicing(tuple(chosen), rng.choice((2, 3, 4)))
    sliced = sliced_graph(problem.graph, rules, slicing)
    n = len(sliced.graph.ops)
    profile = Profile((1.0,) * n, (0,) * n, problem.profile.resident_bytes)
    return problem, rules, sliced, Problem(sliced.graph, profile)


@pytest.mark.parametrize("block", range(8))
def test_simulate_and_validate_agree_on_randomly_sliced_problems(block):
    for seed in range(40 * block, 40 * block + 40):
        found = randomly_sliced(seed)
        if found is None:
            continue
        _, _, _, problem = found
        rng = random.Random(seed)
        for schedule in (Schedule.store_all(problem.graph), random_schedule(rng, problem.graph)):
            validate(problem, schedule)
            assert simulate(problem, schedule).peak_bytes == executed_peak_bytes(problem, schedule)


def symbols(found):
    """Runs whole and sliced graph on symbols; a whole value of k parts is the tuple of its parts,
    a sum the tuple of its terms. Returns pairs of a value before and now, or of a part."""
    problem, rules, sliced, _ = found
    parts, old, new = sliced.slicing.parts, problem.graph, sliced.graph
    chosen = set(sliced.slicing.ops)

    def compute(op_id, at, part, read):
        return (op_id, at, part, tuple(read))

    plain = {
        v.id: tuple((v.name, p) for p in range(parts)) for v in old.values if v.producer is None
    }
    for op in old.ops:
        rule = rules.get(op.id)
        for at, v in enumerate(op.outputs):
            if op.id not in chosen:
                whole = compute(op.id, at, None, (plain[i] for i in op.inputs))
                plain[v] = tuple((whole, p) for p in range(parts))
            else:
                plain[v] = tuple(
                    compute(op.id, at, None, (
                        x for i in op.inputs
                        for x in ([plain[i][p]] if i in rule.sliced else [])
                        + ([plain[i]] if i in rule.whole else [])
                    ))
                    for p in range(parts)
                )  # fmt: skip
                if v in rule.sums:
                    total = plain[v]
                    total = ("mean", total) if v in rule.means else ("sum", total)
                    plain[v] = tuple((total, p) for p in range(parts))

    now = {}
    for v_old, v_new in sliced.whole.items():
        if old.values[v_old].producer is None:
            now[v_new] = plain[v_old]
    for op, origin in zip(new.ops, sliced.origins, strict=True):
        read = [now[i] for i in op.inputs]
        if origin.role == "whole":
            for at, v in enumerate(op.outputs):
                whole = compute(origin.source, at, None, read)
                now[v] = tuple((whole, p) for p in range(parts))
        elif origin.role == "part":
            for at, v in enumerate(op.outputs):
                now[v] = compute(origin.source, at, None, read)
        elif origin.role == "cut":
            now[op.outputs[0]] = read[0][origin.part]
        elif origin.role == "start":
            now[op.outputs[0]] = ()
        elif origin.role == "join":
            now[op.outputs[0]] = (*read[0], read[1])
        elif origin.role == "sum":
            terms = read[0] if origin.part > 1 else (read[0],)
            total = (*terms, read[1])
            maker = rules[old.values[origin.source].producer]
            is_last = origin.part == parts - 1 and origin.source not in maker.means
            now[op.outputs[0]] = (
                tuple((("sum", total), p) for p in range(parts)) if is_last else total
            )
        else:
            now[op.outputs[0]] = tuple((("mean", read[0]), p) for p in range(parts))
    pairs = [(plain[v], now[new_v]) for v, new_v in sliced.whole.items()]
    for (v, part), new_v in (*sliced.parts.items(), *sliced.cuts.items()):
        pairs.append((plain[v][part], now[new_v]))
    assert new.outputs == tuple(sliced.whole[v] for v in old.outputs)
    return pairs


@pytest.mark.parametrize("block", range(4))
def test_a_sliced_graph_computes_the_same_from_the_same_parts(block):
    for seed in range(50 * block, 50 * block + 50):
        found = randomly_sliced(seed)
        if found is None or len(found[0].graph.ops) > 9:
            continue
        for before, now in symbols(found):
            assert before == now, seed


def test_an_op_keeps_its_kind_phase_and_promises_in_slices():
    for seed in range(100):
        if (found := randomly_sliced(seed)) is None:
            continue
        problem, _, sliced, _ = found
        for op, origin in zip(sliced.graph.ops, sliced.origins, strict=True):
            if origin.role in ("whole", "part"):
                old = problem.graph.ops[origin.source]
                assert (op.kind, op.phase) == (old.kind, old.phase), seed
                assert op.recomputable == old.recomputable, seed
                assert bool(op.may_reuse) == bool(old.may_reuse), seed


def test_a_part_is_a_share_along_the_axis_of_its_value():
    values = (
        Value(0, "x", 96, (4, 6)),
        Value(1, "y", 96, (4, 6), producer=0),
        Value(2, "z", 16, (4,), producer=1),
    )
    ops = (Op(0, "y", "", (0,), (1,)), Op(1, "z", "", (1,), (2,)))
    rules = {0: SliceRule(frozenset({0})), 1: SliceRule(frozenset({1}), sums=frozenset({2}))}
    graph = Graph(ops, values, (1, 2))
    sliced = sliced_graph(graph, rules, Slicing((0, 1), 2), axes={1: 1})
    shapes = {value.name: value.shape for value in sliced.graph.values}
    names = ("x/cut_0", "y/slice_1", "y", "z/slice_0", "z")
    assert [shapes[name] for name in names] == [(2, 6), (4, 3), (4, 6), (4,), (4,)]


def test_effects_stay_after_all_parts_and_cuts_of_what_they_follow():
    values = (Value(0, "w", 8), Value(1, "a", 8, producer=0), Value(2, "b", 8, producer=1))
    ops = (
        Op(0, "read", "Read", (0,), (1,)),
        Op(1, "assign", "Assign", (), (2,), "update", False, (0,)),
    )
    graph = Graph(ops, values, (1, 2))
    sliced = sliced_graph(graph, {0: SliceRule(frozenset({0}))}, Slicing((0,), 2))
    (assign,) = [op for op in sliced.graph.ops if op.kind == "Assign"]
    names = {sliced.graph.ops[i].name for i in assign.after}
    assert names == {"w/cut_0", "w/cut_1", "read/slice_0", "read/slice_1"}


def test_glue_is_counted():
    rules = {2: SliceRule(frozenset({1})), 3: SliceRule(frozenset({2}))}
    sliced = sliced_graph(chain_example(), rules, Slicing((2, 3), 2), granule_bytes=2)
    kinds = [op.kind for op in sliced.graph.ops]
    assert [kinds.count(kind) for kind in (CUT, START, JOIN, SUM)] == [2, 1, 2, 0]
    by_name = {value.name: value.nbytes for value in sliced.graph.values}
    assert [by_name[name] for name in ("c/slice_0", "b/cut_1", "d/empty")] == [4, 2, 1]


def test_a_chain_within_slices_goes_below_the_floor():
    """Four ops of 1, 8, 8 and 1 byte: whole, the second and third hold 16 at once; in four slices
    one part of them, beside what is joined."""
    names, nbytes = "abcd", (1, 8, 8, 1)
    ops = tuple(Op(i, names[i], names[i], (i - 1,) if i else (), (i,)) for i in range(4))
    values = tuple(Value(i, names[i], nbytes[i], producer=i) for i in range(4))
    graph = Graph(ops, values, (3,))
    rules = {i: SliceRule(frozenset({i - 1})) for i in (1, 2)}
    rules[3] = SliceRule(frozenset({2}), sums=frozenset({3}))
    whole = Problem(graph, Profile((1.0,) * 4, (0,) * 4, 0))
    sliced = sliced_graph(graph, rules, Slicing((1, 2, 3), 4))
    n = len(sliced.graph.ops)
    problem = Problem(sliced.graph, Profile((1.0,) * n, (0,) * n, 0))
    assert whole.floor_bytes == 16
    # parts of 2 and 2 bytes, the source, and the sum so far
    assert problem.floor_bytes == 4
    assert simulate(problem, Schedule.store_all(problem.graph)).peak_bytes == 6


def test_brute_force_agrees_that_the_floor_of_random_chains_fell():
    """Whole, no order needs less than the floor; in two slices some do, and run within it."""
    rng, found = random.Random(0), 0
    for _ in range(30):
        sizes = [2 * rng.randint(1, 8) for _ in range(4)]
        ops = tuple(Op(i, "abcd"[i], "", (i - 1,) if i else (), (i,)) for i in range(4))
        values = tuple(Value(i, "abcd"[i], sizes[i], producer=i) for i in range(4))
        graph = Graph(ops, values, (3,))
        rules = {i: SliceRule(frozenset({i - 1})) for i in (1, 2)}
        rules[3] = SliceRule(frozenset({2}), sums=frozenset({3}))
        sliced = sliced_graph(graph, rules, Slicing((1, 2, 3), 2)).graph
        whole, parts = (
            Problem(g, Profile((1.0,) * len(g.ops), (0,) * len(g.ops), 5)) for g in (graph, sliced)
        )
        below = whole.floor_bytes - 1
        assert fastest(whole.with_budget(below), any_order=True) is None
        best = fastest(parts.with_budget(below), any_order=True)
        if parts.floor_bytes > below:
            assert best is None
        if best is not None:
            validate(parts.with_budget(below), Schedule(tuple(best[1])))
            found += 1
    assert found >= 10


@pytest.mark.parametrize(
    ("seed", "is_reached"),
    [
        (30, True), (138, True), (188, True), (365, True), (820, True), (1299, True),
        (85, False), (332, False), (472, False), (1069, False), (1138, False), (1343, False),
    ],
)  # fmt: skip
def test_brute_force_agrees_that_the_floor_of_a_random_problem_fell(seed, is_reached):
    """Of the first 1,350 problems in slices, those whose floor falls and that are small enough for
    brute force. Some are below the floor of whole ops, and need more than their own."""
    problem, _, _, parts = randomly_sliced(seed)
    count, resident = len(problem.graph.ops), problem.profile.resident_bytes
    whole = Problem(problem.graph, Profile((1.0,) * count, (0,) * count, resident))
    below = whole.floor_bytes - 1
    assert parts.floor_bytes <= below
    assert fastest(whole.with_budget(below), any_order=True) is None
    assert fastest(parts.with_budget(parts.floor_bytes - 1), any_order=True) is None
    best = fastest(parts.with_budget(below), any_order=True)
    assert (best is not None) is is_reached
    if best is not None:
        validate(parts.with_budget(below), Schedule(tuple(best[1])))


def test_fingerprints_are_stable_and_tell_the_number_of_parts():
    rules = {2: SliceRule(frozenset({1})), 3: SliceRule(frozenset({2}))}
    graphs = [sliced_graph(chain_example(), rules, Slicing((2, 3), k)).graph for k in (2, 2, 3)]
    assert graphs[0].fingerprint == graphs[1].fingerprint != graphs[2].fingerprint


@pytest.mark.parametrize(
    ("slicing", "words"),
    [
        (Slicing((0,), 2), "cannot run in slices"),
        (Slicing((2,), 3), "do not divide 4"),
        (Slicing((3,), 2), "only together with"),
        (Slicing((99,), 2), "op 99 cannot"),
    ],
)
def test_what_cannot_be_sliced_is_refused(slicing, words):
    rules = {
        2: SliceRule(frozenset({1}), divides=4),
        3: SliceRule(frozenset({2}), partners=frozenset({2})),
    }
    with pytest.raises(InvalidProblemError, match=words):
        sliced_graph(chain_example(), rules, slicing)


@pytest.mark.parametrize(("ops", "parts"), [((0,), 1), ((0,), True), ((-1,), 2), (("a",), 2)])
def test_a_recipe_is_checked(ops, parts):
    with pytest.raises(InvalidProblemError):
        Slicing(ops, parts)
