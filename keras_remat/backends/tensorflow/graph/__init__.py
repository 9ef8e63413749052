"""Turns a Keras train step into a graph of TensorFlow ops."""
