"""What compiled schedules need: compiled where that tells, learnt from runs where only they do."""

import math

from fake_backend import chain_problem

from keras_remat.backends.xla.compiled_memory import (
    FIRST_RATIO,
    GPU_FIRST_RATIO,
    RULED_OUT,
    CompiledMemory,
)
from keras_remat.backends.xla.packing import packed_bytes
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.solvers import solve

PROBLEM = chain_problem(4)
STORE_ALL = Schedule.store_all(PROBLEM.graph)
RESIDENT = PROBLEM.profile.resident_bytes
MOST = simulate(PROBLEM, STORE_ALL).peak_bytes - RESIDENT
TIGHT = solve(PROBLEM.with_budget(RESIDENT + MOST // 2), solver="greedy").schedule
LESS = solve(PROBLEM.with_budget(RESIDENT + 3 * MOST // 4), solver="greedy").schedule


def test_where_only_a_run_tells():
    memory = CompiledMemory(lambda problem, schedule: None)
    assert memory.peak_bytes(PROBLEM, STORE_ALL) == RESIDENT + int(MOST * FIRST_RATIO)
    assert memory.compiled_peak_bytes(PROBLEM, TIGHT) is None
    memory.observe(PROBLEM, TIGHT, RESIDENT + 700)
    memory.observe(PROBLEM, TIGHT, RESIDENT + 600)
    assert memory.peak_bytes(PROBLEM, TIGHT) == RESIDENT + 700
    assert not memory.order_matters


def test_nothing_is_known_of_a_schedule_but_what_the_compiler_adds_to_others():
    alive, packed = simulate(PROBLEM, TIGHT).peak_bytes - RESIDENT, packed_bytes(PROBLEM, TIGHT)
    assert alive < packed
    for on_gpu, expected in ((False, FIRST_RATIO * alive), (True, GPU_FIRST_RATIO * packed)):
        memory = CompiledMemory(lambda problem, schedule: None, on_gpu=on_gpu)
        assert memory.peak_bytes(PROBLEM, TIGHT) == RESIDENT + int(expected)


def test_gaps_are_closed_on_a_gpu_alone():
    """XLA:CPU is not taken to leave any."""
    on_cpu, on_gpu = (
        CompiledMemory(lambda problem, schedule: None, on_gpu=on_gpu) for on_gpu in (False, True)
    )
    assert on_cpu.with_fewer_gaps(PROBLEM, TIGHT, math.inf) is None
    closed = on_gpu.with_fewer_gaps(PROBLEM, TIGHT, math.inf)
    assert packed_bytes(PROBLEM, closed) < packed_bytes(PROBLEM, TIGHT)


def test_keras_s_own_step_tells_nothing_of_schedules():
    memory = CompiledMemory(lambda problem, schedule: 3 * MOST if schedule is None else None)
    predicted = memory.peak_bytes(PROBLEM, TIGHT)
    assert memory.peak_bytes(PROBLEM, STORE_ALL) == RESIDENT + 3 * MOST
    assert memory.peak_bytes(PROBLEM, TIGHT) == predicted


def test_where_compiling_tells_every_schedule_is_compiled_once():
    asked = []

    def compiled(problem, schedule):
        asked.append(schedule)
        return MOST if schedule is None else 500

    memory = CompiledMemory(compiled)
    for _ in range(2):
        assert memory.peak_bytes(PROBLEM, STORE_ALL) == RESIDENT + MOST
        assert memory.compiled_peak_bytes(PROBLEM, TIGHT) == RESIDENT + 500
    assert asked == [None, TIGHT]


def test_what_is_compiled_gets_a_chunk_of_the_pool():
    memory = CompiledMemory(lambda problem, schedule: 500, chunk_bytes=lambda nbytes: nbytes + 200)
    assert memory.compiled_peak_bytes(PROBLEM, TIGHT) == RESIDENT + 700
    assert memory.peak_bytes(PROBLEM, TIGHT) == RESIDENT + 700
    memory.observe(PROBLEM, TIGHT, RESIDENT + 700)
    assert memory.peak_bytes(PROBLEM, TIGHT) == RESIDENT + 700  # it is not counted twice
    memory.observe(PROBLEM, TIGHT, RESIDENT + 800)
    assert memory.peak_bytes(PROBLEM, TIGHT) == RESIDENT + 800


def test_afresh_nothing_is_known_and_nothing_is_compiled_twice():
    asked = []

    def compiled(problem, schedule):
        asked.append(schedule)
        return 500

    memory = CompiledMemory(compiled)
    memory.compiled_peak_bytes(PROBLEM, TIGHT)
    fresh = memory.afresh()
    assert fresh.peak_bytes(PROBLEM, TIGHT) == CompiledMemory(compiled).peak_bytes(PROBLEM, TIGHT)
    assert fresh.compiled_peak_bytes(PROBLEM, TIGHT) == RESIDENT + 500
    assert fresh.compiled_peak_bytes(PROBLEM, LESS) == RESIDENT + 500
    assert memory.compiled_peak_bytes(PROBLEM, LESS) == RESIDENT + 500
    assert asked == [TIGHT, LESS]


def test_a_plain_step_far_over_the_budget_by_another_size_of_it_is_not_compiled():
    asked, larger = [], chain_problem(8)
    most = simulate(larger, STORE_ALL).peak_bytes - larger.profile.resident_bytes

    def compiled(problem, schedule):
        asked.append(problem.graph.fingerprint)
        return MOST if problem.graph == PROBLEM.graph else most

    def within(problem, share):
        store_all = Schedule.store_all(problem.graph)
        room = int(share * (simulate(problem, store_all).peak_bytes - RESIDENT))
        return problem.with_budget(RESIDENT + room)

    memory = CompiledMemory(compiled)
    # the first of its kind, whatever the budget
    assert memory.peak_bytes(within(PROBLEM, 0.5), STORE_ALL) == RESIDENT + MOST
    told = memory.peak_bytes(within(larger, 0.99 / RULED_OUT), STORE_ALL)
    assert asked == [PROBLEM.graph.fingerprint]
    # near the budget, without one, and of other ops
    assert memory.peak_bytes(within(larger, 1.01 / RULED_OUT), STORE_ALL) == told
    assert asked == [PROBLEM.graph.fingerprint, larger.graph.fingerprint]
    other = chain_problem(4, layers=5)
    memory.peak_bytes(within(other, 0.5), Schedule.store_all(other.graph))
    assert asked[-1] == other.graph.fingerprint


def within(room_bytes):
    return PROBLEM.with_budget(RESIDENT + room_bytes)


def test_a_schedule_is_written_anew_where_it_takes_more_than_a_limit_leaves():
    asked = []

    def compiled(problem, schedule):
        asked.append(problem.room_bytes)
        return 500 if problem.room_bytes is None or problem.room_bytes >= 500 else 400

    memory = CompiledMemory(compiled, on_gpu=True, rewrites=True)
    for room, takes in ((None, 500), (600, 500), (450, 400), (600, 400), (300, 400), (200, 400)):
        problem = PROBLEM if room is None else within(room)
        assert memory.compiled_peak_bytes(problem, TIGHT) == RESIDENT + takes
        assert memory.peak_bytes(problem, TIGHT) == RESIDENT + takes
    assert asked == [None, 450, 300], "and no more where no way is left"
    for room in (600, 300):
        assert memory.peak_bytes(within(room), STORE_ALL) == RESIDENT + 500
    assert asked[3:] == [600], "Keras's own step is written in one way"


def test_what_a_run_took_more_counts_for_the_next_writing():
    asked = []

    def compiled(problem, schedule):
        asked.append(problem.room_bytes)
        return 500 if problem.room_bytes >= 500 else 400

    memory = CompiledMemory(compiled, rewrites=True)
    assert memory.compiled_peak_bytes(within(540), TIGHT) == RESIDENT + 500
    memory.observe(PROBLEM, TIGHT, RESIDENT + 560)
    assert memory.peak_bytes(within(540), TIGHT) == RESIDENT + 560
    for room in (540, 460, 450):
        assert memory.compiled_peak_bytes(within(room), TIGHT) == RESIDENT + 460
    assert asked == [540, 480, 390], "less than the limit leaves, by what the run took more"


def test_the_time_of_a_schedule_is_told_where_both_steps_are_known():
    seconds = {None: 2.0, TIGHT: 2.5}
    memory = CompiledMemory(
        lambda problem, schedule: None, compiled_time_s=lambda problem, s: seconds.get(s)
    )
    assert memory.compiled_step_s(PROBLEM, TIGHT) == 1.25 * PROBLEM.store_all_time_s
    assert memory.compiled_step_s(PROBLEM, STORE_ALL) is None
    unknown = CompiledMemory(lambda problem, schedule: None)
    assert unknown.compiled_step_s(PROBLEM, TIGHT) is None


def test_what_was_compiled_serves_schedules_that_were_not():
    """A schedule as tight needs as much above the simulated bytes, at any batch size."""
    memory = CompiledMemory(lambda problem, schedule: None)
    simulated = simulate(PROBLEM, TIGHT).peak_bytes - RESIDENT
    memory.observe(PROBLEM, TIGHT, RESIDENT + simulated + MOST // 4)
    larger = chain_problem(8)
    alive = simulate(larger, TIGHT).peak_bytes
    assert memory.peak_bytes(larger, TIGHT) == alive + MOST // 2
