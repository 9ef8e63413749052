"""Keras on JAX: trace the trainer's step, plan what XLA will put into memory, run the plan as one compiled step.

The five verbs are ``trace.trace``, ``profile.profile``, ``lower.lower``, ``measure.measure`` and ``swap.restore``;
``fit_budget.compile_within`` joins them to a solver, and ``swap.swap`` puts the result into ``fit``. Imports JAX and Keras, never
TensorFlow, and no solver.
"""
