"""The public names: resolved on first use, never hidden by a submodule, no framework loaded."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest
from own_process import output_of, search_path

import keras_remat
from keras_remat import cli
from keras_remat.cards.breakdown import PARTS
from keras_remat.cards.report import EXIT_STATUS
from keras_remat.reporting.fit_report import LOG_KEYS

PACKAGE = Path(keras_remat.__file__)
EXPECTED = {
    "RematAutotune",
    "make_plan",
    "Plan",
    "load_plan",
    "enable_cpu_memory_stats",
    "find_max_batch_size",
    "BatchSearch",
    "will_it_fit",
    "CardReport",
    "CardRow",
    "AutotuneReport",
    "solve",
    "SOLVERS",
    "load_problem",
    "save_problem",
    "simulate",
    "validate",
    "Graph",
    "Op",
    "Value",
    "Profile",
    "Problem",
    "Schedule",
    "Solution",
    "Usage",
    "RematError",
    "InvalidScheduleError",
    "InvalidProblemError",
    "InfeasibleBudgetError",
    "ScheduleNotFoundError",
    "PlanMismatchError",
    "PeakExceededError",
    "UnsupportedModelError",
    "MissingPackageError",
    "__version__",
}


#: Name → its first parameters, which may be given by position, and those that are given by name.
#: Others may follow.
SIGNATURES = {
    "RematAutotune": (
        "memory_limit=None, batch_size='max'",
        "solver='auto', solver_time_limit_s=30.0, profile_steps=3, margin=0.05, "
        "learning_rate_scaling=None, micro_batches=None, plan=None, cache_dir=None, "
        "report_path=None, seed=0, compilation='auto', verbose='auto'",
    ),
    "make_plan": (
        "model, batch, memory_limit=None",
        "card=None, solver='auto', profile=None, compilation='auto'",
    ),
    "find_max_batch_size": (
        "model, batch, memory_limit=None",
        "card=None, max_overhead='forward', profile=None, compilation='auto'",
    ),
    "will_it_fit": ("model, batch=None, cards=('T4', 'A100-40')", "batch_size=None"),
    "solve": ("problem", "solver='auto', time_limit_s=30.0, seed=0"),
    "simulate": ("problem, schedule", ""),
    "validate": ("problem, schedule", ""),
    "load_problem": ("path", ""),
    "save_problem": ("problem, path", ""),
    "load_plan": ("path", ""),
    "enable_cpu_memory_stats": ("", ""),
}
#: Record → fields that it has, and those that may be given by position, in their order.
RECORDS = {
    "Graph": ("ops, values, outputs", 3),
    "Op": ("id, name, kind, inputs, outputs, phase, recomputable, after, may_reuse", 9),
    "Value": ("id, name, nbytes, shape, dtype, producer", 6),
    "Profile": (
        "op_time_s, op_workspace_bytes, resident_bytes, source, device, backend", 6,
    ),
    "Problem": ("graph, profile, budget_bytes, name", 4),
    "Schedule": ("order", 1),
    "Solution": ("schedule, solver, status, solve_time_s, lower_bound_s", 5),
    "Usage": ("time_s, peak_bytes", 2),
    "Plan": (
        "fingerprint, budget_bytes, solution, store_all, predicted, compiled, measured, card", 5,
    ),
    "CardReport": ("batch_size, rows", 0),
    "CardRow": (
        "card, usable_bytes, plain_bytes, verdict, smallest_bytes, overhead, max_batch_plain, "
        "max_batch_planned, samples_per_s_plain, samples_per_s_planned, parts", 0,
    ),
    "AutotuneReport": (
        "limit_bytes, max_batch_size, batch_size, baseline, epochs, events, plan", 0,
    ),
}  # fmt: skip
#: Command → options that it has.
COMMANDS = {
    "solve": "--budget --solver --time-limit --seed --output",
    "plan": "--batch-size --memory-limit --output",
    "max-batch": "--memory-limit",
    "show": "--html",
    "will-it-fit": "--batch-size --card --json",
    "doctor": "",
}


def run(code):
    """Runs ``code`` in a fresh interpreter and returns what it prints."""
    path = search_path(PACKAGE.parent.parent)
    return output_of("-c", code, env={"PYTHONPATH": path, "PATH": ""}).strip()


def test_all_is_the_fixed_list():
    assert set(keras_remat.__all__) == EXPECTED
    assert len(keras_remat.__all__) == len(EXPECTED)
    assert set(dir(keras_remat)) >= EXPECTED


@pytest.mark.parametrize("name", sorted(EXPECTED - {"__version__"}))
def test_every_name_resolves_to_its_module(name):
    module_name = f"keras_remat.{keras_remat._MODULE_OF[name]}"
    resolved = getattr(keras_remat, name)
    assert resolved is getattr(importlib.import_module(module_name), name)
    assert getattr(resolved, "__module__", module_name) == module_name
    assert getattr(keras_remat, name) is resolved


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_fixed_ones(name):
    positional, named = SIGNATURES[name]
    parameters = inspect.signature(getattr(keras_remat, name)).parameters.values()
    shown = [str(one.replace(annotation=one.empty)).replace(" = ", "=") for one in parameters]
    by_place = [one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters]
    first = [one for one, is_first in zip(shown, by_place, strict=True) if is_first]
    assert ", ".join(first) == positional
    assert set(named.split(", ")) - {""} <= set(shown) - set(first)


@pytest.mark.parametrize("name", RECORDS)
def test_records_have_the_fixed_fields(name):
    wanted, positional = RECORDS[name]
    fields = dataclasses.fields(getattr(keras_remat, name))
    assert set(wanted.split(", ")) <= {one.name for one in fields}
    first = [one.name for one in fields if not one.kw_only][:positional]
    assert first == wanted.split(", ")[:positional]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_the_fixed_options(command):
    parsers = cli._parser()._subparsers._group_actions[0].choices
    assert set(COMMANDS[command].split()) <= set(parsers[command]._option_string_actions)


def test_verdicts_parts_statuses_and_log_keys_are_the_fixed_ones():
    statuses = cli.DONE, cli.WRONG_USE, cli.INFEASIBLE, cli.NOT_FOUND
    assert statuses == (0, 2, 3, 4)
    assert EXIT_STATUS == {"fits": 0, "fits with a plan": 5, "does not fit": 3}
    assert set(PARTS) == {"weights", "slots", "gradients", "batch", "activations", "workspace"}
    assert (
        tuple(f"remat_{key}" for key in ("speedup", "batch_size", "peak_gib", "samples_per_s"))
        == LOG_KEYS
    )


def test_type_checkers_see_the_same_names_from_the_same_modules():
    seen = {}
    for node in ast.walk(ast.parse(PACKAGE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras_remat."):
            seen |= {alias.name: node.module.removeprefix("keras_remat.") for alias in node.names}
    assert seen == keras_remat._MODULE_OF


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = keras_remat.nothing
    with pytest.raises(ImportError):
        exec("from keras_remat import nothing")


def test_import_loads_no_framework_and_no_numpy():
    heavy = [
        "tensorflow",
        "jax",
        "keras",
        "torch",
        "scipy",
        "numpy",
        "ortools",
        "tqdm",
        "matplotlib",
    ]
    assert run(f"import sys, keras_remat; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_import_loads_none_of_its_modules():
    assert (
        run(
            "import sys, keras_remat; print([m for m in sys.modules if "
            "m.startswith('keras_remat.')])"
        )
        == "[]"
    )


def test_the_core_loads_no_framework():
    code = (
        "import sys, keras_remat as k; k.solve, k.SOLVERS, k.simulate, k.validate, "
        "k.load_problem, k.RematError; "
        "print([m for m in ['tensorflow', 'jax', 'keras', 'torch', 'scipy'] if m in sys.modules])"
    )
    assert run(code) == "[]"


def test_the_functions_simulate_and_validate_are_public():
    code = (
        "import keras_remat.core.simulate, keras_remat.core.validate, keras_remat as k; "
        "print(k.simulate.__name__, k.validate.__name__)"
    )
    assert run(code) == "simulate validate"


def test_version_is_a_release_number():
    assert [part.isdigit() for part in keras_remat.__version__.split(".")] == [True] * 3


def test_the_package_is_marked_as_typed():
    assert (PACKAGE.parent / "py.typed").exists()
