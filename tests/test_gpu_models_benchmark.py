"""The tables of benchmarks/gpu_models.py, and the turns that its processes take."""

import json
import os
import sys
import threading
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(
    not BENCHMARKS.exists(), reason="an installed package has no benchmarks beside it"
)


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("gpu_models", "turns", "rows"):
        sys.modules.pop(name, None)


def jax_row(variant, **more):
    row = {"framework": "jax", "name": "vit", "variant": variant, "batch_size": 4}
    row |= {"resident_mib": 10.0, "peak_mib": 120.0, "step_ms": 20.0, "losses": [1.0, 0.5]}
    return row | more


def test_the_report_says_what_each_step_took(benchmarks, tmp_path, capsys):
    import gpu_models

    plans, out = tmp_path / "plans", tmp_path / "out"
    plans.mkdir()
    out.mkdir()
    made = {"name": "vit", "at": 0.5, "status": "planned", "plain_mib": 100.0}
    made |= {"compiled_mib": 48.0, "limit_mib": 50.0}
    (plans / "made.jsonl").write_text(json.dumps(made) + "\n")
    planned = {"predicted": 58.0, "compiled": 58.0, "measured": 62.0}
    torch_row = {"framework": "torch", "name": "bert", "policy": "float32"}
    bits = {"losses_equal": True, "weights_equal": True, "largest": 0.0}
    rows = (
        {"machine": "a GPU", "date": "2026-01-01"},
        jax_row("plain", own_analysis_mib=101.0),
        jax_row("0.5", planned=planned, overhead=0.03, step_ms=30.0, losses=[1.0, 0.75]),
        jax_row("checkpoint", own_analysis_mib=None),
        {"framework": "jax", "name": "gpt", "variant": "plain", "failed": "not done"},
        jax_row("checkpoint", name="gpt"),
        torch_row | {"step": "bits", "again": bits, "planned": bits},
        torch_row | {"step": "0.5", "predicted_mib": 100.0, "allocated_mib": 110.0,
                     "reserved_mib": 128.0, "ms": 5.0},
        torch_row | {"step": "torch checkpoint", "refused": "no"},
        torch_row | {"peer": "keras.RematScope", "peer_mib": 64.0, "mib": 60.0,
                     "peer_ms": 5.0, "ms": 6.0},
    )  # fmt: skip
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert gpu_models.report(out, plans, check=True) == 1
    table = (out / "report.md").read_text()
    assert (
        "| vit, 4 | plan at 0.5 | 48.0 | 52.0 | +8.3% | 110.0 | 30.0 | 1.50 | 1.03 | 2.5e-01 |"
        in table
    )
    assert "| gpt, 4 | checkpoint |  |  |  | 110.0 | 20.0 |  |  |  |" in table, (
        "no plain to compare"
    )
    assert "| vit, 4 | plain | 100.0 | 101.0 | +1.0% |" in table
    assert "| bert, float32 | planned | equal | equal |" in table
    assert "| bert | keras.RematScope | 64.0 | 60.0 | 5.0 | 6.0 | 1.20 |" in table
    told = capsys.readouterr()
    said = told.out + told.err
    for failure in (
        "vit at 0.5: 52.0 of 50.0 MiB",
        "off by +10.0%",
        "gpt: not done",
        "bert: slower than keras.RematScope",
    ):
        assert failure in said


def test_each_process_has_the_device_alone_once_all_are_ready(benchmarks, tmp_path, monkeypatch):
    import turns

    for name, value in turns.variables(tmp_path / "turns", 2, 60.0).items():
        monkeypatch.setenv(name, value)
    inside, most = [], []

    def run(name):
        with turns.alone(name):
            inside.append(name)
            most.append(len(inside))
            inside.remove(name)

    first = threading.Thread(target=run, args=("a",))
    first.start()
    first.join(0.5)
    assert first.is_alive(), "it waits for the other"
    run("b")
    first.join(10)
    assert most == [1, 1]
    monkeypatch.delenv(turns.VARIABLE)
    turns.ready("c")
    assert not os.path.exists(tmp_path / "turns" / "c.ready")
    with turns.alone("c"):
        pass
