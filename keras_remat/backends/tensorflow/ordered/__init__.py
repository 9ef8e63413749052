"""Steps that TensorFlow's executor runs op by op in a given order."""
