"""Arguments are refused with their name, what they were, and what is accepted."""

import numpy as np
import pytest

from keras_remat import checks


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (lambda x: checks.check_among("x", x, ("a", None)), ("a", None), ("b", 1)),
        (lambda x: checks.check_name("x", x, ("greedy",)), ("greedy",), ("gredy", 3, None)),
        (lambda x: checks.check_int("x", x, least=1), (1, 10**30), (0, 1.0, "1", None, True)),
        (
            lambda x: checks.check_share("x", x),
            (0, 0.5, np.float32(0.5)),
            (1, -0.1, "0", None, True, float("nan")),
        ),
        (
            lambda x: checks.check_seconds("x", x),
            (1e-9, 3, np.int64(1)),
            (0, "1", None, True, float("inf")),
        ),
    ],
)
def test_what_is_wrong_is_named(check, right, wrong):
    for value in right:
        check(value)
    for value in wrong:
        with pytest.raises((TypeError, ValueError), match=r"\bx\b") as caught:
            check(value)
        assert repr(value) in str(caught.value)
