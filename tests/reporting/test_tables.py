"""The table of what is kept and recomputed adds up and leaves out what says nothing."""

import pytest

from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.reporting import tables

CHAIN = Problem(chain_example(), Profile((1.0, 2.0, 3.0, 4.0, 5.0), (0,) * 5, 0), 8, "chain")
RECOMPUTE_A = Schedule((0, 1, 2, 3, 0, 4))


def test_summary_by_layer_adds_up():
    assert tables.summary_text(CHAIN, RECOMPUTE_A).splitlines() == [
        "layer     kept  recomputed  saved  added",
        "----------------------------------------",
        "a          0 B  1 of 1 op     4 B    1 s",
        "b          1 B  -               -      -",
        "c          6 B  -               -      -",
        "----------------------------------------",
        "5 layers   7 B  1 of 5 ops    4 B    1 s",
        "left out: 2 layers that keep next to nothing and run once",
    ]


def test_summary_refuses_another_grouping():
    with pytest.raises(ValueError, match="'layer', 'op', 'block'; got 'phase'"):
        tables.summary_text(CHAIN, RECOMPUTE_A, "phase")


def test_an_interactive_session_shows_a_text_as_it_reads():
    assert repr(tables.Text("two\nlines")) == "two\nlines"
