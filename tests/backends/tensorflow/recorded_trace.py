"""A recording of TensorFlow's profiler, written by hand, and the step that it is of."""

from types import SimpleNamespace

import gpu_stand_in
import keras_models

from keras_remat.backends.tensorflow import backend
from keras_remat.backends.tensorflow.private import read_trace
from keras_remat.backends.tensorflow.profiler.recorder import Recording
from keras_remat.core.schedule import Schedule


class Trace:
    """Writes an XPlane; times in microseconds."""

    def __init__(self, offset_us=0):
        self.space = read_trace(b"")
        self.plane = self.space.planes.add(name="/host:CPU")
        self.line = self.plane.lines.add(timestamp_ns=offset_us * 1000)
        self._names, self._stats = {}, {}

    def _name(self, name):
        at = self._names.setdefault(name, len(self._names) + 1)
        self.plane.event_metadata[at].name = name
        return at

    def _stat(self, name):
        at = self._stats.setdefault(name, len(self._stats) + 1)
        self.plane.stat_metadata[at].name = name
        return at

    def event(self, name, start_us, duration_us=0, /, **stats):
        event = self.line.events.add(
            metadata_id=self._name(name),
            offset_ps=int(start_us * 1e6),
            duration_ps=int(duration_us * 1e6),
        )
        for key, value in stats.items():
            stat = event.stats.add(metadata_id=self._stat(key))
            if isinstance(value, int):
                stat.uint64_value = value
            else:
                stat.ref_value = self._stat(value)

    def allocate(self, op, at_us, address, nbytes, region="temp"):
        chunk = nbytes + 768  # what the pool had
        self.event(
            "MemoryAllocation",
            at_us,
            tf_op=op,
            addr=address,
            requested_bytes=nbytes,
            allocation_bytes=chunk,
            region_type=region,
        )

    def free(self, at_us, address):
        self.event("MemoryDeallocation", at_us, addr=address)


def traced_of(model, batch):
    """The step of a batch, or of a batch size."""
    ordered = backend()
    return ordered.trace(model, ordered.example_batch(model, batch))


def mlp_step():
    """A step of 32 samples through one dense layer of 16 x 64 and one of 64 x 1: model, batch, and
    what was traced."""
    model, batch = keras_models.mlp(32, width=64, blocks=1, dropout=0)
    return model, batch, traced_of(model, batch)


def recorded(*traces, kernels=(), errors=()):
    """What the profiler would return."""
    return Recording((*(trace.plane for trace in traces), *kernels), tuple(errors))


def lowered_with(traced, order=None):
    """What :func:`measured_profile` reads of a lowered step: node names at positions, a repeated op
    under a name of its own."""
    schedule = Schedule.store_all(traced.graph) if order is None else Schedule(order)
    names, seen = [], {}
    for op_id in schedule.order:
        copies = seen[op_id] = seen.get(op_id, -1) + 1
        suffix = f"/remat_{copies}" if copies else ""
        names.append(
            tuple(name + suffix for name in traced.node_names[traced.graph.ops[op_id].name])
        )
    return SimpleNamespace(names=names, schedule=schedule, traced=traced)


def full_trace(lowered, duration_us=7, **options):
    trace = Trace(**options)
    for at, (name, *_) in enumerate(lowered.names):
        trace.event(f"{name}:Kind", at * 10, duration_us)
    return trace


def kernels_of(lowered, seconds, **options):
    """A device plane with one kernel per node, ``seconds(position)`` long."""
    ops = lowered.traced.graph.ops
    named = {
        f"{name}:{ops[op_id].kind}": seconds(at)
        for at, (names, op_id) in enumerate(zip(lowered.names, lowered.schedule.order, strict=True))
        for name in names[:1]
    }
    return gpu_stand_in.device_plane(named, **options)
