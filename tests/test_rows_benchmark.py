"""How far two runs are apart is told where one has no number, too; no run shows another's rows."""

from math import inf, nan

import pytest


def test_losses_that_are_no_number_are_infinitely_far_apart(benchmark_of):
    difference = benchmark_of("rows").difference
    assert difference([1.0, 2.0], [1.0, 2.5]) == 0.25
    assert difference([1.0, 2.0], [1.0, nan]) == difference([nan, 2.0], [1.0, 2.0]) == inf


def test_a_run_goes_on_with_its_rows_and_not_with_those_of_other_settings(benchmark_of, tmp_path):
    rows, path = benchmark_of("rows"), tmp_path / "run.json"
    settings = {"batch": 8, "solvers": ("auto",)}
    assert rows.rows_of_run(None, settings) == rows.rows_of_run(path, settings) == []
    rows.write_run(path, "a machine", settings, [{"model": "unet"}])
    assert rows.rows_of_run(path, settings) == [{"model": "unet"}]
    with pytest.raises(SystemExit, match="rows of other settings"):
        rows.rows_of_run(path, settings | {"batch": 16})
