"""Limits for a process in which other tests hold bytes, too."""

import keras_remat
from keras_remat.training.arguments import FitOptions


def with_margin(usable_bytes):
    """The limit that leaves ``usable_bytes`` after the margin, which is a share of *all* bytes:
    what other tests hold would take from the room that a test means."""
    return int(usable_bytes / (1 - FitOptions.margin)) + 1


def tight_bytes(backend, model, data, batch_size, share):
    """What is resident, and ``share`` of what the plain step of the first ``batch_size`` samples is
    predicted to add to it."""
    batch = backend.example_batch(model, tuple(part[:batch_size] for part in data))
    traced = backend.trace(model, batch)
    profile = backend.estimated_profile(traced, backend.device.in_use_bytes())
    problem = keras_remat.Problem(traced.graph, profile)
    peak = backend.memory.peak_bytes(problem, keras_remat.Schedule.store_all(traced.graph))
    return profile.resident_bytes + share * (peak - profile.resident_bytes)


def tight_limit(backend, model, data, batch_size, share):
    """The limit that leaves :func:`tight_bytes` after the margin."""
    return with_margin(tight_bytes(backend, model, data, batch_size, share))
