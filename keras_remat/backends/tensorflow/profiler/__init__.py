"""What TensorFlow's profiler records of training steps, and on which device."""
