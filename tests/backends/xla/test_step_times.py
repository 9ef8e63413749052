"""A profile's sum is measured over whole steps."""

from types import SimpleNamespace

import pytest
from fake_backend import chain_graph, profile_of

from keras_remat.backends.xla.step_times import StepTimes
from keras_remat.core.schedule import Schedule


def test_a_recording_scales_the_estimate_to_the_median_of_its_steps():
    graph = chain_graph(4)
    times = StepTimes(lambda traced, resident_bytes: profile_of(traced, "estimated"))
    step = SimpleNamespace(traced=graph, schedule=Schedule.store_all(graph))
    assert times.stop(step, None) is None, "none was started"
    times.start()
    assert times.stop(step, None) is None, "no step ran"
    times.start()
    times.times_s += [9.0, 2.0, 1.0]
    assert sum(times.stop(step, None).op_time_s) == pytest.approx(2.0)
    assert times.times_s is None
