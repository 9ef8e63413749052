"""Computes lower bounds that no schedule beats."""
