"""Reads tables of what frameworks call their operations.

A file of its own, though short: every backend has such tables.
"""


def names(text: str) -> frozenset[str]:
    """Returns the names in a text, which blanks and line ends separate."""
    return frozenset(text.split())
