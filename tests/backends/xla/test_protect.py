"""A schedule as data dependencies: what is guarded, what is not, and that numbers stay the same."""

import random
from dataclasses import replace

import pytest
from flat_program import KINDS, LARGE, FlatProgram, TextWriter, Written
from random_problems import seeds

from keras_remat.backends.xla.fused_graph import FusedStep, fused_graph
from keras_remat.backends.xla.protect import SMALL_RESULT_BYTES, Run
from keras_remat.core.writing import Writing

SMALL = SMALL_RESULT_BYTES - 1


def ran(
    program, order=None, *,
    uses_branches=False, uses_barriers=False, early=(), kinds=KINDS, copied=(), state=(),
    writing=Writing.STRICT, copying=(),
):  # fmt: skip
    """Runs an order of ops; returns the outputs, and the writer."""
    backward = lambda equation: equation.scope == "backward"  # noqa: E731
    graph, numbers, handles = fused_graph(program, kinds, state, backward)
    writer = TextWriter(
        program, uses_branches=uses_branches, uses_barriers=uses_barriers, copied=copied
    )
    writer.copying = copying
    given = [Written(f"x{n}", n) for n in range(program.n_given)]
    step = FusedStep(graph, handles, program, numbers)
    run = Run(step, kinds, writer, given, early, writing=writing)
    run.order(range(len(graph.ops)) if order is None else order)
    return [run.output(atom) for atom in program.outputs], writer


def a_chain(nbytes=LARGE, kind="dot", first="dot"):
    """a, b of a, and c that reads both."""
    program = FlatProgram(LARGE, LARGE)
    a = program.add(first, 0, nbytes=nbytes)
    b = program.add(kind, a)
    return program.returns(program.add("call", a, b))


def test_without_recomputation_nothing_is_guarded():
    (out,), writer = ran(a_chain())
    assert out.text == "call(dot(x0), dot(dot(x0)))"
    assert writer.guarded == []


def test_a_recomputation_waits_for_what_ran_before_it():
    (out,), writer = ran(a_chain(), [0, 1, 0, 2])
    assert out.text == "call(dot(guard(x0 | never(dot(dot(x0))))), dot(dot(x0)))"
    assert writer.written == [0, 1, 0, 2]


def test_a_small_result_is_not_guarded_and_written_once():
    (_,), writer = ran(a_chain(nbytes=SMALL), [0, 1, 0, 2])
    assert writer.guarded == []
    assert writer.written == [0, 1, 2]


def test_what_depends_on_the_newest_trigger_already_needs_no_guard():
    program = FlatProgram(LARGE)
    a = program.add("dot", 0)
    b = program.add("dot", a)
    c = program.add("dot", b)
    program.returns(program.add("call", b, c))
    _, writer = ran(program, [0, 1, 2, 0, 1, 3])
    assert writer.guarded == ["x0"], "b reads the guarded a"


def test_the_cheapest_input_is_guarded_and_a_literal_is_cheapest():
    one = Written("1.0", 1)
    program = FlatProgram(LARGE, 64)
    a = program.add("dot", 0, 1)
    b = program.add("exp", program.add("add", a, one))
    c = program.add("dot", b)
    program.returns(program.add("call", a, b, c))
    _, writer = ran(program, [0, 1, 2, 0, 1, 3])
    assert writer.guarded == ["x1"], "the kernel, not the images"
    _, writer = ran(program, [0, 1, 2, 1, 3])
    assert writer.guarded == ["array(1.0)"]


def test_a_view_is_not_guarded_its_reader_is():
    program = FlatProgram(LARGE)
    a = program.add("dot", program.add("view", 0))
    b = program.add("dot", a)
    program.returns(program.add("call", a, b))
    (out,), writer = ran(program, [0, 1, 0, 2])
    assert writer.guarded == ["view(x0)"]
    assert out.text.count("guard") == 1


def test_equal_equations_on_equal_inputs_are_written_once():
    program = FlatProgram(LARGE, 4)
    made = program.add("dot", 0)
    shared = program.add("add", made, 1)
    program.returns(program.add("exp", shared), program.add("sum", shared, nbytes=4))
    _, writer = ran(program)
    assert sorted(writer.written) == [0, 1, 2, 3]


def test_the_backward_phase_shares_nothing_large_with_the_forward_phase():
    """What it computes of forward values alone is kept apart; what depends on it already is
    not."""
    program = FlatProgram(LARGE)
    a = program.add("dot", 0)
    again = program.add("dot", 0, scope="backward")
    later = program.add("dot", again, scope="backward")
    program.returns(a, later)
    (_, out), writer = ran(program)
    assert writer.guarded == ["x0"]
    assert out.text == "dot(dot(guard(x0 | never(dot(x0)))))"


def test_what_runs_again_in_a_second_pass_waits_for_what_ran_since():
    """All of that pass depends on the trigger that keeps it from the first; the gradient of a
    gradient, say."""
    program = FlatProgram(LARGE)
    first = program.add("dot", 0)
    second = program.add("dot", 0, scope="backward")
    a = program.add("dot", second, scope="backward")
    b = program.add("dot", a, scope="backward")
    program.returns(first, program.add("call", a, b, scope="backward"))
    _, writer = ran(program, [0, 1, 2, 3, 2, 4])
    assert writer.written == [0, 1, 2, 3, 2, 4]
    assert len(writer.guarded) == 2


def test_what_a_loop_keeps_is_not_held_for_a_trigger_where_its_result_was_read():
    """The loop runs again for what it keeps; its first run's is read by nobody."""
    program = FlatProgram(LARGE, LARGE)
    result, kept = program.add("call", 0, outputs=2)
    end = program.add("dot", result)
    program.returns(program.add("call", end, kept, scope="backward"))
    (out,), writer = ran(program, [0, 1, 0, 2])
    assert writer.guarded == ["x0"]
    assert out.text == "call(dot(call(x0)), call(guard(x0 | never(dot(call(x0))))).1)"


def test_a_small_value_that_is_spread_in_both_phases_is_kept_apart():
    program = FlatProgram(LARGE, 64)
    forward = program.add("exp", program.add("add", program.add("dot", 0), 1))
    gradient = program.add("dot", 0, scope="backward")
    spread = program.add("add", gradient, 1, scope="backward")
    program.returns(forward, spread)
    _, writer = ran(program)
    assert writer.guarded == ["x0", "x1"]


def test_random_numbers_are_drawn_in_a_branch_where_branches_are_free():
    program = FlatProgram(8, LARGE)
    made = program.add("dot", 1)
    noise = program.add("random", 0)
    program.returns(program.add("call", made, noise))
    (_,), writer = ran(program, uses_branches=True)
    assert [equations for _, equations in writer.drawn] == [(1,)]
    (_,), writer = ran(program, uses_branches=False)
    assert writer.drawn == []


def test_random_numbers_are_drawn_again_after_the_newest_trigger():
    program = FlatProgram(8, LARGE)
    noise = program.add("random", 0)
    made = program.add("call", 1, noise)
    program.returns(program.add("call", made, noise))
    _, writer = ran(program, [0, 1, 0, 2], uses_branches=True)
    conditions = [condition for condition, _ in writer.drawn]
    assert conditions == ["never(x0)", "never(call(x1, random(x0)))"]


def test_a_sum_that_two_ops_read_is_read_by_a_branch_and_so_exists():
    program = FlatProgram(LARGE)
    one, other = program.add("dot", 0), program.add("dot", 0)
    total = program.add("add", one, other)
    b, c = program.add("dot", total), program.add("dot", total)
    program.returns(program.add("call", total, b, c))
    (out,), _ = ran(program, [0, 1, 2, 3, 4, 0, 3, 5], uses_branches=True)
    assert "never(add(dot(x0), dot(x0)))" in out.text


@pytest.mark.parametrize(
    ("writing", "copying", "is_held"),
    [(Writing.STRICT, (), True), (Writing.HELD, (), False), (Writing.HELD, ("dot",), True)],
)
def test_a_sum_that_two_ops_read_is_behind_a_barrier_where_barriers_last(writing, copying, is_held):
    """Written strictly, or where what reads it from memory may read a copy in another layout: only
    that would exist."""
    program = FlatProgram(LARGE)
    one, other = program.add("dot", 0), program.add("dot", 0)
    total = program.add("add", one, other)
    b, c = program.add("dot", total), program.add("dot", total)
    program.returns(program.add("call", b, c))
    (out,), _ = ran(program, uses_barriers=True, writing=writing, copying=copying)
    held = "dot(hold(add(dot(x0), dot(x0))))" if is_held else "dot(add(dot(x0), dot(x0)))"
    assert out.text == f"call({held}, {held})"


def test_what_waits_behind_a_product_is_held_where_its_inputs_are_let_go():
    program = FlatProgram(LARGE)
    one, other = program.add("dot", 0), program.add("dot", 0)
    total = program.add("exp", program.add("add", one, other))
    late = program.add("dot", 0)
    program.returns(program.add("call", total, late))
    (out,), _ = ran(program, uses_barriers=True)
    assert "hold(exp(add(dot(x0), dot(x0))))" in out.text
    (out,), _ = ran(program, [0, 1, 3, 2, 4], uses_barriers=True)
    assert "hold" not in out.text, "nothing comes between"
    program.returns(program.add("call", out_of(program), one, other))
    (out,), _ = ran(program, uses_barriers=True)
    assert "hold" not in out.text, "what it is made of is kept all the same"


def out_of(program):
    return program.outputs[0]


def test_the_image_of_a_kernel_gradient_is_guarded_only_where_it_is_transposed():
    program = FlatProgram(LARGE)
    image = program.add("dot", 0)
    gradient = program.add("dot", image, scope="backward")
    kernel = program.add("kernel_gradient", image, gradient, scope="backward")
    program.returns(kernel)
    _, writer = ran(program)
    assert "dot(x0)" in writer.guarded
    on_gpu = replace(KINDS, transposing=frozenset())
    _, writer = ran(program, kinds=on_gpu)
    assert writer.guarded == ["dot(x0)"], "the gradient's own, once"


def test_copies_that_a_kernel_reads_wait_for_it():
    """Else they are made early, beside what they are copies of."""
    program = FlatProgram(LARGE, LARGE)
    query = program.add("add", program.add("dot", 0), 0)
    score = program.add("dot", program.add("reshape", query), 1)
    gradient = program.add("dot", score, query, scope="backward")
    program.returns(program.add("call", gradient, scope="backward"))
    _, writer = ran(program, uses_barriers=True)
    score, held = "dot(reshape(hold(add(dot(x0), x0))), x1)", "hold(add(dot(x0), x0))"
    assert writer.guarded == [score], "so that the gradient waits for it"
    (out,), writer = ran(program, uses_barriers=True, copied={3: (0,), 4: (1,)})
    assert out.text == f"call(dot({score}, guard(hold({held}) | never({score}))))"
    (out,), writer = ran(program, [0, 1, 2, 2, 3, 4], uses_barriers=True, copied={3: (0,)})
    assert f"guard(hold(reshape({held})) | never(" in out.text, "one that runs again has its own"


def test_what_a_guard_would_compute_again_is_held():
    """XLA would keep what it is made of for that."""
    program = FlatProgram(LARGE, LARGE, 64)
    made = program.add("add", program.add("dot", 0), 1)
    again = program.add("dot", program.add("reshape", made))
    program.returns(program.add("call", program.add("dot", again), again))
    order = [0, 1, 2, 3, 2, 4]
    _, writer = ran(program, order, uses_barriers=True)
    assert writer.guarded == ["hold(reshape(add(dot(x0), x1)))"]
    _, writer = ran(program, order)
    assert writer.guarded == ["reshape(add(dot(x0), x1))"]


def trained():
    """A product with a weight, its gradient, the update of a moment and of the weight, the gradient
    of its input, and what reads that; with the state."""
    program = FlatProgram(LARGE, LARGE, LARGE)
    made = program.add("dot", 0, 1)
    gradient = program.add("dot", 0, made, scope="backward")
    moment = program.add("add", 2, gradient)
    back = program.add("dot", made, 1, scope="backward")
    after = program.add("exp", back, scope="backward")
    weight = program.add("add", 1, moment)
    return program.returns(moment, weight, after), ((1, weight), (2, moment))


def test_what_follows_an_update_waits_for_it_on_a_gpu():
    """And the update for all that reads the old weight, so that it is written in place."""
    program, state = trained()
    (moment, weight, after), writer = ran(program, uses_barriers=True, state=state)
    back = "dot(guard(dot(x0, x1) | never(dot(x0, x1))), x1)"
    assert weight.text == f"add(guard(x1 | never({back})), {moment.text})", "no gradient in it"
    assert after.text == f"exp(guard({back} | never(hold({weight.text}))))"
    assert writer.guarded[-2:] == ["x1", back]
    _, writer = ran(program, state=state, uses_branches=True)
    assert not {"x1", back}.intersection(writer.guarded)


@pytest.mark.parametrize(("writing", "guarded"), [(Writing.LOOSE, []), (Writing.UPDATED, ["x1"])])
def test_a_kernel_is_turned_beside_its_gradient_where_updates_come_early(writing, guarded):
    """What is spread, which takes no memory, is not."""
    program = FlatProgram(LARGE, LARGE, 64)
    made = program.add("dot", 0, 1)
    turned = program.add("moved", 1, scope="backward")
    spread = program.add("moved", 2, scope="backward")
    back = program.add("dot", made, turned, spread, scope="backward")
    program.returns(program.add("call", back, scope="backward"))
    _, writer = ran(program, uses_barriers=True, writing=writing)
    assert writer.guarded == guarded


def test_what_would_share_a_kernel_with_what_runs_again_waits_for_it():
    program = FlatProgram(LARGE)
    made = program.add("dot", 0)
    cut = program.add("add", made)
    call = program.add("call", cut)
    read = program.add("dot", call, cut, scope="backward")
    back = program.add("dot", call, call, scope="backward")
    gradient = program.add("add", made, back, scope="backward")
    program.returns(read, program.add("call", gradient, scope="backward"))
    (read, out), _ = ran(program, [0, 1, 2, 1, 3, 4, 5, 6], uses_barriers=True)
    assert out.text.startswith("call(add(guard(dot(x0) | never(dot(")
    assert read.text in out.text, "what is waited for waits for the copy's reader"
    (_, out), _ = ran(program, uses_barriers=True)
    assert out.text.startswith("call(add(dot(x0), ")


def test_the_image_of_a_pooling_gradient_is_guarded():
    program = FlatProgram(LARGE, LARGE)
    image = program.add("dot", 0)
    gradient = program.add("dot", 1, scope="backward")
    pooled = program.add("pooling_gradient", gradient, image, scope="backward")
    program.returns(pooled)
    _, writer = ran(program, kinds=replace(KINDS, pooling_gradients={"pooling_gradient": 1}))
    assert writer.guarded == ["x1", "dot(x0)"]
    _, writer = ran(program)
    assert writer.guarded == ["x1"]


def random_program(rng):
    program = FlatProgram(LARGE, LARGE, 64)
    literal, known = Written("2.0", 2), [0, 1, 2]
    for _ in range(rng.randint(4, 14)):
        kind = rng.choice(["dot", "add", "exp", "sum", "view", "moved", "random", "call"])
        inputs = [rng.choice(known) for _ in range(1 if kind in ("view", "random") else 2)]
        inputs += [literal] * (kind == "add" and rng.random() < 0.3)
        nbytes = program.sizes[inputs[0]] if kind == "view" else rng.choice([64, LARGE])
        scope = rng.choice(["", "backward"])
        known.append(program.add(kind, *inputs, nbytes=nbytes, scope=scope))
    return program.returns(*rng.sample(known[3:], 2))


@pytest.mark.parametrize("uses_branches", [False, True])
@pytest.mark.parametrize("seed", seeds(60, 30))
def test_any_legal_order_computes_the_same_numbers(seed, uses_branches):
    rng = random.Random(seed)
    program = random_program(rng)
    plain, _ = ran(program, uses_branches=uses_branches)
    graph, *_ = fused_graph(program, KINDS, (), lambda equation: equation.scope == "backward")
    order = []
    for op in graph.ops:
        order += [rng.randrange(op.id) for _ in range(rng.randint(0, 2)) if op.id]
        order.append(op.id)
    recomputed, _ = ran(program, order, uses_branches=uses_branches)
    assert [out.number for out in recomputed] == [out.number for out in plain]
