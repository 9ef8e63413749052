"""What XLA says of a compiled step's heap: its size, and what lies in it at what time."""

import re
from collections import defaultdict

from keras_remat.backends.xla.packing import Buffer

_RANGE = re.compile(r"^\s+(\S+?\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
_VALUE = re.compile(r" value: <(\d+) (\S+?)(\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\)")


def alive(buffers, n):
    """Returns the bytes of buffers at each of n positions."""
    return [sum(one.nbytes for one in buffers if one.first <= k <= one.last) for k in range(n)]


def heap_and_buffers(written):
    """Returns the bytes of the heap, and its buffers. A buffer begins and ends at events that are
    counted as XLA counts them: at every instruction first what begins and then what ends, each in
    the order of XLA's ids. A value that lies where another one ends took over its buffer.

    Args:
        written: the folder in which XLA wrote a step down.
    """
    (live,) = written.glob("*gpu_after_optimizations-live-range.txt")
    (assigned,) = written.glob("*gpu_after_optimizations-buffer-assignment.txt")
    ranges = {m[1]: (int(m[2]), int(m[3])) for m in _RANGE.finditer(live.read_text())}
    (heap,) = re.findall(
        r"^allocation \d+: size (\d+), [^\n]*preallocated-temp[^\n]*\n((?: value.*\n)*)",
        assigned.read_text(), re.MULTILINE,
    )  # fmt: skip
    values = [
        (*ranges[m[2] + (m[3] or "{}")], int(m[1]), int(m[4]), int(m[5]))
        for m in _VALUE.finditer(heap[1])
        if int(m[4])
    ]
    places, buffers = defaultdict(list), []
    for first, last, number, nbytes, offset in sorted(values):
        before = next((b for b in places[offset] if b[-1][1] == first > b[-1][0]), None)
        if before is None:
            before = []
            places[offset].append(before)
            buffers.append(before)
        before.append((first, last, number, nbytes))
    events = sorted(
        event
        for at, buffer in enumerate(buffers)
        for k, (first, last, number, _) in enumerate(buffer)
        for event in ((first, 0, number, at, k), (last, 1, number, at, k))
    )
    ticks = defaultdict(list)
    for tick, (_, is_end, _, at, k) in enumerate(events):
        ticks[at].append((k, is_end, tick))
    spans = []
    for of in (sorted(ticks[at]) for at in range(len(buffers))):
        (_, _, first), (_, _, first_ends), *_ = of
        spans.append((first, of[-1][-1], first_ends))
    sizes = [max(value[3] for value in buffer) for buffer in buffers]
    return int(heap[0]), [Buffer(n, *span) for n, span in zip(sizes, spans, strict=True)]
