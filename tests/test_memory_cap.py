"""A hard cap on a process's memory, set by the operating system: plain ``fit`` dies in it, the same
``fit`` with the callback does not."""

import json
import subprocess
import sys

import pytest
from own_process import TESTS, search_path

resource = pytest.importorskip("resource")  # POSIX
if not sys.platform.startswith("linux"):
    pytest.skip("the address space is read from /proc", allow_module_level=True)

#: ``fit`` of a wide MLP; the cap, in bytes above what the framework has mapped after one small
#: ``fit``, is the first argument (0: none).
SCRIPT = """
import json, os, resource, sys
import keras, keras_models, keras_remat, keras_remat.callback, keras_remat.backends.tensorflow

def mapped():
    return int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")

room, with_callback = int(sys.argv[1]), sys.argv[2] == "remat"
small, data = keras_models.mlp(64, width=8)
small.fit(*data, verbose=0)
model, data = keras_models.mlp(2 * 8192, width=512, blocks=12, dropout=0.0)
before = mapped()
if room:
    resource.setrlimit(resource.RLIMIT_AS, (before + room, before + room))
remat = keras_remat.RematAutotune(
    batch_size="keep", solver="greedy", solver_time_limit_s=5.0, profile_steps=1, verbose=0
)
callbacks = [remat] if with_callback else []
history = model.fit(
    *data, batch_size=8192, epochs=3, shuffle=False, verbose=0, callbacks=callbacks
).history
plan = remat.plan
print(json.dumps({
    "loss": history["loss"], "grown": mapped() - before, "limit": remat.report.limit_bytes,
    "peak": None if plan is None or plan.measured is None else plan.measured.peak_bytes,
    "recomputed": 0 if plan is None else len(plan.solution.schedule.recomputed),
}))
"""


def run(room, how):
    """The finished process, and what it printed, if it got that far."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(room), how],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={
            "PATH": "",
            "PYTHONPATH": search_path(TESTS, TESTS.parent),
            "KERAS_BACKEND": "tensorflow",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
    )
    return done, json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


@pytest.mark.slow
def test_fit_that_dies_under_a_memory_cap_trains_with_the_callback():
    _, free = run(0, "plain")
    cap = int(0.65 * free["grown"])
    plain, _ = run(cap, "plain")
    assert plain.returncode != 0, "the cap has to be one that plain fit does not survive"
    remat, result = run(cap, "remat")
    assert remat.returncode == 0, remat.stderr[-2000:]
    assert result["loss"] == pytest.approx(free["loss"], rel=1e-5)
    assert result["recomputed"] > 0
    assert result["peak"] <= result["limit"] < cap
