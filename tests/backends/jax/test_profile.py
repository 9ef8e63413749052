from dataclasses import replace

import jax_models as models
import pytest
from random_schedules import forget

from keras_remat.backends.jax.lower import lower
from keras_remat.backends.jax.measure import memory
from keras_remat.backends.jax.profile import estimated_profile
from keras_remat.backends.jax.trace import trace
from keras_remat.backends.xla.kernel_costs import scaled
from keras_remat.core.problem import Problem
from keras_remat.core.simulate import simulate
from keras_remat.core.target import live


@pytest.fixture(scope="module")
def setting():
    model = models.mixer(blocks=4)
    batch = models.batch(model, 64)
    return trace(model, batch)


def test_scaling_keeps_the_split_and_calls_it_an_estimate(setting):
    traced = setting
    schedule = forget(traced.graph)
    estimated = estimated_profile(traced)
    profile = scaled(estimated, schedule, 2.5)
    assert profile.source == estimated.source == "estimated"
    assert profile.resident_bytes == estimated.resident_bytes
    assert sum(profile.op_time_s[i] for i in schedule.order) == pytest.approx(2.5)
    ratio = [m / e for m, e in zip(profile.op_time_s, estimated.op_time_s, strict=True)]
    assert max(ratio) == pytest.approx(min(ratio))


def test_resident_bytes_are_never_less_than_the_inputs(setting):
    own = estimated_profile(setting).resident_bytes
    assert estimated_profile(setting, 1).resident_bytes == own
    assert estimated_profile(setting, own + 7).resident_bytes == own + 7


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_every_op_has_its_costs_on_every_platform(setting, platform):
    profile = estimated_profile(replace(setting, target=live(platform, "a device")))
    assert profile.device == "a device"
    assert min(profile.op_time_s) > 0
    assert min(profile.op_workspace_bytes) == 0


def test_products_dominate(setting):
    traced = setting
    times = estimated_profile(traced).op_time_s
    products = sum(times[op.id] for op in traced.graph.ops if op.kind == "dot_general")
    assert 0.3 * sum(times) < products < sum(times)


def test_resident_bytes_are_the_arguments_of_the_compiled_step(setting):
    traced = setting
    used = memory(lower(traced, forget(traced.graph)))
    constants = sum(c.nbytes for c in traced.program.constants)
    assert estimated_profile(traced).resident_bytes == used.argument_bytes + constants


def test_the_prediction_is_near_what_the_compiler_needs(setting):
    traced = setting
    problem = Problem(traced.graph, estimated_profile(traced))
    schedule = forget(
        traced.graph,
        {op.id for op in traced.graph.ops if op.phase == "forward" and op.kind in ("add", "lt")},
    )
    predicted = simulate(problem, schedule).peak_bytes - problem.profile.resident_bytes
    assert 0.75 < memory(lower(traced, schedule)).temp_bytes / predicted < 1.5


def test_a_loop_has_workspace():
    model = models.recurrent()
    traced = trace(model, models.batch(model))
    workspaces = estimated_profile(traced).op_workspace_bytes
    assert any(workspaces[op.id] > 0 for op in traced.graph.ops if op.kind in ("scan", "while"))
