"""The examples run as a reader would run them; the benchmark reads its command line and reports
what it was given."""

import importlib
import importlib.util
from pathlib import Path

import pytest
from own_process import environment, output_of

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(
    not (ROOT / "examples").exists(), reason="an installed package has no examples beside it"
)


def run(script, *arguments, timeout_s=900):
    variables = environment(KERAS_BACKEND="tensorflow")
    return output_of(ROOT / script, *arguments, env=variables, timeout=timeout_s)


@pytest.fixture
def step_memory(benchmark_of):
    return benchmark_of("step_memory")


@pytest.mark.slow
def test_quickstart_keeps_its_limit_and_says_what_it_recomputed(tmp_path):
    page = tmp_path / "report.html"
    said = run("examples/quickstart.py", "--report", page)
    assert "recomputed" in said
    assert "Who holds the peak" in page.read_text()
    assert ": kept" in said


@pytest.mark.slow
def test_custom_train_step_trains_within_its_limit():
    assert "same losses" in run("examples/custom_train_step.py")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_jax_fit_trains_within_its_limit():
    assert "rematerialized" in run("examples/jax_fit.py")


@pytest.mark.slow
def test_planning_without_training_writes_a_plan(tmp_path):
    run("examples/plan_without_training.py", tmp_path / "plan.json")
    assert (tmp_path / "plan.json").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["lora", "diffusion", "volumes"])
def test_recipes_keep_their_limits(recipe):
    said = run("examples/recipes.py", recipe, timeout_s=3000)
    assert ": kept" in said
    assert "losses          the same" in said


def test_benchmark_help_names_every_model(step_memory):
    said = run("benchmarks/step_memory.py", "--help", timeout_s=60)
    assert all(name in said for name in step_memory.MODELS)


def test_benchmark_defaults(step_memory):
    arguments = step_memory.parser().parse_args([])
    assert arguments.models == step_memory.MODELS
    assert arguments.budgets == ("0.7", "0.5", "smallest")
    assert arguments.steps == 20


@pytest.mark.parametrize(
    "arguments",
    [
        ["--models", "AlexNet"],
        ["--budgets", "half"],
        ["--budgets", "0"],
        ["--budgets", "1.5"],
        ["--steps", "0"],
    ],
)
def test_benchmark_refuses(step_memory, arguments, capsys):
    with pytest.raises(SystemExit) as refusal:
        step_memory.parser().parse_args(arguments)
    assert refusal.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def row(**changes):
    return {
        "budget": "0.5",
        "raised": False,
        "limit_bytes": 1000,
        "predicted_bytes": 900,
        "measured_bytes": 890,
        "fit_peak_bytes": 900,
        "overhead": 0.02,
        "time_ratio": 1.05,
        "equal_weights": True,
        "loss_difference": 1e-6,
        "to_swap_s": 9.0,
        "recomputed": 3,
    } | changes


def result(*rows, **changes):
    return {
        "model": "unet",
        "is_cnn": True,
        "rows": list(rows),
        "plain_peak_bytes": 2000,
        "resident_bytes": 100,
        "floor_bytes": 300,
        "store_all_time_ratio": 1.0,
        "plain_again_difference": 0.0,
        "planner_rss_bytes": 5 * 2**20,
    } | changes


def test_benchmark_accepts_what_holds(step_memory):
    assert step_memory.failed_bounds([result(row())]) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"measured_bytes": 1001, "predicted_bytes": 1000}, "over the limit"),
        ({"predicted_bytes": 790}, "more than 10%"),
        ({"equal_weights": False}, "weights differ"),
        ({"loss_difference": 1e-3}, "loss differs"),
        ({"time_ratio": 1.3}, "CNNs at 0.5: 1.300"),
        ({"error": "ScheduleNotFoundError: none"}, "ScheduleNotFoundError"),
    ],
)
def test_benchmark_names_the_bound_that_fails(step_memory, changes, said):
    assert any(said in failure for failure in step_memory.failed_bounds([result(row(**changes))]))


def test_benchmark_demands_more_of_predictions_on_torch(step_memory):
    off = [result(row(predicted_bytes=859))]
    assert step_memory.failed_bounds(off) == ["median prediction error 3.5%, more than 2.0%"]
    said = step_memory.failed_bounds(off, "torch")
    assert [one.rpartition("more than ")[2] for one in said] == ["3%", "0.5%"]


def test_benchmark_goes_on_with_the_models_that_a_file_has(step_memory, tmp_path, monkeypatch):
    ran = []

    def measured(name, options, timeout_s):
        ran.append(name)
        return result(row(), model=name)

    monkeypatch.setattr(step_memory, "run_case", measured)
    numbers, table = tmp_path / "rows.json", tmp_path / "table.md"
    for models in ("vae", "unet,vae"):
        step_memory.main(["--models", models, "--json", str(numbers), "--output", str(table)])
    assert ran == ["vae", "unet"]
    assert "| vae |" in table.read_text()
    assert "| unet |" in table.read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"store_all_time_ratio": 1.2}, "store-all: 1.200"),
        ({"planner_rss_bytes": 3 * 2**30}, "planner took"),
        ({"model": "ResNet50", "rows": [row(to_swap_s=31.0)]}, "more than 30"),
    ],
)
def test_benchmark_names_the_bound_a_model_fails(step_memory, changes, said):
    assert any(said in failure for failure in step_memory.failed_bounds([result(row()) | changes]))


def test_a_failed_model_is_a_row_and_hides_no_other(step_memory):
    results = [{"model": "vae", "error": "exit status -9: killed | by the kernel"}, result(row())]
    lines = step_memory.table(results).splitlines()
    assert "killed" in lines[2]
    assert "unet" in lines[3]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert any("vae" in failure for failure in step_memory.failed_bounds(results))


def test_a_crashing_child_comes_back_as_an_error(step_memory, monkeypatch):
    """What is raised for a real one, ``test_max_batch_benchmark`` shows."""

    def crashes(*words, **options):
        raise step_memory.Failed("KeyError: 'no such model'")

    monkeypatch.setattr(step_memory, "row_of", crashes)
    outcome = step_memory.run_case("no such model", {"backend": "tensorflow"}, 300.0)
    assert outcome == {"model": "no such model", "error": "KeyError: 'no such model'"}
