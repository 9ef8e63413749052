"""Keras on JAX: trace the trainer's step, plan what XLA will put into memory, run the plan as one compiled step."""
