import jax_models as models
import pytest

from keras_remat.backends.jax.lower import lower
from keras_remat.backends.jax.measure import memory
from keras_remat.backends.jax.private import state_values
from keras_remat.backends.jax.profile import profile
from keras_remat.backends.jax.trace import trace
from keras_remat.problem import Problem
from keras_remat.simulate import simulate


@pytest.fixture(scope="module")
def setting():
    model = models.mixer(blocks=4)
    batch = models.batch(model, 64)
    return model, batch, trace(model, batch)


def test_estimated_and_measured_say_so(setting):
    model, batch, traced = setting
    estimated = profile(traced)
    measured = profile(traced, 1, state=state_values(model), batch=batch)
    assert (estimated.source, measured.source) == ("estimated", "measured")
    assert estimated.resident_bytes == measured.resident_bytes
    ratio = [m / e for m, e in zip(measured.op_time_s, estimated.op_time_s, strict=True)]
    assert max(ratio) == pytest.approx(min(ratio))  # only the sum is measured


def test_measuring_needs_state_and_batch(setting):
    with pytest.raises(ValueError, match="state"):
        profile(setting[2], 1)


def test_products_dominate(setting):
    traced = setting[2]
    times = profile(traced).op_time_s
    products = sum(times[op.id] for op in traced.graph.ops if op.kind == "dot_general")
    assert 0.3 * sum(times) < products < sum(times)


def test_resident_bytes_are_the_arguments_of_the_compiled_step(setting):
    traced = setting[2]
    used = memory(lower(traced, models.forget(traced.graph)))
    constants = sum(c.nbytes for c in traced.program.constants)
    assert profile(traced).resident_bytes == used.argument_bytes + constants


def test_the_prediction_is_near_what_the_compiler_needs(setting):
    traced = setting[2]
    problem = Problem(traced.graph, profile(traced))
    schedule = models.forget(
        traced.graph, {op.id for op in traced.graph.ops if op.phase == "forward" and op.kind in ("add", "lt")}
    )
    predicted = simulate(problem, schedule).peak_bytes - problem.profile.resident_bytes
    assert 0.75 < memory(lower(traced, schedule)).temp_bytes / predicted < 1.5


def test_a_loop_has_workspace():
    model = models.recurrent()
    traced = trace(model, models.batch(model))
    workspaces = profile(traced).op_workspace_bytes
    assert any(workspaces[op.id] > 0 for op in traced.graph.ops if op.kind in ("scan", "while"))
