"""Measures, probes and replays TensorFlow's allocators."""
