"""Holds the engines behind solvers: mathematical programming, and compiled inner loops."""
