"""What several test files share."""

import gc
import importlib
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import on_tensorflow
import pytest

import keras_remat
from keras_remat.backends.versions import check_card_compiler
from keras_remat.errors import RematError

#: Files of few tests that take long, the longest first: it waits minutes for a process of its own,
#: and XLA compiles the others' steps, or they start processes.
LONGEST = ("test_jax.py", "test_sliced.py", "test_compiled.py", "test_compiled_fit.py")


#: They need Keras on TensorFlow.
collect_ignore = (
    []
    if on_tensorflow.RUNS_HERE
    else [
        "test_allocators.py",
        "test_callback.py",
        "test_doctor.py",
        "test_faults.py",
        "test_memory_cap.py",
        "test_shapes_benchmark.py",
        "backends/tensorflow",
        "backends/test_statistics.py",
        "batch_size/test_step_scaling.py",
        "cards/test_will_it_fit.py",
        "training/test_requests.py",
        "training/test_fit_session.py",
        "training/test_unusual_fits.py",
    ]
)


def pytest_terminal_summary(terminalreporter):
    if collect_ignore:
        left_out = ", ".join(collect_ignore)
        terminalreporter.write_line(f"left out, they need Keras on TensorFlow: {left_out}")


def pytest_collection_modifyitems(items):
    """The files that take longest first, then those with the most tests, so that workers that get
    whole files end at about the same time."""
    tests = Counter(item.path for item in items)
    ranks = {name: at for at, name in enumerate(LONGEST)}

    def place(item):
        return ranks.get(item.path.name, len(ranks)), -tests[item.path], str(item.path)

    items.sort(key=place)


def pytest_collection_finish(session):
    """Asks for statistics before the first test makes a tensor; test files have imported what they
    need by now."""
    if "tensorflow" in sys.modules:
        from keras_remat.backends.tensorflow import private

        if private.has_made_devices():
            raise pytest.UsageError("a test file makes a tensor when it is imported")
        keras_remat.enable_cpu_memory_stats()
        if session.config.getoption("markexpr") != "allocator":
            # One region, as a GPU has it. XLA asks for one buffer and gets a whole chunk. Among
            # regions that other tests made grow, a step's chunk is up to twice its buffer. The
            # lanes of .ci/run for allocators have the growing regions, and their own.
            sys.modules["tensorflow"].raw_ops.Empty(shape=[2**30], dtype="uint8")


@pytest.fixture(scope="session")
def card_compiler():
    """Skips where no card can be compiled for."""
    try:
        check_card_compiler()
    except RematError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def compiler_of_cards(request):
    """A test that is marked so compiles for a card."""
    if request.node.get_closest_marker("card"):
        request.getfixturevalue("card_compiler")


@pytest.fixture(scope="session", autouse=True)
def device():
    """The GPU's stand-in, in one region, in the lane of ``.ci/run`` that asks for it."""
    if os.environ.get("KERAS_REMAT_TESTS_ON") != "gpu_stand_in":
        yield
        return
    import gpu_stand_in

    gpu_stand_in.one_region(gpu_stand_in.limit_bytes() * 3 // 4)
    with gpu_stand_in.gpu():
        yield


@pytest.fixture(autouse=True)
def known_objects():
    """Collects what the test before left, and spares the collector what is there by now.

    Every fit collects garbage, twice, and what a whole run holds would be seconds of that. So
    nothing that was spared is looked at again: it is there for good, in reference cycles, too.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def benchmark_of(monkeypatch):
    """Gives a benchmark's module by its name."""
    folder = Path(__file__).parent.parent / "benchmarks"
    if not folder.exists():
        pytest.skip("an installed package has no benchmarks beside it")
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module


@pytest.fixture
def over_any_limit(monkeypatch):
    """Every batch goes through the rematerialized step: the plain peak, which is 0 bytes of the
    pool if nothing was trained before, is taken as over any limit; plans are made for the limit."""
    monkeypatch.setattr("keras_remat.training.tools.Tools.plain_fits", lambda *_: False)


@pytest.fixture(scope="module")
def models():
    """Small Keras models; skips where Keras does not run on TensorFlow."""
    if not on_tensorflow.RUNS_HERE:
        pytest.skip("needs Keras on TensorFlow")
    keras_remat.enable_cpu_memory_stats()
    import keras_models

    return keras_models


@pytest.fixture
def ctrl_c_is_heard():
    """Listens to Ctrl-C, which a process that a shell began in the background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
