"""Defines the problem without any framework: graph, profile, schedule, and their results."""
