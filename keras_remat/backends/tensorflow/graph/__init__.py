"""From a Keras train step to a graph of TensorFlow ops."""
