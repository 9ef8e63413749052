"""Random combinations of Keras's features, each trained plainly and with ``RematAutotune``.

``benchmarks/random_fits.py`` trains many of them in one process.
"""

import pytest
from random_fit_checks import PlainFitFails, check
from random_fit_models import ON_JAX
from random_fits import choices

IN_ALL = 100 if ON_JAX else 200


#: The case that has most of all choices: the others are slow tests.
IN_DEFAULT_RUN = max(range(IN_ALL), key=lambda seed: len(choices(seed)))


def test_random_combination_trains_as_plainly(tmp_path):
    check(IN_DEFAULT_RUN, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [at for at in range(IN_ALL) if at != IN_DEFAULT_RUN])
def test_more_random_combinations_train_as_plainly(seed, tmp_path):
    try:
        check(seed, tmp_path)
    except PlainFitFails as error:
        pytest.skip(f"Keras's own fit ends with {error}")
