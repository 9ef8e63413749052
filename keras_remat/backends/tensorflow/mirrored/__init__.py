"""Trains one model on several replicas under ``tf.distribute.MirroredStrategy``."""
