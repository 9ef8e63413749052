"""Plans that are given, and plans that are kept in a folder, on a backend without a framework."""

from dataclasses import replace

import pytest
from fake_backend import FakeBackend, batch_of, chain_problem, event_kinds, quick_plan
from fake_fit import PLAIN, SIZE, TIGHT, driven, options, train

from keras_remat.core.writing import Writing
from keras_remat.errors import PlanMismatchError
from keras_remat.planning.plan import load_plan


def plan_for(size, budget=TIGHT, backend=None):
    return quick_plan(chain_problem(size), budget, backend)


def test_users_plan_runs_from_the_first_batch_and_is_measured():
    plan = replace(plan_for(SIZE), writing=Writing.LOOSE)
    backend = FakeBackend()
    trainer, report = driven(backend, options(plan=plan))
    train(trainer, 4)
    assert backend.writings == [Writing.LOOSE]
    assert [what for what, _ in backend.ran] == [plan.solution.schedule] * 4
    assert trainer.settled
    assert trainer.plan.measured is not None
    assert "risk" not in event_kinds(report)


def test_users_plan_is_for_the_first_shape_only():
    backend = FakeBackend()
    trainer, _ = driven(backend, options(limit=PLAIN, plan=plan_for(SIZE)))
    train(trainer, 4)
    trainer.begin_shape()
    trainer.run(batch_of(0, SIZE // 2))
    assert backend.ran[-1][0] == "plain"


def test_users_plan_for_another_graph_is_refused():
    backend = FakeBackend()
    trainer, _ = driven(backend, options(plan=plan_for(SIZE + 1, PLAIN)))
    with pytest.raises(PlanMismatchError):
        trainer.run(batch_of(0, SIZE))
    assert backend.ran == []


def test_measured_plan_is_cached_and_found_again(tmp_path, monkeypatch):
    cache = tmp_path / "plans"
    trainer, _ = driven(FakeBackend(), options(cache_dir=cache))
    train(trainer, 10)
    (path,) = cache.iterdir()
    assert load_plan(path).measured == trainer.plan.measured
    backend = FakeBackend()
    monkeypatch.setattr("keras_remat.planning.request.within_budget", None)
    again, report = driven(backend, options(cache_dir=cache))
    train(again, 5)
    assert event_kinds(report)[:2] == ["risk", "cache"]
    assert {what for what, _ in backend.ran} == {trainer.plan.solution.schedule}
    assert again.settled


def test_plan_that_did_not_hold_its_limit_is_not_cached(tmp_path):
    trainer, _ = driven(
        FakeBackend(surplus_bytes=lambda what, size: TIGHT), options(cache_dir=tmp_path)
    )
    train(trainer, 12)
    assert trainer.settled
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "broken",
    [lambda text: "{", lambda text: text.replace('"peak_bytes": ', '"peak_bytes": -')],
    ids=["no JSON", "numbers that cannot be"],
)
def test_broken_cache_file_is_planned_anew_and_replaced(tmp_path, broken):
    trainer, _ = driven(FakeBackend(), options(cache_dir=tmp_path))
    train(trainer, 10)
    (path,) = tmp_path.iterdir()
    path.write_text(broken(path.read_text()))
    trainer, report = driven(FakeBackend(), options(cache_dir=tmp_path))
    train(trainer, 10)
    assert "cannot be used" in next(e.message for e in report.events if e.kind == "cache")
    assert trainer.settled
    assert load_plan(path).solution.schedule == trainer.plan.solution.schedule


def test_cache_that_cannot_be_written_is_warned_of_once(tmp_path):
    (tmp_path / "file").write_text("")
    backend = FakeBackend()
    trainer, report = driven(backend, options(cache_dir=tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be kept") as warned:
        train(trainer, 10)
    assert len(warned) == 1
    for _ in range(10):  # another shape's plan cannot be kept either
        trainer.run(batch_of(0, SIZE - 5))
    assert event_kinds(report).count("cache") == 1
    assert trainer.settled


@pytest.mark.parametrize(
    ("device", "way", "other"),
    [
        ("GPU:0", "ordered", {}),
        ("CPU:0", "compiled", {}),
        ("CPU:0", "ordered", {"seed": 1}),
        ("CPU:0", "ordered", {"solver": "chen"}),
        ("CPU:0", "ordered", {"solver_time_limit_s": 7.0}),
    ],
)
def test_a_cached_plan_is_for_its_device_and_options(tmp_path, device, way, other):
    trainer, _ = driven(FakeBackend(), options(cache_dir=tmp_path))
    train(trainer, 10)
    backend = FakeBackend(device_name=device)
    backend.compilation = way
    again, report = driven(backend, options(cache_dir=tmp_path, **other))
    train(again, 1)
    assert "cache" not in event_kinds(report)
