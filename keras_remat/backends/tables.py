"""Tables of what frameworks call their operations; apart, because every backend has some."""


def names(text: str) -> frozenset[str]:
    """Returns the names in a text, which blanks and line ends separate."""
    return frozenset(text.split())
