"""What comes of a fit on one device, whatever the device does: a table of scenarios, on a backend
without a framework.

In every one of them each sample trains once and in order, the fit comes to its last step, and that
step is plain, keeps the limit, or says that it does not.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import pytest
from fake_backend import FakeBackend, batch_of, chain_problem, event_kinds
from fake_fit import PLAIN, SIZE, TIGHT, driven, options

from keras_remat.training.shape_state import USUAL_CONSTRAINTS, StepConstraints


@dataclass(frozen=True, kw_only=True)
class Given:
    """A fit, and what its device does otherwise.

    Args:
        device: attributes of the backend.
        surplus: bytes that a step takes above its prediction, from (backend, what runs, samples).
        limit: of the fit; ``None`` is all that the device says it has.
        every: the constraints of every batch.
        steps: that train.
    """

    device: Mapping[str, Any] = field(default_factory=dict)
    surplus: Callable[[FakeBackend, Any, int], int] = lambda backend, what, size: 0
    limit: int | None = TIGHT
    every: StepConstraints = USUAL_CONSTRAINTS
    steps: int = 12


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is to come of it.

    Args:
        ran: how many steps ran in a row, and how: ``"3 remat, 9 plain"``.
        events: their kinds, in order.
        warns: what a warning says.
        says: what a message says.
        limit: that holds in the end, where it is another one.
        baseline: the measured peak of the plain step, where it is looked at.
        predicts: whether the prediction of the last plan is what it measures.
        source: of the op times of the last plan.
    """

    ran: str
    events: str
    warns: str = ""
    says: str = ""
    limit: int | None = None
    baseline: int | None = None
    predicts: bool = True
    source: str = "measured"


#: Bytes of every value of the chain.
VALUE = SIZE * 1024
MAY_SPLIT = StepConstraints(may_split=True)
GIVES_WAY = StepConstraints(allow_over_limit=False)
RECORDS = StepConstraints(wants_profile=True)
IN_ORDER = StepConstraints(require_planned=True)
#: A kernel that is built anew draws its first numbers again: its step is not swapped.
DRAWS = {"more": {"kind": "RandomStandardNormal"}}
#: A device that has little more than half a batch needs, and says that it has much.
SMALL = {"memory_bytes": 2 * PLAIN, "has_bytes": chain_problem(SIZE // 2).floor_bytes + VALUE}
GOES_ON = "The step of 100 samples takes"
PLAIN_GOES_ON = "The plain step of 100 samples takes"


def always(nbytes):
    """Every step takes so much more."""
    return lambda backend, what, size: nbytes


def by_way(plain, remat):
    """Plain steps, and steps under a plan, take so much more."""
    return lambda backend, what, size: plain if what == "plain" else remat


def whole_batch(nbytes):
    """A batch that is not split takes so much more."""
    return lambda backend, what, size: nbytes if backend.traced[-1] == SIZE else 0


def after_recording(backend, what, size):
    """The recorded steps do not show what later ones take."""
    return 2 * VALUE if backend.calls > 3 else 0


def after_30(backend, what, size):
    """Steps come to take more long after the last one that decided."""
    return 2 * VALUE if backend.calls > 30 else 0


def first_plan(backend, what, size):
    """What one schedule measured above its prediction tells little of others."""
    return TIGHT if what == backend.lowered[0] else 0


def later_plans(backend, what, size):
    """A schedule that is solved for later takes far more than the first one."""
    return PLAIN // 4 if what == backend.lowered[0] else 2 * PLAIN


# fmt: off
SCENARIOS = {
    "a plain step that fits is left alone": (
        Given(limit=PLAIN, steps=6),
        Seen(ran="6 plain", events="fits", baseline=PLAIN),
    ),
    "a plain step that fits is not recorded where no op can be timed": (
        Given(device={"measures_op_times": False}, limit=PLAIN, every=RECORDS, steps=6),
        Seen(ran="6 plain", events="fits"),
    ),
    "a busy profiler leaves the plan with estimates": (
        Given(device={"profiler": "busy"}),
        Seen(ran="12 remat", events="risk profile measured", source="estimated"),
    ),
    "a profiler that saw too little leaves the plan with estimates": (
        Given(device={"profiler": "blind"}),
        Seen(ran="12 remat", events="risk profile measured", source="estimated"),
    ),
    # ------------------------------------------------------------ the measured peak decides
    "a surplus that is seen while recording is in the plan that is swapped in": (
        Given(surplus=always(2 * VALUE), steps=20),
        Seen(ran="20 remat", events="risk exceeded swap measured", says="while it was recorded"),
    ),
    # the first plan leaves room: what it tells of tighter schedules is no longer so
    "a measured peak over the limit tightens until it holds": (
        Given(surplus=after_recording, steps=20),
        Seen(ran="20 remat", events="risk swap tighten swap tighten swap measured"),
    ),
    "a final step that comes to take more than the limit is planned again": (
        Given(surplus=after_30, steps=50),
        Seen(ran="50 remat", events="risk swap measured tighten swap tighten swap measured"),
    ),
    "a plain step that fits by what was measured comes back": (
        Given(surplus=always(-120_000), limit=PLAIN - 5_000),
        Seen(ran="3 remat, 9 plain", events="risk plain fits"),
    ),
    "a plain step that came back and does not fit is not tried again": (
        Given(surplus=by_way(0, -120_000), limit=PLAIN - 5_000),
        Seen(ran="3 remat, 2 plain, 7 remat", events="risk plain exceeded measured"),
    ),
    "a plan that cannot be tightened enough is tightened in part and measured": (
        Given(surplus=always(TIGHT), steps=16),
        Seen(ran="16 remat",
             events="risk exceeded kept tighten swap tighten over-limit measured",
             warns=GOES_ON),
    ),
    "a plan that is predicted to save little is measured": (
        Given(surplus=first_plan, steps=16),
        Seen(ran="16 remat", events="risk exceeded kept tighten swap measured", predicts=False),
    ),
    "a plain step over its prediction is planned with what was too much": (
        Given(surplus=always(VALUE), limit=PLAIN),
        Seen(ran="2 plain, 10 remat", events="exceeded measured", baseline=PLAIN + VALUE),
    ),
    # one order shows that it takes more, and no other one is predicted to fit
    "where a smaller batch trains no plan runs that is known to miss the limit": (
        Given(surplus=always(TIGHT), every=GIVES_WAY, steps=16),
        Seen(ran="16 remat", events="risk exceeded kept over-limit measured",
             says="A smaller batch takes over.", source="estimated", predicts=False),
    ),
    # each plan has its chance, and the one that needs least stays
    "a plain step over a limit that no schedule meets goes on and says so": (
        Given(surplus=always(10 * PLAIN), limit=PLAIN, steps=16),
        Seen(ran="2 plain, 14 remat",
             events="exceeded exceeded kept tighten swap tighten over-limit measured",
             warns=GOES_ON),
    ),
    # ------------------------------------------------------------ out of memory
    "a plain step that runs out of memory at once is planned": (
        Given(device={"fails_at": {1}}, limit=PLAIN),
        Seen(ran="12 remat", events="out-of-memory swap measured", limit=PLAIN - 1),
    ),
    "a plain step that runs out of memory before it is final is planned": (
        Given(device={"fails_at": {3}}, limit=PLAIN),
        Seen(ran="2 plain, 10 remat", events="out-of-memory swap measured", limit=PLAIN - 1),
    ),
    "a final plain step that runs out of memory is planned": (
        Given(device={"fails_at": {6}}, limit=PLAIN),
        Seen(ran="5 plain, 7 remat", events="fits out-of-memory swap measured",
             limit=PLAIN - 1),
    ),
    "a device that has less than it says lowers the limit": (
        Given(device={"memory_bytes": 2 * PLAIN, "has_bytes": TIGHT}, limit=None),
        Seen(ran="12 remat", events="out-of-memory swap measured", limit=TIGHT),
    ),
    "a recorded step that runs out of memory gives way to the plain one": (
        Given(device={"fails_at": {4}}, limit=PLAIN, every=RECORDS, steps=10),
        Seen(ran="10 plain", events="profile plain fits", limit=PLAIN),
    ),
    # ------------------------------------------------------------ plans that need more than plain
    "a plain step that was never run comes back where no plan takes less": (
        Given(surplus=by_way(-PLAIN // 5, 2 * PLAIN), steps=40),
        Seen(ran="5 remat, 35 plain",
             events="risk exceeded kept tighten swap tighten plain over-limit",
             warns=PLAIN_GOES_ON, baseline=PLAIN - PLAIN // 5),
    ),
    "a plain step that is what was predicted comes back where no plan takes less": (
        Given(surplus=by_way(0, 2 * PLAIN), steps=40),
        Seen(ran="5 remat, 35 plain",
             events="risk exceeded kept tighten swap tighten plain over-limit",
             warns=PLAIN_GOES_ON, baseline=PLAIN),
    ),
    "a plain step that measured over the limit comes back where no plan takes less": (
        Given(surplus=by_way(TIGHT, 2 * PLAIN), limit=PLAIN, steps=40),
        Seen(ran="2 plain, 5 remat, 33 plain",
             events="exceeded exceeded kept tighten swap tighten over-limit",
             warns=PLAIN_GOES_ON, baseline=PLAIN + TIGHT),
    ),
    "a plain step that takes more than the first plan did is not tried": (
        Given(surplus=later_plans, steps=16),
        Seen(ran="16 remat",
             events="risk exceeded kept tighten swap tighten over-limit measured",
             warns=GOES_ON),
    ),
    "a plain step that keeps to the limit after all stays": (
        Given(surplus=by_way(TIGHT - PLAIN, 2 * PLAIN), steps=40),
        Seen(ran="5 remat, 35 plain",
             events="risk exceeded kept tighten swap tighten plain fits"),
    ),
    # Keras's own step would leave variables where larger steps need the room
    "a batch that is to run in order does so where no plan takes less": (
        Given(surplus=by_way(-PLAIN // 5, 2 * PLAIN), every=IN_ORDER, steps=16),
        Seen(ran="16 remat",
             events="risk exceeded kept tighten swap tighten over-limit measured",
             warns=GOES_ON),
    ),
    # ------------------------------------------------------------ micro-batches
    "a step over the limit under every plan goes on in micro-batches": (
        Given(surplus=whole_batch(TIGHT), every=MAY_SPLIT, steps=30),
        Seen(ran="30 remat",
             events="risk exceeded kept tighten swap tighten micro-batches swap measured",
             warns="2 micro-batches"),
    ),
    "a plain step over a limit that no schedule meets goes on in micro-batches": (
        Given(surplus=whole_batch(7 * PLAIN // 10), limit=PLAIN, every=MAY_SPLIT, steps=24),
        Seen(ran="2 plain, 22 remat",
             events="exceeded exceeded kept tighten swap tighten micro-batches measured",
             warns="2 micro-batches"),
    ),
    "micro-batches that do not help leave the plan that measured least": (
        Given(surplus=always(TIGHT), every=MAY_SPLIT, steps=60),
        Seen(ran="60 remat",
             events="risk exceeded kept tighten swap tighten "
             + 3 * "micro-batches exceeded swap tighten " + "over-limit measured",
             warns="micro-batches", predicts=False),
    ),
    "a step that cannot be split keeps the plan that measured least": (
        Given(device={"can_be_cut": False}, surplus=always(TIGHT), every=MAY_SPLIT, steps=16),
        Seen(ran="16 remat",
             events="risk exceeded kept tighten swap tighten over-limit measured",
             warns=GOES_ON),
    ),
    "a batch that runs out of memory under every plan is trained in micro-batches": (
        Given(device=SMALL, limit=None, every=MAY_SPLIT),
        Seen(ran="12 remat",
             events="out-of-memory swap out-of-memory micro-batches measured",
             warns="micro-batches", limit=SMALL["has_bytes"]),
    ),
    # ------------------------------------------------------------ what cannot be swapped
    "random state in kernels is no reason to refuse a plain step": (
        Given(device=DRAWS, limit=PLAIN, steps=5),
        Seen(ran="5 plain", events="fits"),
    ),
    "random state in kernels is a reason not to record": (
        Given(device=DRAWS, limit=PLAIN, every=RECORDS, steps=5),
        Seen(ran="5 plain", events="remark fits"),
    ),
    "a plain step that cannot be swapped and measures over the limit trains once": (
        Given(device=DRAWS, surplus=always(PLAIN), limit=PLAIN, steps=5),
        Seen(ran="5 plain", events="exceeded remark over-limit", warns="Training goes on with it"),
    ),
}
# fmt: on


@pytest.mark.parametrize(("given", "seen"), SCENARIOS.values(), ids=SCENARIOS)
def test_what_a_fit_comes_to(given, seen):
    backend = FakeBackend()
    for name, value in given.device.items():
        setattr(backend, name, value)
    backend.surplus_bytes = partial(given.surplus, backend)
    trainer, report = driven(backend, options(given.limit))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(given.steps):
            assert trainer.run(batch_of(step * SIZE, SIZE), given.every) == {"loss": step + 1.0}
            assert not (trainer.settled and step == 0), "a first call tells nothing"
    assert bool(caught) == bool(seen.warns)
    assert not caught or any(seen.warns in str(one.message) for one in caught)
    runs = [f"{len(list(run))} {kind}" for kind, run in groupby(backend.kinds)]
    assert ", ".join(runs) == seen.ran
    assert " ".join(event_kinds(report)) == seen.events
    assert any(seen.says in event.message for event in report.events)
    assert report.limit_bytes == (seen.limit or given.limit)
    if seen.baseline is not None:
        assert report.baseline_source == "measured"
        assert (report.baseline.peak_bytes, report.baseline_batch_size) == (seen.baseline, SIZE)
    assert backend.samples == list(range(given.steps * SIZE)), "every sample once, in order"
    assert trainer.settled
    assert not backend.recording
    assert_last_step(trainer, seen)


def assert_last_step(trainer, seen):
    """It is plain, keeps the limit, or says that it does not."""
    plan, limit = trainer.plan, trainer.fit.limit.total_bytes
    if seen.ran.endswith("plain"):
        assert plan is None
        return
    assert plan.profile_source == seen.source
    is_over = "over-limit" in event_kinds(trainer.report)
    assert (plan.measured.peak_bytes > limit) == is_over
    assert (plan.measured.peak_bytes == plan.predicted.peak_bytes) == seen.predicts
    assert ("STILL OVER" if is_over else "within the limit") in trainer.report.events[-1].message
