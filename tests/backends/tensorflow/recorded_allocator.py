"""An allocator in miniature that is recorded as TensorFlow's profiler records one."""

from keras_remat.backends.tensorflow.memory.best_fit import BestFitAllocator, Extent


class RecordedAllocator:
    """An allocator that writes down what TensorFlow's profiler would."""

    def __init__(self, region_bytes=0):
        self.allocator = BestFitAllocator(region_bytes=region_bytes)
        self.events = []

    @property
    def region_bytes(self):
        return self.allocator.bytes_in_use + sum(size for size, _ in self.allocator.free_chunks)

    def allocate(self, nbytes):
        chunk = self.allocator.allocate(nbytes)
        self._write("MemoryAllocation", chunk, nbytes)
        return chunk, nbytes

    def release(self, chunk, nbytes):
        address, size = chunk.address, chunk.size
        self.allocator.release(chunk)
        self._write("MemoryDeallocation", chunk, nbytes, address, size)

    def _write(self, name, chunk, nbytes, address=None, size=None):
        free = [size for size, _ in self.allocator.free_chunks] or [0]
        fragmentation = (sum(free) - max(free)) / sum(free) if sum(free) else 0.0
        said = {
            "addr": chunk.address if address is None else address,
            "requested_bytes": nbytes,
            "allocation_bytes": chunk.size if size is None else size,
            "bytes_allocated": self.allocator.bytes_in_use,
            "fragmentation": float(f"{fragmentation:.6g}"),
        }
        self.events.append((len(self.events), name, said))

    def step(self, sizes, random):
        """Asks for all sizes, and gives each back some requests later."""
        alive = []
        for nbytes in sizes:
            alive.append(self.allocate(nbytes))
            while len(alive) > 6:
                self.release(*alive.pop(random.randrange(len(alive))))
        while alive:
            self.release(*alive.pop())

    @property
    def free(self):
        return sorted(Extent(address, size) for size, address in self.allocator.free_chunks)
