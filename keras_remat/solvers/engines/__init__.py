"""The mathematical programming engines behind exact solvers."""
