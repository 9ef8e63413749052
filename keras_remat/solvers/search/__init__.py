"""Solvers of our own: greedy, backward, annealing, intervals."""
