"""What TensorFlow's allocators do: measured, probed and replayed."""
