"""A whole step as a graph: phases, order, and state that is written over."""

from itertools import pairwise

from flat_program import KINDS, LARGE, FlatProgram

from keras_remat.backends.xla.fused_graph import SMALL_STATE_BYTES, fused_graph
from keras_remat.core.graph import BACKWARD, FORWARD, UPDATE


def is_backward(equation):
    return equation.scope == "backward"


def graph_of(program, state=()):
    graph, numbers, handles = fused_graph(program, KINDS, state, is_backward)
    return graph, {number: graph.values[at] for at, number in enumerate(numbers)}, handles


def a_step(weights=2, nbytes=LARGE):
    """Products with each weight, their gradients, and after all of them the updates."""
    program = FlatProgram(*[nbytes] * weights, LARGE)
    x, activations = weights, []
    for weight in range(weights):
        x = program.add("dot", x, weight)
        activations.append(x)
    gradient, gradients = program.add("dot", x, scope="backward"), {}
    for weight in reversed(range(weights)):
        gradients[weight] = program.add(
            "dot", gradient, activations[weight], nbytes=nbytes, scope="backward"
        )
        gradient = program.add("dot", gradient, weight, scope="backward")
    updates = {w: program.add("add", w, gradients[w], nbytes=nbytes) for w in range(weights)}
    program.returns(x, *updates.values())
    return program, gradients, updates, list(updates.items())


def test_phases_follow_from_what_was_traced_by_differentiation():
    program, gradients, updates, state = a_step()
    graph, values, _ = graph_of(program, state)
    phase = {number: graph.ops[v.producer].phase for number, v in values.items() if v.producer}
    assert all(phase[number] == UPDATE for number in updates.values())
    assert all(phase[number] == BACKWARD for number in gradients.values())
    assert graph.ops[0].phase == FORWARD


def test_an_update_runs_as_soon_as_its_gradient_is_there_and_its_weight_was_read():
    program, gradients, updates, state = a_step()
    graph, values, _ = graph_of(program, state)
    at = {number: v.producer for number, v in values.items()}
    assert at[updates[1]] < at[gradients[0]], "the last weight's update does not wait for the first"
    for weight, updated in updates.items():
        readers = [op.id for op in graph.ops if weight in op.inputs and op.id != at[updated]]
        assert set(graph.ops[at[updated]].after) == set(readers)
        assert all(reader < at[updated] for reader in readers)


def test_new_state_takes_the_buffer_of_the_old_one_and_is_written_once():
    program, _, updates, state = a_step()
    graph, values, _ = graph_of(program, state)
    for updated in updates.values():
        assert values[updated].nbytes == 0
        assert not graph.ops[values[updated].producer].recomputable


def test_small_state_is_counted_and_its_readers_stay_free():
    program, _, updates, state = a_step(nbytes=SMALL_STATE_BYTES - 1)
    graph, values, _ = graph_of(program, state)
    for updated in updates.values():
        assert values[updated].nbytes == SMALL_STATE_BYTES - 1
        assert graph.ops[values[updated].producer].after == ()


def test_state_whose_reader_needs_the_new_value_is_counted():
    program = FlatProgram(LARGE)
    new = program.add("dot", 0)
    both = program.add("dot", 0, new)
    graph, values, _ = graph_of(program.returns(new, both), [(0, new)])
    assert values[new].nbytes == LARGE
    assert graph.ops[values[new].producer].recomputable


def test_two_states_that_wait_for_each_other_are_both_counted():
    program = FlatProgram(LARGE, LARGE)
    first = program.add("dot", 0, 1)
    second = program.add("dot", 0, 1)
    _, values, _ = graph_of(program.returns(first, second), [(0, first), (1, second)])
    assert [values[n].nbytes for n in (first, second)] == [LARGE, LARGE]


def test_handles_name_the_equations_of_every_op_and_effects_run_once():
    program = FlatProgram(LARGE)
    a = program.add("exp", 0)
    b = program.add("call", a, effect=True)
    graph, _, handles = graph_of(program.returns(b))
    assert [handles[op.id] for op in graph.ops] == [(0,), (1,)]
    assert [op.recomputable for op in graph.ops] == [True, False]
    assert graph.outputs == (graph.ops[1].outputs[0],)


def test_an_effect_alone_is_in_the_phase_of_what_it_reads():
    program, gradients, updates, state = a_step()
    program.add("call", gradients[1], outputs=0, scope="backward", effect=True)
    for number in (program.outputs[0], updates[0]):
        program.add("call", number, outputs=0, effect=True)
    graph, _, handles = graph_of(program, state)
    effects = [op for op in graph.ops if not op.outputs]
    assert {handles[op.id]: op.phase for op in effects} == {
        (9,): BACKWARD,
        (10,): FORWARD,
        (11,): UPDATE,
    }
    assert not any(op.recomputable for op in effects)
    assert {op.id for op in effects} <= graph.needed


def test_effects_keep_the_order_in_which_they_were_traced():
    """Also where the second could run earlier, or writes state that the first one reads."""
    program, gradients, updates, _ = a_step()
    for number in (gradients[0], gradients[1]):
        program.add("call", number, outputs=0, effect=True)
    new = program.add("call", 0, gradients[1], effect=True)
    program.returns(*program.outputs[:1], new, updates[1])
    for written in ([(0, new), (1, updates[1])], []):
        graph, _, handles = graph_of(program, written)
        effects = [op for op in graph.ops if program.equations[handles[op.id][-1]].has_effect]
        assert [handles[op.id] for op in effects] == [(9,), (10,), (11,)]
        for earlier, later in pairwise(effects):
            assert earlier.id in later.after
