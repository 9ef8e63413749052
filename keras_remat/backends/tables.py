"""Reads tables of the names of frameworks' operations.

A file of its own, though short: every backend has such tables.
"""


def names(text: str) -> frozenset[str]:
    """Returns the names in a text, separated by blanks and line ends."""
    return frozenset(text.split())
