"""The benchmark of cards demands what it says."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks").exists(), reason="an installed package has no benchmarks beside it"
)
MIB = 2**20


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


ROW = {
    "name": "unet", "card": "T4", "framework": "jax", "at": 0.5, "status": "kept",
    "limit_bytes": 90 * MIB, "floor_bytes": 40 * MIB, "predicted_bytes": 88 * MIB,
    "compiled_bytes": 89 * MIB, "compilations": 1, "overhead": 0.04,
}  # fmt: skip
PEER = {
    "name": "unet", "card": "T4", "batch_size": 4, "peer": "XLA's own pass", "status": "compiled",
    "plain_flops": 4.0, "plain_moved": 4, "plain_s": 1.0, "peer_bytes": MIB, "peer_flops": 6.0,
    "peer_moved": 6, "peer_s": 1.5, "ours": "kept", "ours_bytes": MIB, "ours_flops": 5.0,
    "ours_moved": 5, "ours_s": 1.25,
}  # fmt: skip


def test_what_falls_short_is_told(module):
    cards = module("cards")
    assert cards.failures([ROW]) == []
    (late,) = cards.failures([ROW | {"compilations": 4}])
    assert "4 compilations" in late
    told = cards.failures([ROW, ROW | {"at": 0.35, "status": "not found"}])
    assert told == ["unet on T4 at 0.35: not found"]
    below = {"at": 0.35, "status": "below the floor", "floor_bytes": 99 * MIB}
    assert cards.failures([ROW, ROW | below]) == []


def test_peers_at_equal_bytes(module):
    cards = module("cards")
    assert cards.peer_failures([PEER, PEER | {"ours": "not found"}]) == []
    (more,) = cards.peer_failures([PEER | {"ours_moved": 9}])
    assert more == "unet on T4: 50% more bytes moved than XLA's own pass"
    assert "| 1.50 | 1.50 | 1.50 | 1.0 | 1.25 | 1.25 | 1.25 |" in cards.peer_line(PEER)
