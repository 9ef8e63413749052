"""Numba is imported only where moves are made, and solving goes on without it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from random_problems import chain_problem

from keras_remat.solvers import solve
from keras_remat.solvers.engines import cp_sat, native


def run(code: str) -> int:
    """Runs Python code in a fresh process and returns its exit status."""
    return subprocess.run([sys.executable, "-c", code], check=False).returncode


def test_numba_is_not_imported_before_it_is_needed() -> None:
    modules = "keras_remat, keras_remat.solvers.auto, keras_remat.solvers.search.nearby"
    assert run(f"import sys, {modules}; sys.exit('numba' in sys.modules)") == 0


#: What a process runs first, so that Numba is not there, or cannot keep what it compiles.
WITHOUT = {
    "numba": "import sys; sys.modules['numba'] = None\n",
    "a folder for it": (
        "import numba.core.caching as caching\n"
        "for kind in list(vars(caching).values()):\n"
        "    if hasattr(kind, '_locator_classes'):\n"
        "        kind._locator_classes = []\n"
    ),
}


@pytest.mark.parametrize("lacking", WITHOUT.values(), ids=WITHOUT)
def test_without_numba_the_moves_are_python(lacking: str) -> None:
    code = (
        f"{lacking}import sys\n"
        "from keras_remat.core.graph import chain_example\n"
        "from keras_remat.core.problem import Problem\n"
        "from keras_remat.core.profile import Profile\n"
        "from keras_remat.solvers.engines import native\n"
        "from keras_remat.solvers import SOLVERS\n"
        f"native.WARM_UP = {lacking!r} + native.WARM_UP\n"
        "problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), budget_bytes=7)\n"
        "order = SOLVERS['anneal'](problem, time_limit_s=0.3).schedule.order\n"
        "sys.exit(order != (0, 1, 2, 3, 0, 4) or native.is_compiled(20.0))\n"
    )
    assert run(code) == 0


def test_an_interrupt_of_the_caller_does_not_end_the_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "WARM_UP", "import time; time.sleep(60)")
    native.begin.cache_clear()
    process = native.begin()
    assert process is not None
    try:
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    finally:
        process.kill()
        process.wait()
        native.begin.cache_clear()


@pytest.mark.parametrize("executable", ["", None, "/no/python"])
def test_without_an_interpreter_to_start_the_moves_are_python(
    executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    native.begin.cache_clear()
    assert not native.is_compiled(1.0)
    monkeypatch.setattr(cp_sat, "available", lambda: True)
    with pytest.raises(cp_sat.CpSatProcessError, match="did not start"):
        cp_sat.Worker()
    assert solve(chain_problem(12).with_budget(9), time_limit_s=0.5).usage is not None
    native.begin.cache_clear()


def test_without_a_temporary_folder_there_is_no_process_of_cp_sat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/no/folder")
    monkeypatch.setattr(cp_sat, "available", lambda: True)
    with pytest.raises(cp_sat.CpSatProcessError, match="no temporary file"):
        cp_sat.Worker()


def test_a_process_that_cannot_compile_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "WARM_UP", "raise RuntimeError('no locator available')")
    native.begin.cache_clear()
    assert not native.is_compiled(20.0)
    native.begin.cache_clear()
