"""Which values exist, rule by rule."""

from dataclasses import replace

import pytest
from flat_program import KINDS, LARGE, FlatProgram, Written

from keras_remat.backends.micro_batches import SEPARATION
from keras_remat.backends.xla.fusion import MAX_COPIED_CHAIN, Equation, clusters


def parts(program, **options):
    """Output numbers of a cluster → its equations."""
    return {c.outputs: c.equations for c in clusters(program, KINDS, **options)}


def test_an_elementwise_value_with_one_reader_does_not_exist():
    program = FlatProgram(LARGE)
    a = program.add("exp", 0)
    b = program.add("exp", a)
    assert parts(program.returns(b)) == {(b,): (0, 1)}


def test_a_dear_value_with_two_readers_exists():
    program = FlatProgram(LARGE)
    a = program.add("exp", 0)
    b, c = program.add("add", a), program.add("exp", a)
    assert parts(program.returns(b, c)) == {(a,): (0,), (b,): (1,), (c,): (2,)}


def test_a_dear_value_does_not_exist_where_its_readers_end_in_one_equation():
    """As in ``e + e * p(x)``: XLA has both in one loop, however many read it there."""
    program = FlatProgram(LARGE)
    a = program.add("exp", 0)
    b = program.add("view", program.add("exp", a))
    c = program.add("add", a, b)
    assert parts(program.returns(c)) == {(c,): (0, 1, 2, 3)}


def test_a_value_of_two_large_ones_exists_though_its_readers_end_in_one_equation():
    """Else both would have to be there when the readers run, beside what these read."""
    program = FlatProgram(LARGE, LARGE)
    a, b = program.add("dot", 0), program.add("dot", 1)
    both = program.add("mul", a, b)
    c = program.add("add", program.add("exp", both), both)
    assert parts(program.returns(c)) == {(a,): (0,), (b,): (1,), (both,): (2,), (c,): (3, 4)}


@pytest.mark.parametrize("again", ["dot", "exp", "output"])
def test_it_exists_where_something_in_between_does(again):
    program = FlatProgram(LARGE)
    a = program.add("exp", 0)
    b = program.add("exp", a)
    c = program.add("add", a, b)
    more = (b,) if again == "output" else (program.add(again, b),)
    found = parts(program.returns(c, *more))
    assert (a,) in found
    assert (b,) in found


def test_a_cheap_value_of_one_large_value_is_copied_into_every_reader():
    program = FlatProgram(LARGE, 4)
    made = program.add("dot", 0)
    a = program.add("add", made, 1)
    b, c = program.add("exp", a), program.add("sum", a, nbytes=4)
    assert parts(program.returns(b, c)) == {(made,): (0,), (b,): (1, 2), (c,): (1, 3)}


def test_a_cheap_value_of_two_large_values_exists_where_two_read_it():
    program = FlatProgram(LARGE)
    one, other = program.add("dot", 0), program.add("dot", 0)
    a = program.add("add", one, other)
    b, c = program.add("exp", a), program.add("exp", a)
    assert (a,) in parts(program.returns(b, c))


def test_what_is_joined_is_copied_into_readers_that_take_it():
    """Together its inputs are no larger than it is; what is added to one of its size is."""
    program = FlatProgram(LARGE)
    a, b = program.add("dot", 0, nbytes=LARGE // 2), program.add("call", 0, nbytes=LARGE // 2)
    joined = program.add("join", a, b)
    c, d = program.add("exp", joined), program.add("sum", joined, nbytes=4)
    total = program.add("add", joined, c)
    program.returns(c, d, program.add("exp", total), program.add("sum", total, nbytes=4))
    on_gpu = replace(KINDS, cheap=KINDS.cheap | {"join"}, joining=frozenset({"join"}))
    exist = {number for part in clusters(program, on_gpu) for number in part.outputs}
    assert joined not in exist
    assert total in exist
    read = program.add("dot", joined)
    program.returns(c, d, read)
    exist = {number for part in clusters(program, on_gpu) for number in part.outputs}
    assert joined in exist, "a product reads memory"


def test_what_is_computed_along_is_copied_into_readers_that_take_it():
    """An expensive value of several readers, and a reduction."""

    def exist(reader):
        program = FlatProgram(LARGE)
        scores = program.add("dot", 0)
        a = program.add("exp", scores)
        total = program.add("sum", a, nbytes=LARGE // 64)
        b, c = program.add("add", a, total), program.add("sum", a, total, nbytes=4)
        program.returns(b, c, program.add(reader, total, nbytes=4))
        made = clusters(program, KINDS, along={a, total})
        return a in sum((part.outputs for part in made), ()), [part.reads for part in made], total

    assert exist("add") == (False, [(0,), (1,), (1,), (1,)], 3)
    _, reads, total = exist("dot")
    assert (total,) in reads, "a product reads memory"


def test_what_the_program_is_given_does_not_count_as_large():
    program = FlatProgram(LARGE, LARGE)
    a = program.add("add", 0, 1)
    b, c = program.add("exp", a), program.add("exp", a)
    assert (a,) not in parts(program.returns(b, c))


@pytest.mark.parametrize(("links", "exists"), [(MAX_COPIED_CHAIN, False), (60, True)])
def test_a_long_chain_is_not_copied(links, exists):
    program = FlatProgram(LARGE)
    a = 0
    for _ in range(links):
        a = program.add("add", a)
    b, c = program.add("exp", a), program.add("exp", a)
    assert ((a,) in parts(program.returns(b, c))) is exists


def test_a_product_reads_memory_also_through_a_view():
    program = FlatProgram(LARGE)
    a = program.add("exp", 0)
    viewed = program.add("view", a)
    b = program.add("dot", viewed)
    assert parts(program.returns(b)) == {(a,): (0,), (b,): (1, 2)}


def test_a_reduction_takes_its_input_into_its_loop_and_its_result_exists():
    program = FlatProgram(LARGE)
    a = program.add("exp", 0)
    total = program.add("sum", a, nbytes=4)
    b = program.add("exp", total, nbytes=4)
    assert parts(program.returns(b)) == {(total,): (0, 1), (b,): (2,)}


def test_a_view_exists_only_as_an_output():
    program = FlatProgram(LARGE)
    seen, hidden = program.add("view", 0), program.add("view", 0)
    b = program.add("dot", hidden)
    assert parts(program.returns(seen, b)) == {(seen,): (0,), (b,): (1, 2)}


def test_readers_behind_views_count():
    program = FlatProgram(LARGE)
    a = program.add("exp", 0)
    one, other = program.add("view", a), program.add("view", a)
    b, c = program.add("exp", one), program.add("exp", other)
    assert (a,) in parts(program.returns(b, c))


def test_effects_and_several_outputs_exist():
    program = FlatProgram(LARGE)
    a = program.add("exp", 0, effect=True)
    pair = program.add("exp", 0, outputs=2)
    b = program.add("add", a, *pair)
    assert parts(program.returns(b)) == {(a,): (0,), pair: (1,), (b,): (2,)}


def test_an_effect_alone_is_a_cluster_with_what_it_reads_in_memory():
    program = FlatProgram(LARGE)
    a = program.add("exp", 0)
    program.add("call", program.add("view", a), outputs=0, effect=True)
    b = program.add("exp", a)
    assert parts(program.returns(b)) == {(a,): (0,), (): (1, 2), (b,): (3,)}


def test_sizes_of_another_batch_may_decide():
    """At another batch the second value is small, and the sum is copied."""
    program = FlatProgram(LARGE)
    one, other = program.add("dot", 0), program.add("dot", 0)
    a = program.add("add", one, other)
    b, c = program.add("exp", a), program.add("exp", a)
    program.returns(b, c)
    sizes = [n if at != other else 8 for at, n in enumerate(program.sizes)]
    assert (a,) in parts(program)
    assert (a,) not in parts(program, sizes=sizes)


@pytest.mark.parametrize(("kind", "reused"), [("add", True), ("reshape", True), ("moved", False)])
def test_a_buffer_is_taken_over_by_what_is_computed_element_by_element(kind, reused):
    program = FlatProgram(LARGE)
    made = program.add("dot", 0)
    b = program.add("exp", program.add(kind, made))
    (cluster,) = (c for c in clusters(program.returns(b), KINDS) if c.outputs == (b,))
    assert cluster.reads == (made,)
    assert cluster.may_reuse == ((made,) if reused else ())


def test_what_the_program_is_given_is_not_overwritten():
    program = FlatProgram(LARGE)
    b = program.add("exp", 0)
    (cluster,) = clusters(program.returns(b), KINDS)
    assert cluster.may_reuse == ()


def test_a_literal_is_no_read_and_a_separation_is_known():
    literal = Written("1.0", 1)
    equation = Equation(None, "add", f"a/{SEPARATION}/b", (0, literal), (1,))
    assert equation.reads == (0,)
    assert equation.separates
    assert not Equation(None, "add", "a/b", (0,), (1,)).separates


@pytest.mark.parametrize(("between", "exists"), [("dot", True), ("exp", False)])
def test_a_part_that_waits_behind_a_product_exists(between, exists):
    """The gradient of a skip connection, a part of that of a concatenation."""
    kinds = replace(KINDS, cheap=KINDS.cheap | {"cut"}, cut=frozenset({"cut"}))
    program = FlatProgram(LARGE)
    whole = program.add("dot", 0)
    part = program.add("cut", whole, nbytes=LARGE // 4)
    given = program.add("cut", 0, nbytes=LARGE // 4)
    late = program.add(between, whole, nbytes=LARGE // 4)
    program.returns(program.add("add", part, given, late, nbytes=LARGE // 4))
    made = [c.outputs for c in clusters(program, kinds)]
    assert ((part,) in made) is exists
    assert (given,) not in made


def test_the_buffer_of_what_comes_in_a_tuple_is_not_taken_over():
    """Unless the result is in no memory, but copies of it."""
    program = FlatProgram(LARGE)
    one = program.add("library", 0)
    other = program.add("dot", 0)
    total = program.add("add", one, other)
    program.returns(total)
    on_gpu = replace(KINDS, in_tuples=frozenset({"library"}))
    assert clusters(program, KINDS)[-1].may_reuse == (one, other)
    assert clusters(program, on_gpu)[-1].may_reuse == (other,)
    assert clusters(program, on_gpu, copied={total})[-1].may_reuse == (one, other)
