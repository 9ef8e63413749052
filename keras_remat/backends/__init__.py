"""Keras and one framework each: what a train step computes, what it costs, and a train step that
runs an order."""
