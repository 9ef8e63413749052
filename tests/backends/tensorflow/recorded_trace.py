"""A recording of TensorFlow's profiler, written by hand."""

from keras_remat.backends.tensorflow.private import read_trace


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
