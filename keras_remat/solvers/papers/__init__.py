"""Solvers as they were published."""
