"""Which ways of writing a schedule are compiled, in which order."""

import pytest
from flat_program import KINDS, LARGE, FlatProgram

from keras_remat.backends.xla.fused_graph import SMALL_STATE_BYTES, FusedStep, fused_graph
from keras_remat.backends.xla.ways import Ways, Written
from keras_remat.core.schedule import Schedule
from keras_remat.core.writing import Writing

ROOM = 1000
WEIGHT = max(LARGE, SMALL_STATE_BYTES)


def asked(takes, *, on_gpu=True):
    """Returns in which ways a step with one large weight was written, and the one that is kept.

    Args:
        takes: bytes by way; what is not told keeps to the limit.
        on_gpu: whether it runs on a GPU.
    """
    program = FlatProgram(LARGE, WEIGHT)
    made = program.add("dot", 0, 1)
    weight = program.add("add", 1, program.add("dot", 0, made, scope="backward"))
    program.returns(weight)
    state = ((1, weight),)
    graph, numbers, handles = fused_graph(program, KINDS, state, lambda e: e.scope == "backward")
    ways = Ways(FusedStep(graph, handles, program, numbers), on_gpu, (1,), ())
    written = []

    def write(writing):
        written.append(writing)
        return Written(writing, takes.get(writing, ROOM), writing)

    found = ways.within(Schedule.store_all(graph), write, ROOM)
    assert found.step is found.writing
    assert found.ways == tuple(written)
    return written, found.writing


LOOSE, PHASED, UPDATED, HELD, STRICT = Writing


@pytest.mark.parametrize(
    ("takes", "written", "kept"),
    [
        ({}, [LOOSE], LOOSE),
        ({LOOSE: ROOM + WEIGHT}, [LOOSE, UPDATED], UPDATED),
        ({LOOSE: ROOM + 3 * WEIGHT}, [LOOSE, PHASED], PHASED),
        (
            {LOOSE: ROOM + 3 * WEIGHT, PHASED: ROOM + 1, HELD: ROOM + 2, STRICT: ROOM + 2},
            [LOOSE, PHASED, HELD, STRICT],
            PHASED,
        ),
        ({LOOSE: ROOM + 1, UPDATED: ROOM + 1}, [LOOSE, UPDATED, HELD], HELD),
    ],
)
def test_the_quickest_way_that_keeps_to_the_limit_is_taken(takes, written, kept):
    """Updates come early where those that wait may hold what is over the limit, and else the phases
    are kept apart."""
    assert asked(takes) == (written, kept)


def test_a_cpu_has_one_way():
    assert asked({STRICT: ROOM + 1}, on_gpu=False) == ([STRICT], STRICT)
