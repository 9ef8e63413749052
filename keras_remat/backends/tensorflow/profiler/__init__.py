"""Records training steps with TensorFlow's profiler, and names the device."""
