"""Finds how large a batch can be."""
