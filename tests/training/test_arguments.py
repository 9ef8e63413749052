"""Arguments are refused with what is accepted, the nearest name first."""

import pytest

from keras_remat.reporting.fit_report import AutotuneReport
from keras_remat.training.arguments import checked_options

GIVEN = {
    "memory_limit": "8GiB",
    "batch_size": "max",
    "solver": "auto",
    "solver_time_limit_s": 30,
    "profile_steps": 3,
    "margin": 0,
    "learning_rate_scaling": None,
    "micro_batches": None,
    "plan": None,
    "cache_dir": None,
    "seed": 0,
    "compilation": "auto",
}


def test_arguments_come_back_in_one_record():
    options = checked_options(**GIVEN | {"batch_size": 64, "learning_rate_scaling": "sqrt"})
    assert (options.batch_size, options.learning_rate_scaling) == (64, "sqrt")
    assert (options.solver_time_limit_s, options.margin) == (30.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"solver": "gredy"}, ValueError, "did you mean 'greedy'"),
        ({"solver": 3}, TypeError, "solver"),
        ({"solver": "magic"}, ValueError, "greedy"),
        ({"solver": ["greedy"]}, TypeError, "solver"),
        ({"solver_time_limit_s": 0}, ValueError, "solver_time_limit_s"),
        (
            {"solver_time_limit_s": float("inf")},
            ValueError,
            "solver_time_limit_s must be positive and finite",
        ),
        ({"profile_steps": 0}, ValueError, "profile_steps"),
        ({"profile_steps": 1.5}, TypeError, "profile_steps"),
        ({"memory_limit": 8}, ValueError, 'did you mean "8GiB"'),
        ({"memory_limit": "8Gb"}, ValueError, "GiB"),
        ({"memory_limit": "lots"}, ValueError, "GiB"),
        ({"memory_limit": -1}, ValueError, "positive"),
        ({"memory_limit": 0}, ValueError, "positive"),
        ({"memory_limit": float("nan")}, ValueError, "finite"),
        ({"memory_limit": "120%"}, ValueError, "100%"),
        ({"memory_limit": "0%"}, ValueError, "0%"),
        ({"memory_limit": True}, TypeError, "GiB"),
        ({"memory_limit": 1.5}, TypeError, "float"),
        ({"memory_limit": [1]}, TypeError, "list"),
        ({"plan": AutotuneReport()}, TypeError, "give its .plan"),
        ({"plan": 3}, TypeError, "a path or a Plan"),
        ({"cache_dir": "plans\0"}, ValueError, "null character"),
        ({"cache_dir": 5}, TypeError, "cache_dir"),
        ({"cache_dir": AutotuneReport()}, TypeError, "cache_dir must be a path, got a report"),
        ({"plan": "no such file.json"}, OSError, "no such file"),
        ({"batch_size": "largest"}, ValueError, "'max', 'fastest', 'keep', a positive int"),
        ({"batch_size": 0}, ValueError, "at least 1"),
        ({"batch_size": -3}, ValueError, "at least 1"),
        ({"batch_size": True}, TypeError, "int"),
        ({"batch_size": 2.0}, TypeError, "int"),
        ({"batch_size": None}, TypeError, "1, or one of 'max', 'fastest', 'keep'; got None"),
        ({"margin": 1}, ValueError, "below 1"),
        ({"margin": -0.1}, ValueError, "margin"),
        ({"margin": float("nan")}, ValueError, "margin"),
        ({"margin": "5%"}, TypeError, "margin"),
        ({"learning_rate_scaling": "cubic"}, ValueError, "sqrt"),
        ({"seed": -1}, ValueError, "at least 0"),
        ({"micro_batches": 0}, ValueError, "at least 1"),
        ({"compilation": "compile"}, ValueError, "did you mean 'compiled'"),
    ],
)
def test_wrong_arguments(arguments, error, says):
    with pytest.raises(error, match=says):
        checked_options(**GIVEN | arguments)


def test_what_processes_share_is_told_by_name_and_has_no_limit():
    shared, other = (checked_options(**GIVEN | {"seed": seed}).shared for seed in (0, 1))
    assert [name for name in shared if shared[name] != other[name]] == ["seed"]
    assert "memory_limit" not in shared
    assert {"solver", "margin", "batch_size", "compilation"} <= set(shared)
