"""The benchmark of cards demands what it says, and counts what a compiled module takes."""

import importlib
from pathlib import Path

import pytest

from keras_remat.cards.table import card

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks").exists(), reason="an installed package has no benchmarks beside it"
)
MIB = 2**20
MODULE = """HloModule jit_step, is_scheduled=true

%fused (p0: f32[64,256], p1: s32[]) -> f32[64,256] {
  %p0 = f32[64,256]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %part = f32[1,256]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,256}
  %row = f32[1,256]{1,0} tanh(%part)
  %whole = f32[64,256]{1,0} parameter(2)
  ROOT %put = f32[64,256]{1,0} dynamic-update-slice(%whole, %row, %p1, %p1)
}

%body (t: (s32[], f32[64,256])) -> (s32[], f32[64,256]) {
  %t = (s32[], f32[64,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[64,256]{1,0} get-tuple-element(%t), index=1
  %next = f32[64,256]{1,0} fusion(%x, %i, %x), kind=kLoop, calls=%fused
  ROOT %out = (s32[], f32[64,256]{1,0}) tuple(%i, %next)
}

ENTRY %main (a: f32[8,64,64,32], k: f32[64,3,3,32], w: f32[256,16]) -> f32[64,16] {
  %a = f32[8,64,64,32]{3,2,1,0} parameter(0)
  %k = f32[64,3,3,32]{3,2,1,0} parameter(1)
  %w = f32[256,16]{1,0} parameter(2)
  %conv = (f32[8,64,64,64]{3,2,1,0}, u8[0]{0}) custom-call(%a, %k), \
window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %start = (s32[], f32[64,256]{1,0}) tuple(%i0, %x0)
  %i0 = s32[] constant(0)
  %x0 = f32[64,256]{1,0} constant({...})
  %loop = (s32[], f32[64,256]{1,0}) while(%start), \
condition=%c, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  %y = f32[64,256]{1,0} get-tuple-element(%loop), index=1
  ROOT %product = f32[64,16]{1,0} dot(%y, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_a_module_is_counted_kernel_by_kernel(module):
    found = module("hlo_costs").costs(MODULE, card("H100").rates)
    convolution, product = 2 * (8 * 64 * 64 * 64) * (3 * 3 * 32), 2 * 64 * 16 * 256
    assert found.flops == convolution + product + 10 * 256
    image, kernel, result = 8 * 64 * 64 * 32 * 4, 64 * 3 * 3 * 32 * 4, 8 * 64 * 64 * 64 * 4
    rows = 2 * 256 * 4 + 4  # of the loop's body: a slice is read and written, and its index read
    matrices = (64 * 256 + 256 * 16 + 64 * 16) * 4
    assert found.bytes_moved == image + kernel + result + 10 * rows + matrices
    assert found.time_s > found.bytes_moved * card("H100").rates.seconds_per_byte


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
