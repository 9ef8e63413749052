"""What a person reads: the right numbers, on one line each, escaped, and pages that load
nothing."""

import html.parser
import random
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from random_problems import mixed_problem
from random_schedules import random_schedule

from keras_remat.core.graph import Graph, Op, Value, chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.simulate import live_bytes, simulate
from keras_remat.errors import InvalidScheduleError
from keras_remat.reporting import text as show

CHAIN = Problem(
    chain_example(),
    Profile((1.0, 2.0, 3.0, 4.0, 5.0), (0,) * 5, 0, "estimated", "CPU:0"),
    8,
    "chain",
)
STORE_ALL, RECOMPUTE_A = Schedule(range(5)), Schedule((0, 1, 2, 3, 0, 4))
NASTY = "<script>alert(1)</script>&\"'\x1b[31m\n\ud800]]>"


def named(name):
    """A problem whose every name is ``name``."""
    ops = tuple(Op(i, name, name, (i - 1,) if i else (), (i,)) for i in range(2))
    graph = Graph(ops, tuple(Value(i, name, 4, (1,), name, i) for i in range(2)), (1,))
    return Problem(graph, Profile((1.0, 1.0), (0, 0), 3, device=name), 20, name)


def test_problem_text_says_the_numbers():
    lines = show.problem_text(CHAIN).splitlines()
    assert lines[0] == "chain: 5 ops (5 forward), 5 values, 1 output"
    assert "costs      estimated on CPU:0" in lines
    assert "store-all  peak 11 B at position 2 of 5, op c; time 15 s" in lines
    assert "floor      7 B, set by op c" in lines
    assert "budget     8 B, 72.7 % of the store-all peak" in lines
    assert lines[lines.index("largest values") + 1 :][:2] == ["  6 B  c", "  4 B  a"]
    assert lines[lines.index("slowest ops") + 1 :][:2] == ["  5 s  e", "  4 s  d"]


def test_problem_text_without_a_budget_below_the_floor_and_empty():
    assert "budget     none" in show.problem_text(CHAIN.with_budget(None))
    assert "below the floor: infeasible" in show.problem_text(CHAIN.with_budget(6))
    empty = show.problem_text(Problem(Graph((), (), ()), Profile((), (), 0)))
    assert empty.splitlines()[0] == "problem: 0 ops, 0 values, 0 outputs"
    assert "slowest" not in empty


def test_problem_text_counts_phases_and_fixed_ops():
    ops = (
        Op(0, "f", "K", (), (), "forward"),
        Op(1, "b", "K", (), (), "backward"),
        Op(2, "u", "K", (), (), "update", False),
    )
    text = show.problem_text(Problem(Graph(ops, (), ()), Profile((0.0,) * 3, (0,) * 3, 5)))
    assert "3 ops (1 forward, 1 backward, 1 update)" in text
    assert "1 ops are not recomputable" in text


def test_top_limits_the_lists():
    assert (
        len(show.problem_text(CHAIN, top=1).splitlines())
        == len(show.problem_text(CHAIN, top=3).splitlines()) - 4
    )


def test_recomputed_text_groups_by_kind_and_op():
    ops = tuple(Op(i, f"op{i}", "Relu" if i < 2 else "Conv", (), (i,)) for i in range(3))
    graph = Graph(ops, tuple(Value(i, "v", 1, producer=i) for i in range(3)), (0, 1, 2))
    problem = Problem(graph, Profile((1.0, 1.0, 5.0), (0,) * 3, 0))
    assert show.recomputed_text(problem, Schedule((0, 0, 0, 1, 1, 2, 2))).splitlines() == [
        "recomputed 3 of 3 ops, 4 extra runs, 8 s",
        "by kind",
        "  Conv  1 run   5 s",
        "  Relu  3 runs  3 s",
        "by op",
        "  op2 (Conv)  1 run   5 s",
        "  op0 (Relu)  2 runs  2 s",
        "  op1 (Relu)  1 run   1 s",
    ]
    assert show.recomputed_text(problem, Schedule((0, 1, 2))) == "recomputed nothing"


def solution(schedule, *, bound=None):
    return Solution(schedule, "greedy", "feasible", 0.5, bound, simulate(CHAIN, schedule))


def test_plan_text_compares_predicted_with_measured():
    text = show.plan_text(
        solution(RECOMPUTE_A, bound=12.0),
        budget_bytes=8,
        store_all=Usage(15.0, 11),
        predicted=Usage(16.0, 7),
        measured=Usage(18.0, 8),
        problem=CHAIN,
    )
    assert "solver  greedy, feasible, in 500 ms, gap to the proved bound 25 %" in text
    rows = {
        line.split()[0]: line.split()[1:]
        for line in text.splitlines()
        if line.startswith(("store", "predicted ", "measured"))
    }
    assert rows["store-all"] == ["11", "B", "138", "%", "15", "s", "-"]
    assert rows["measured"] == ["8", "B", "100", "%", "18", "s", "20", "%"]
    assert "predicted  7 B   87.5 %     16 s  6.67 %" in text
    assert "predicted peak is 12.5 % below the measured one" in text
    assert "recomputed 1 of 5 ops, 1 extra run, 1 s" in text


def test_plan_text_before_measuring_and_without_the_problem():
    text = show.plan_text(
        solution(RECOMPUTE_A), budget_bytes=8, store_all=Usage(15.0, 11), predicted=Usage(16.0, 7)
    )
    assert "not measured yet" in text
    assert "gap" not in text
    assert text.endswith("recomputed 1 ops")
    text = show.plan_text(
        solution(STORE_ALL), budget_bytes=11, store_all=Usage(0.0, 11), predicted=Usage(0.0, 11)
    )
    assert text.endswith("recomputed nothing")


@pytest.mark.parametrize("name", [NASTY, "x" * 1000, "", "模型/conv", "a\r\nb\tc\u2028d\u202e"])
def test_names_stay_on_their_line(name):
    problem = named(name)
    again = Schedule((0, 0, 1))
    plain = len(show.problem_text(named("n")).splitlines())
    text = show.problem_text(problem)
    assert len(text.splitlines()) == plain
    assert all(len(line) < 300 for line in text.splitlines())
    for out in (
        text,
        show.recomputed_text(problem, again),
        show.schedule_html(problem, {name: again}),
    ):
        out.encode("utf-8")
        assert not re.search(r"[\x00-\x09\x0b-\x1f\u2028\u202e]", out)


class Page(html.parser.HTMLParser):
    """Tags, attributes and text of a page; checks that tags close in order."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], "", []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, key, value) for key, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, key, value) for key, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_page_is_self_contained_and_shows_the_numbers():
    source = show.schedule_html(
        CHAIN, {"store-all": STORE_ALL, "auto": RECOMPUTE_A}, title="My model"
    )
    page = Page(source)
    assert source.startswith("<!doctype html>")
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(page.tags)
    assert not {key for _, key, _ in page.attributes} & {
        "src",
        "href",
        "xlink:href",
        "srcset",
        "data",
    }
    assert "://" not in source
    assert "url(" not in source
    assert "@import" not in source
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert "prefers-color-scheme:dark" in source
    for text in (
        "My model",
        "11 B (over the budget)",
        "budget 8 B",
        "floor 7 B",
        "6.67 %",
        "auto: what is recomputed",
        "store-all peak",
    ):
        assert text in page.text
    assert "store-all: what is recomputed" not in page.text


def test_page_escapes_names():
    source = show.schedule_html(named(NASTY), {NASTY: Schedule((0, 0, 1))}, title=NASTY)
    page = Page(source)
    assert "script" not in page.tags
    assert "<script" not in source.lower()
    assert "<script>alert(1)</script>&\"'\\x1b[31m\\n\\ud800]]>" in page.text


def svg_of(source):
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", source, re.S)[0])


def curve_heights(path):
    """The heights a step path visits, in order."""
    return [float(number) for number in re.findall(r"(?:V|M[\d.]+ )([\d.]+)", path)]


def test_curve_is_the_simulators():
    svg = svg_of(show.schedule_html(CHAIN, {"auto": RECOMPUTE_A}))
    (line,) = [path for path in svg.iter("path") if path.get("class") == "line"]
    heights = curve_heights(line.get("d"))
    live = live_bytes(CHAIN, RECOMPUTE_A).tolist()
    distinct = [live[0], *(b for a, b in pairwise(live) if a != b)]
    (budget,) = [element for element in svg.iter("line") if element.get("class") == "budget"]
    zero = max(float(element.get("y1")) for element in svg.iter("line"))
    scale = (zero - float(budget.get("y1"))) / 8
    assert [(zero - height) / scale for height in heights] == pytest.approx(distinct, abs=0.01)


def test_long_orders_are_thinned_at_their_highest():
    n = 10 * show.MAX_POINTS
    ops = tuple(Op(i, f"o{i}", "K", (), (i,)) for i in range(n))
    sizes = [1] * n
    sizes[n // 2] = 1000
    graph = Graph(ops, tuple(Value(i, "v", sizes[i], producer=i) for i in range(n)), (n - 1,))
    problem = Problem(graph, Profile((1.0,) * n, (0,) * n, 0), 1000)
    source = show.schedule_html(problem, {"all": Schedule(range(n))})
    svg = svg_of(source)
    (line,) = [path for path in svg.iter("path") if path.get("class") == "line"]
    (budget,) = [element for element in svg.iter("line") if element.get("class") == "budget"]
    assert min(curve_heights(line.get("d"))) == pytest.approx(float(budget.get("y1")), abs=0.11)
    assert len(source) < 50_000


def test_pages_of_random_problems_are_well_formed():
    for seed in range(50):
        problem = mixed_problem(seed)
        schedules = {
            "a": Schedule.store_all(problem.graph),
            "b": random_schedule(random.Random(seed), problem.graph),
        }
        source = show.schedule_html(problem, schedules)
        Page(source)
        assert (
            len([path for path in svg_of(source).iter("path") if path.get("class") == "line"]) == 2
        )


def test_page_of_an_empty_problem():
    source = show.schedule_html(
        Problem(Graph((), (), ()), Profile((), (), 0)), {"store-all": Schedule(())}
    )
    Page(source)
    assert list(svg_of(source).iter("path")) == []


def test_page_refuses_nothing_and_illegal_schedules():
    with pytest.raises(ValueError, match="schedules is empty"):
        show.schedule_html(CHAIN, {})
    with pytest.raises(InvalidScheduleError, match="S2"):
        show.schedule_html(CHAIN, {"broken": Schedule((0,))})


@pytest.mark.parametrize("span", [1, 2, 3, 5, 7, 10, 99, 353, 15_000, 1.9, 0.7])
def test_ticks_are_few_and_round(span):
    step = show._nice_step(span, 6)
    assert span / step <= 6 + 1e-6
    assert f"{step:e}"[0] in "125"
    assert span / step > 2


@pytest.mark.parametrize("highest", [1, 7, 1023, 1024, 10**6, 38 * 2**30, 3 * 2**40])
def test_byte_ticks_start_at_zero_and_stay_inside(highest):
    ticks = show._byte_ticks(highest)
    assert ticks[0][0] == 0
    assert all(nbytes <= highest for nbytes, _ in ticks)
    assert 2 <= len(ticks) <= 8
    assert len({label for _, label in ticks}) == len(ticks)
