"""Turns a problem and a budget into a plan."""
