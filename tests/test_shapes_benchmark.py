"""Texts of many lengths in one ``fit``: within the limit, with few orders, and plain's losses."""

import gc
import importlib
import random
from pathlib import Path

import keras
import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks").exists(), reason="an installed package has no benchmarks beside it"
)

pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("these tests need Keras on TensorFlow", allow_module_level=True)

from keras_remat.backends.tensorflow.memory.measure import TensorFlowDevice  # noqa: E402

#: Events of plans that are made.
PLANNED = {"risk", "shape", "swap", "tighten"}


@pytest.fixture
def shapes(monkeypatch):
    if not TensorFlowDevice().has_statistics:
        pytest.skip("the allocator keeps no statistics")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("shapes")


def check(shapes, lengths, epochs, share):
    gc.collect()
    before = TensorFlowDevice().in_use_bytes()  # of other tests
    plain = shapes.fit(lengths, epochs, None)
    limit = before + int(share * (max(map(max, plain.watch.peaks.values())) - before))
    family = shapes.fit(lengths, epochs, limit)
    assert {n: max(peaks) for n, peaks in family.watch.peaks.items() if max(peaks) > limit} == {}
    assert family.watch.losses == pytest.approx(plain.watch.losses, abs=1e-4)
    assert 1 <= len(set(family.orders.values())) <= 4
    late = [e for e in family.events if e.kind in PLANNED and e.step >= len(lengths)]
    assert late == [], "planned after the first epoch"
    return family


def test_a_few_lengths_train_within_the_limit(shapes, monkeypatch):
    monkeypatch.setattr(shapes, "SOLVE_S", 2.0)
    lengths = [96, 384, 128, 384, 320, 384, 96, 352, 320, 352]
    family = check(shapes, lengths, 2, 0.6)
    assert 384 in family.orders
    assert 96 not in family.orders


@pytest.mark.slow
def test_bucketed_lengths_from_32_to_512_train_within_the_limit(shapes):
    lengths = [*range(32, 513, 32)] * 4
    random.Random(0).shuffle(lengths)
    check(shapes, lengths, 3, 0.5)
