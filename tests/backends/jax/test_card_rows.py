"""Rows of cards, with a stand-in for their compiler: verdicts, batches, what is told first."""

from dataclasses import replace
from types import SimpleNamespace

import jax_models as models
import pytest

import keras_remat
from keras_remat.backends.jax import JaxBackend, trace
from keras_remat.cards import rows as asking
from keras_remat.cards.breakdown import PARTS
from keras_remat.cards.report import DOES_NOT_FIT, FITS, WITH_A_PLAN
from keras_remat.cards.rows import AskedStep
from keras_remat.cards.table import card
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.planning.slice_candidates import PARTS as PARTS_OF_BATCHES
from keras_remat.units import KIB, MIB

REFUSED = "RTX5090"


@pytest.fixture
def compiled(monkeypatch):
    """A stand-in that says what is simulated, and takes no RTX 5090. It holds what it compiled."""
    seen = []

    def compile_bytes(self, problem, schedule):
        traced = self._traced.get(problem.graph.fingerprint)
        if traced is None:
            return None
        if traced.target.card == REFUSED:
            raise RuntimeError("no such architecture\nand more")
        seen.append((traced.target.card, schedule))
        order = schedule or Schedule.store_all(problem.graph)
        return simulate(problem, order).peak_bytes - problem.profile.resident_bytes

    monkeypatch.setattr(JaxBackend, "_compile_bytes", compile_bytes)
    monkeypatch.setattr(JaxBackend, "written_plain", lambda self, problem: lambda: None)
    return seen


def asked(model, size):
    return AskedStep(model, size, JaxBackend, margin=0.0, time_limit_s=1.0, seed=0)


def sized(name, nbytes):
    """A card of the table with less memory."""
    return replace(card(name), total_bytes=nbytes, usable_bytes=nbytes)


def test_a_row_for_every_size_of_card(compiled, monkeypatch):
    traces = []
    own = trace.trace

    def counted(model, batch, *more):
        traces.append(batch)
        return own(model, batch, *more)

    monkeypatch.setattr(trace, "trace", counted)
    model = models.mixer()
    step, told = asked(model, 64), []
    rows = [*step.rows([sized("H100", 64 * MIB)], told.append)]
    plain, resident = rows[0].plain_bytes, sum(rows[0].parts[p] for p in ("weights", "slots"))
    between = resident + int(0.7 * (plain - resident))
    others = (("A100-40", between), ("L4", resident + 400 * KIB), ("A10G", KIB))
    rows += step.rows([sized(*each) for each in others], told.append)
    fits, planned, too_small, tiny = rows
    assert [row.verdict for row in rows] == [FITS, WITH_A_PLAN, DOES_NOT_FIT, DOES_NOT_FIT]
    assert len(traces) == 2, "one, and one of twice the batch, for all four"
    assert [row.card for row in told] == ["H100", "A100-40", "L4", "A10G"]
    assert all(row.max_batch_plain is None for row in told)
    assert fits.plain_bytes == sum(fits.parts.values())
    assert set(fits.parts) == set(PARTS)
    assert fits.overhead == 0.0
    assert 64 <= fits.max_batch_plain < fits.max_batch_planned
    assert 0 < planned.overhead < 1
    assert planned.smallest_bytes <= between < planned.plain_bytes == plain
    assert planned.max_batch_plain < 64
    assert planned.samples_per_s_planned < planned.samples_per_s_plain < fits.samples_per_s_plain
    assert too_small.smallest_bytes > resident + 400 * KIB
    assert too_small.samples_per_s_planned is None
    assert tiny.max_batch_plain == tiny.max_batch_planned == 0
    assert step.layers
    plain_compilations = [name for name, schedule in compiled if schedule is None]
    assert plain_compilations == ["H100", "A100-40", "L4", "A10G"]


def below_the_floor():
    """Returns a model, a limit that no whole op of its step fits, and its floor."""
    model = models.mixer(blocks=1)
    backend = JaxBackend(card("H100"))
    traced = backend.trace(model, backend.example_batch(model, 64))
    problem = keras_remat.Problem(traced.graph, backend.estimated_profile(traced))
    resident, floor = problem.profile.resident_bytes, problem.floor_bytes
    return model, resident + int(0.8 * (floor - resident)), floor


def test_a_card_that_no_whole_op_fits_takes_slices(compiled):
    """As ``fit`` would train it."""
    model, limit, floor = below_the_floor()
    (row,) = asked(model, 64).rows([sized("H100", limit)], lambda row: None)
    assert row.verdict == WITH_A_PLAN
    assert row.slices in PARTS_OF_BATCHES
    assert f"in {row.slices} slices" in row.answer
    assert row.smallest_bytes <= limit < floor
    assert row.max_batch_plain < row.max_batch_planned


@pytest.mark.slow
def test_a_search_takes_slices_on_a_card_that_no_whole_op_fits(compiled):
    model, limit, _ = below_the_floor()
    found = keras_remat.find_max_batch_size(
        model, 64, limit, card=card("H100"), max_overhead=None, margin=0.0, time_limit_s=1.0
    )
    assert found.plan.slicing is not None
    assert found.plain_batch_size < 64 <= found.max_batch_size


def test_a_card_that_the_compiler_refuses_has_a_remark(compiled):
    step, told = asked(models.small(), 8), []
    row, other = step.rows([card(REFUSED), card("T4")], told.append)
    assert (row.verdict, row.plain_bytes) == (None, None)
    assert row.remark == "The compiler does not take it: no such architecture"
    assert row.answer == row.remark
    assert other.verdict == FITS


def test_a_row_says_why_a_plan_reaches_no_larger_batch(compiled, monkeypatch):
    tried = [SimpleNamespace(batch_size=128, reason="No schedule fits 64 MiB.")]
    found = SimpleNamespace(plain_batch_size=100, max_batch_size=100, probes=tried)
    monkeypatch.setattr(asking, "search_batch_size", lambda *what, **options: found)
    step = asked(models.small(), 8)
    (row,) = step.rows([card("T4")], lambda row: None)
    assert row.max_batch_planned == row.max_batch_plain == 100
    assert "No plan for a larger batch was found: batch 128: No schedule fits 64 MiB." in row.remark
    tried.clear()
    (row,) = step.rows([card("T4")], lambda row: None)
    assert "No plan for a larger batch was found: no time was left" in row.remark


def test_a_model_of_one_batch_size_has_no_others(compiled):
    import keras

    inputs = keras.Input(batch_shape=(8, 16))
    rows = keras.ops.reshape(inputs, (8, 4, 4))
    outputs = keras.layers.Dense(10)(keras.layers.Flatten()(rows))
    model = models.compiled(keras.Model(inputs, outputs))
    (row,) = asked(model, 8).rows([card("T4")], lambda row: None)
    assert row.verdict == FITS
    assert row.max_batch_plain is None
    assert "batches of 8 samples only" in row.remark
