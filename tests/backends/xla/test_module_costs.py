"""What a compiled module takes, kernel by kernel."""

import pytest

from keras_remat.backends.xla.module_costs import costs
from keras_remat.cards.table import card

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


def test_a_module_is_counted_kernel_by_kernel():
    found = costs(MODULE, card("H100").rates)
    convolution, product = 2 * (8 * 64 * 64 * 64) * (3 * 3 * 32), 2 * 64 * 16 * 256
    assert found.flops == convolution + product + 10 * 256
    image, kernel, result = 8 * 64 * 64 * 32 * 4, 64 * 3 * 3 * 32 * 4, 8 * 64 * 64 * 64 * 4
    rows = 2 * 256 * 4 + 4  # of the loop's body: a slice is read and written, and its index read
    matrices = (64 * 256 + 256 * 16 + 64 * 16) * 4
    assert found.bytes_moved == image + kernel + result + 10 * rows + matrices
    assert found.time_s > found.bytes_moved * card("H100").rates.seconds_per_byte


def test_an_element_of_a_tuple_may_be_read_without_an_instruction_that_takes_it():
    """As JAX 0.11.2's XLA writes it down."""
    taken = "  %y = f32[64,256]{1,0} get-tuple-element(%loop), index=1\n"
    read = MODULE.replace(taken, "").replace("dot(%y, %w)", "dot(%loop#1, %w)")
    assert read.count("#1") == 1
    assert costs(read, card("H100").rates) == costs(MODULE, card("H100").rates)


CONVOLUTION = """HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[8,64,64,32], k: f32[64,3,3,32], g: f32[8,64,64,64]) -> f32[1] {{
  %image = f32[8,64,64,32]{{3,2,1,0}} parameter(0)
  %kernel = f32[64,3,3,32]{{3,2,1,0}} parameter(1)
  %gradient = f32[8,64,64,64]{{3,2,1,0}} parameter(2)
  ROOT %conv = ({result}{{3,2,1,0}}, u8[0]{{0}}) custom-call({read}), \
window={{size=3x3 pad=1_1x1_1}}, dim_labels=b01f_o01i->b01f, \
custom_call_target="__cudnn$conv{target}"
}}
"""


@pytest.mark.parametrize(
    ("target", "read", "result"),
    [
        ("Forward", "%image, %kernel", "f32[8,64,64,64]"),
        ("BackwardInput", "%gradient, %kernel", "f32[8,64,64,32]"),
        ("BackwardFilter", "%image, %gradient", "f32[64,3,3,32]"),
    ],
)
def test_the_gradients_of_a_convolution_compute_as_much_as_it_does(target, read, result):
    found = costs(CONVOLUTION.format(target=target, read=read, result=result), card("H100").rates)
    assert found.flops == 2 * (8 * 64 * 64 * 64) * (3 * 3 * 32)


TRIGGER = """HloModule jit_step, is_scheduled=true

%fused (p0: f32[64,256], p1: f32[64,256], p2: f32[256]) -> pred[1,1] {
  %p0 = f32[64,256]{1,0} parameter(0)
  %p1 = f32[64,256]{1,0} parameter(1)
  %p2 = f32[256]{0} parameter(2)
  %spread = f32[64,256]{1,0} broadcast(%p2), dimensions={1}
  %both = f32[128,256]{1,0} concatenate(%p0, %p1), dimensions={0}
  %cut = f32[64,256]{1,0} slice(%both), slice={[0:64], [0:256]}
  %sum = f32[64,256]{1,0} add(%cut, %spread)
  %one = f32[1,1]{1,0} slice(%sum), slice={[0:1], [0:1]}
  ROOT %never = pred[1,1]{1,0} compare(%one, %one), direction=NE
}

ENTRY %main (a: f32[64,256], b: f32[64,256], c: f32[256]) -> pred[1,1] {
  %a = f32[64,256]{1,0} parameter(0)
  %b = f32[64,256]{1,0} parameter(1)
  %c = f32[256]{0} parameter(2)
  ROOT %trigger = pred[1,1]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%fused
}
"""


def test_a_kernel_computes_and_reads_only_what_its_results_are_made_of():
    """An element of a sum is one of each of its operands, however large those are."""
    found = costs(TRIGGER, card("H100").rates)
    assert found.bytes_moved <= 8 * 4 + 1
    assert found.flops <= 4
