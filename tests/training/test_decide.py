"""The table decides every combination of facts, and every path through it ends."""

from dataclasses import fields, replace
from itertools import combinations, product

import pytest

from keras_remat.training.decide import (
    MAX_OUT_OF_MEMORY,
    MAX_TIGHTENINGS,
    MICRO_BATCHES,
    TABLE,
    Facts,
    Move,
    Phase,
    Recorded,
    RetryCounts,
    decide,
)

#: Moves that may turn out not to be possible, because no plan is found.
FALLIBLE = frozenset(
    {Move.PLAN, Move.PROFILE, Move.REPLAN, Move.TIGHTEN, Move.SPLIT, Move.LOWER_LIMIT}
)

#: Moves of a step that runs under a plan.
NEEDS_PLAN = frozenset(
    {
        Move.START_RECORDER, Move.START_SOLVER, Move.KEEP_PLAN, Move.RUN_PLAIN, Move.REPLAN,
        Move.TIGHTEN, Move.TRY_PLAIN,
    }
)  # fmt: skip
#: What may have failed before: profiling alone, since nothing else is tried for the same reason.
FAILURES = [
    frozenset({Move.PROFILE}),
    *(
        frozenset(moves)
        for n in range(len(FALLIBLE))
        for moves in combinations(FALLIBLE - {Move.PROFILE}, n)
    ),
]
#: By phase its rows.
ROWS = {phase: [row for row in TABLE if row.before in (None, phase)] for phase in Phase}
#: By phase the names of the facts that its rows ask for: the others change nothing.
ASKED = {phase: {name for row in rows for name in row.facts} for phase, rows in ROWS.items()}


def all_facts():
    """Every combination of what is asked for in a phase, and of its moves that failed."""
    for phase, rows in ROWS.items():
        moves = {row.move for row in rows}
        of_facts = {"recorded": Recorded, "failed": {failed & moves for failed in FAILURES}}
        asked = ASKED[phase] | of_facts.keys()
        names = [field.name for field in fields(Facts) if field.name in asked]
        for values in product(*(of_facts.get(name, (False, True)) for name in names)):
            yield Facts(phase=phase, **dict(zip(names, values, strict=True)))


def test_every_combination_of_facts_has_a_row_and_every_row_is_needed():
    used = set()
    for facts in all_facts():
        move, phase = decide(facts)
        if len(used) < len(TABLE):
            used.add(next(at for at, row in enumerate(TABLE) if row.matches(facts)))
        assert move not in facts.failed
        assert (move is Move.REFUSE) <= facts.out_of_memory
        assert phase is not Phase.RECORD or move in (Move.START_RECORDER, Move.STAY)
        assert phase is not Phase.SOLVE or move in (Move.START_SOLVER, Move.STAY)
        if facts.phase is Phase.FINAL and not facts.over_limit and not facts.out_of_memory:
            assert (move, phase) == (Move.STAY, Phase.FINAL)
        assert move is not Move.STAY or phase is facts.phase
        if facts.runs_a_plan == (facts.phase is not Phase.PLAIN) or facts.phase is Phase.FINAL:
            assert facts.runs_a_plan or move not in NEEDS_PLAN
            assert not facts.runs_a_plan or move is not Move.PROFILE
    assert used == set(range(len(TABLE)))


def test_a_failed_move_that_cannot_fail_is_refused():
    with pytest.raises(LookupError):
        decide(Facts(phase=Phase.FINAL, failed=frozenset({Move.STAY})))


def successors(phase, tries, recorded, runs_a_plan):
    """Whatever the device, the solver and the profiler may do next: yields the states that follow
    and differ. Steps that change nothing are counted by the driver."""
    tells = (
        (Recorded.BUSY, Recorded.BLIND, Recorded.MEASURED) if phase is Phase.RECORD else (recorded,)
    )
    free = (
        "out_of_memory", "over_limit", "plain_fits", "plain_may_be_smaller", "wants_profile",
        "solves_beside", "solved", "allow_over_limit",
    )  # fmt: skip
    values = [(False, True) if name in ASKED[phase] else (False,) for name in free]
    for out_of_memory, over, fits, smaller, profile, beside, solved, miss, told in product(
        *values, tells
    ):
        facts = Facts(
            phase=phase,
            enough_steps=True,
            over_limit=over,
            attempts_left=tries.attempts_left(out_of_memory=out_of_memory),
            may_split=tries.splits_left,
            allow_over_limit=miss,
            runs_a_plan=runs_a_plan,
            plain_fits=fits,
            plain_ruled_out=tries.plain_ruled_out,
            plain_may_be_smaller=smaller and not tries.plain_tried,
            wants_profile=profile and told is Recorded.NONE and not tries.profiled,
            recorded=told,
            solves_beside=beside,
            solved=solved,
            out_of_memory=out_of_memory,
        )
        counted = tries
        while True:
            move, following = decide(facts)
            counted = counted.after(move)
            if move is Move.REFUSE:
                break
            plans = move not in (Move.STAY, Move.FINISH, Move.KEEP_SMALLEST)
            plain = move in (Move.RUN_PLAIN, Move.TRY_PLAIN)
            known = Recorded.NONE if move is Move.SPLIT and told is not Recorded.BLIND else told
            planned = {(runs_a_plan or plans) and not plain}
            if move is Move.KEEP_SMALLEST:
                planned = {True, False}  # either may be the smallest
            for runs in planned:
                state = following, counted, known, runs
                if state != (phase, tries, recorded, runs_a_plan):
                    yield state
            if move not in FALLIBLE:
                break
            facts = replace(facts, failed=facts.failed | {move})


def test_every_path_ends():
    """No state comes back to itself, so that only so many moves are made before FINAL stays."""
    longest = {}

    def moves_from(state, path=()):
        assert state not in path, f"a circle: {[*path, state]}"
        if state not in longest:
            longest[state] = max(
                (1 + moves_from(following, (*path, state)) for following in successors(*state)),
                default=0,
            )
        return longest[state]

    starts = [
        (Phase.PLAIN, RetryCounts(), Recorded.NONE, False),
        (Phase.FINAL, RetryCounts(), Recorded.NONE, False),
        *((phase, RetryCounts(), Recorded.NONE, True) for phase in (Phase.WARM_UP, Phase.VERIFY)),
        (Phase.VERIFY, RetryCounts(plain_ruled_out=True), Recorded.BLIND, True),
    ]
    bound = (len(MICRO_BATCHES) + 1) * (2 * MAX_TIGHTENINGS + 7) + 4 * MAX_OUT_OF_MEMORY
    assert max(map(moves_from, starts)) <= bound
    assert any(state[0] is Phase.FINAL and moves == 0 for state, moves in longest.items())


MEASURED = {"recorded": Recorded.MEASURED}
UNTIGHTENED = {"over_limit": True, "attempts_left": False}
# fmt: off
#: Phase, the facts that are so, move, the phase it leads to.
MOVES = [
    (Phase.PLAIN, {}, Move.STAY, Phase.PLAIN),
    (Phase.PLAIN, {"enough_steps": True}, Move.FINISH, Phase.FINAL),
    (Phase.PLAIN, {"over_limit": True}, Move.PLAN, Phase.WARM_UP),
    (Phase.PLAIN, {"over_limit": True, **MEASURED}, Move.PLAN, Phase.VERIFY),
    (Phase.PLAIN, {"enough_steps": True, "wants_profile": True}, Move.PROFILE, Phase.WARM_UP),
    (Phase.WARM_UP, {"over_limit": True}, Move.START_RECORDER, Phase.RECORD),
    (Phase.WARM_UP, {"out_of_memory": True, "plain_fits": True}, Move.RUN_PLAIN, Phase.PLAIN),
    (Phase.RECORD, {"recorded": Recorded.BLIND, "plain_fits": True}, Move.RUN_PLAIN, Phase.PLAIN),
    (Phase.RECORD, {**MEASURED, "plain_fits": True}, Move.RUN_PLAIN, Phase.PLAIN),
    (Phase.RECORD, {"recorded": Recorded.BUSY}, Move.KEEP_PLAN, Phase.VERIFY),
    (Phase.RECORD, MEASURED, Move.REPLAN, Phase.VERIFY),
    (Phase.RECORD, {**MEASURED, "solves_beside": True}, Move.START_SOLVER, Phase.SOLVE),
    (Phase.RECORD, {**MEASURED, "allow_over_limit": False}, Move.KEEP_PLAN, Phase.VERIFY),
    (Phase.RECORD, {**MEASURED, "allow_over_limit": False, "over_limit": True},
     Move.REPLAN, Phase.VERIFY),
    (Phase.SOLVE, {}, Move.STAY, Phase.SOLVE),
    (Phase.SOLVE, {"solved": True}, Move.REPLAN, Phase.VERIFY),
    (Phase.SOLVE, {"over_limit": True}, Move.REPLAN, Phase.VERIFY),
    (Phase.SOLVE, {"solved": True, "failed": frozenset({Move.REPLAN})},
     Move.KEEP_PLAN, Phase.VERIFY),
    (Phase.VERIFY, {"enough_steps": True}, Move.FINISH, Phase.FINAL),
    (Phase.VERIFY, {"over_limit": True}, Move.TIGHTEN, Phase.VERIFY),
    (Phase.VERIFY, UNTIGHTENED, Move.KEEP_SMALLEST, Phase.FINAL),
    (Phase.VERIFY, {**UNTIGHTENED, "may_split": True}, Move.SPLIT, Phase.WARM_UP),
    (Phase.VERIFY, {**UNTIGHTENED, "plain_may_be_smaller": True}, Move.TRY_PLAIN, Phase.VERIFY),
    (Phase.VERIFY, {"over_limit": True, "runs_a_plan": False}, Move.KEEP_SMALLEST, Phase.FINAL),
    (Phase.VERIFY, {"out_of_memory": True, "runs_a_plan": False}, Move.KEEP_SMALLEST, Phase.FINAL),
    (Phase.VERIFY, {"out_of_memory": True, "attempts_left": False}, Move.REFUSE, Phase.FINAL),
    (Phase.FINAL, {"over_limit": True}, Move.TIGHTEN, Phase.VERIFY),
    (Phase.FINAL, {"over_limit": True, "runs_a_plan": False}, Move.PLAN, Phase.WARM_UP),
    (Phase.FINAL, {"out_of_memory": True}, Move.LOWER_LIMIT, Phase.WARM_UP),
]
# fmt: on


@pytest.mark.parametrize(("before", "facts", "move", "after"), MOVES)
def test_what_the_table_is_for(before, facts, move, after):
    assert decide(Facts(phase=before, **facts)) == (move, after)
