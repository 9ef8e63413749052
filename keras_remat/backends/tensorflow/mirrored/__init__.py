"""Several replicas that train one model under ``tf.distribute.MirroredStrategy``."""
