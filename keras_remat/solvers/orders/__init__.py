"""Rates, repairs, shortens and coarsens orders for the solvers."""
