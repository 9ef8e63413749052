"""Pages show the right numbers, load nothing, escape every name, and are well formed."""

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
from keras_remat.planning.plan import Plan
from keras_remat.reporting import curves, pictures
from keras_remat.reporting import html as page
from keras_remat.reporting.chart import round_numbers
from keras_remat.reporting.fit_report import AutotuneReport, EpochUsage, Event
from keras_remat.reporting.svg import draw
from keras_remat.reporting.text import epoch_rows, plan_text

CHAIN = Problem(
    chain_example(), Profile((1.0, 2.0, 3.0, 4.0, 5.0), (0,) * 5, 1, device="CPU:0"), 9, "chain"
)
RECOMPUTE_A = Schedule((0, 1, 2, 3, 0, 4))
NASTY = "<script>alert(1)</script>&\"'\x1b[31m\n\ud800]]>"


def plan_of(problem, schedule, measured=None):
    usage, store_all = (simulate(problem, s) for s in (schedule, Schedule.store_all(problem.graph)))
    return Plan(
        problem.graph.fingerprint,
        problem.budget_bytes or max(1, usage.peak_bytes),
        Solution(schedule, "greedy", "feasible", 0.5, None, usage),
        store_all,
        usage,
        measured,
        device=problem.profile.device,
        name=problem.name,
        problem=problem,
    )


def report_of(plan, *, limit=9, peak=8, message="swapped"):
    return AutotuneReport(
        limit_bytes=limit,
        batch_size=4,
        baseline=plan.store_all,
        baseline_batch_size=4,
        baseline_source="predicted",
        epochs=[EpochUsage(0, 8, 2, 4.0, 0.5, 12, 4), EpochUsage(1, 8, 2, 4.0, 0.0, peak, 4)],
        events=[Event(3, "swap", message)],
        plan=plan,
    )


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


def assert_self_contained(source):
    found = Page(source)
    assert source.startswith("<!doctype html>")
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(found.tags)
    outside = {"src", "href", "xlink:href", "srcset", "data"}
    assert not {key for _, key, _ in found.attributes} & outside
    assert not any(key.startswith("on") for _, key, _ in found.attributes)
    for reference in ("://", "url(", "@import"):
        assert reference not in source
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in found.attributes
    assert ("meta", "content", "width=device-width,initial-scale=1") in found.attributes
    assert "prefers-color-scheme:dark" in source
    assert "max-width:560px" in source
    return found


def test_page_of_a_fit_holds_what_a_reader_asks():
    source = page.report_page(report_of(plan_of(CHAIN, RECOMPUTE_A, Usage(16.0, 8))))
    found = assert_self_contained(source)
    for text in (
        "Training chain within a memory limit",
        "limit kept: 9 B",
        "plain step, predicted",
        "12 B",  # the plain peak
        "speed of plain, last epoch",
        "Memory of one step",
        "Who holds the peak",
        "What is in memory when",
        "Epochs",
        "By layer",
        "1 of 1 op",
        "step 3",
        "swapped",
        "CPU:0",
        "Python",
        "keras-remat",
    ):
        assert text in found.text
    assert "measured peak 8 B" in found.text
    assert "while a runs" in found.text  # on hover


def test_a_peak_of_0_is_that_of_a_device_without_statistics():
    plan = plan_of(CHAIN, RECOMPUTE_A, Usage(16.0, 0))
    source = page.plan_page(plan)
    assert "peak predicted" in source
    assert "measured peak" not in source
    for text in (str(plan), plan_text(plan), Page(source).text):
        assert " 0 B" not in text
    assert plan.known_peak == (plan.predicted.peak_bytes, "predicted")


def test_page_of_a_fit_that_ends_over_its_limit_says_so():
    source = page.report_page(report_of(plan_of(CHAIN, RECOMPUTE_A, Usage(16.0, 8)), limit=7))
    assert "LIMIT NOT KEPT: 7 B" in Page(source).text
    assert 'class="tile bad"' in source


def test_page_of_a_fit_says_where_peaks_are_predicted():
    report = report_of(plan_of(CHAIN, RECOMPUTE_A))
    report.baseline_source = "measured"
    report.events.append(Event(0, "predicted", "The allocator keeps no statistics."))
    source = page.report_page(report)
    tiles = re.findall('<div class="tile .*?<span>(.*?)</span>', source)
    assert tiles[:2] == ["predicted peak, limit kept: 9 B", "plain step, predicted"]
    assert "measured" not in " ".join(tiles)


def test_page_of_a_fit_without_a_plan_or_epochs():
    assert_self_contained(page.report_page(AutotuneReport()))
    report = AutotuneReport(epochs=[EpochUsage(0, 8, 2, 0.0, 0.0, 0, 4)])
    assert_self_contained(page.report_page(report))


def test_page_of_a_plan_and_of_a_problem():
    found = assert_self_contained(page.plan_page(plan_of(CHAIN, RECOMPUTE_A)))
    for text in ("Plan of a training step of chain", "budget 9 B", "6.67 %", "not known"):
        assert text in found.text
    found = assert_self_contained(page.problem_page(CHAIN))
    assert "floor      8 B" in found.text


def test_notebooks_get_a_part_of_a_page():
    source = plan_of(CHAIN, RECOMPUTE_A)._repr_html_()
    assert "<body" not in source
    assert "<svg" in source
    assert "<svg" in report_of(plan_of(CHAIN, RECOMPUTE_A))._repr_html_()
    Page(source)


def test_pages_escape_names():
    ops = tuple(Op(i, NASTY, NASTY, (i - 1,) if i else (), (i,)) for i in range(2))
    graph = Graph(ops, tuple(Value(i, NASTY, 4, (1,), NASTY, i) for i in range(2)), (1,))
    problem = Problem(graph, Profile((1.0, 1.0), (0, 0), 3, device=NASTY), 20, NASTY)
    plan = plan_of(problem, Schedule((0, 0, 1)))
    for source in (
        page.plan_page(plan),
        page.report_page(report_of(plan, message=NASTY)),
        page.problem_page(problem),
    ):
        found = assert_self_contained(source)
        assert "<script" not in source.lower()
        assert "<script>alert(1)</script>&\"'\\x1b[31m\\n\\ud800]]>" in found.text
        source.encode("utf-8")


def drawn_in(source):
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", source, re.S)]


def curve(picture, name):
    (path,) = [p for p in picture.iter("path") if p.get("class") == f"line {name}"]
    return path.get("d")


def test_curve_is_the_simulators():
    picture = drawn_in(page.plan_page(plan_of(CHAIN, RECOMPUTE_A)))[0]
    heights = [float(n) for n in re.findall(r"(?:V|M[\d.]+ )([\d.]+)", curve(picture, "plan"))]
    live = live_bytes(CHAIN, RECOMPUTE_A).tolist()
    distinct = [live[0], *(b for a, b in pairwise(live) if a != b)]
    (budget,) = [line for line in picture.iter("line") if line.get("class") == "rule limit"]
    zero = max(float(line.get("y1")) for line in picture.iter("line"))
    scale = (zero - float(budget.get("y1"))) / 9
    assert [(zero - height) / scale for height in heights] == pytest.approx(distinct, abs=0.01)


def test_long_orders_are_thinned_at_their_highest():
    n = 10 * pictures.MAX_POINTS
    ops = tuple(Op(i, f"o{i}", "K", (), (i,)) for i in range(n))
    sizes = [1000 if i == n // 2 else 1 for i in range(n)]
    graph = Graph(ops, tuple(Value(i, "v", sizes[i], producer=i) for i in range(n)), (n - 1,))
    problem = Problem(graph, Profile((1.0,) * n, (0,) * n, 0))
    plain = curves.Curve(problem, Schedule(range(n)))
    source = draw(pictures.memory({"plain": plain}, ("limit", 1000)))
    picture = ElementTree.fromstring(source)
    (limit,) = [line for line in picture.iter("line") if line.get("class") == "rule limit"]
    heights = [float(n) for n in re.findall(r"V([\d.]+)", curve(picture, "plain"))]
    assert min(heights) == pytest.approx(float(limit.get("y1")), abs=0.11)
    assert len(source) < 60_000


def test_layers_are_read_once_per_curve_and_not_for_every_column(monkeypatch):
    read = []
    monkeypatch.setattr(curves, "group_names", lambda *asked: read.append(asked) or list("abcde"))
    source = page.problem_page(CHAIN)
    assert len(re.findall('class="hover"', source)) == 5
    assert len(read) == 1


@pytest.mark.parametrize("seed", range(20))
def test_pages_of_random_problems_are_well_formed(seed):
    problem = mixed_problem(seed)
    schedule = random_schedule(random.Random(seed), problem.graph)
    source = page.plan_page(plan_of(problem, schedule))
    Page(source)
    for picture in drawn_in(source):
        assert picture.tag.endswith("svg")


def test_page_of_an_empty_problem():
    empty = Problem(Graph((), (), ()), Profile((), (), 0))
    assert_self_contained(page.problem_page(empty))
    assert_self_contained(page.plan_page(plan_of(empty, Schedule(()))))


@pytest.mark.parametrize("highest", [1, 2, 3, 5, 7, 10, 99, 353, 15_000, 1.9, 0.7])
def test_ticks_are_few_and_round(highest):
    ticks = round_numbers(highest)
    assert ticks[0] == 0
    assert 3 <= len(ticks) <= 6
    assert ticks[-1] <= highest * (1 + 1e-6)
    assert f"{ticks[1]:e}"[0] in "125"


def test_a_message_full_of_unprintable_characters_is_not_shortened():
    message = "".join(f"\x1b[{n}mword{n}\x1b[0m\U000e0001" for n in range(40))
    source = page.report_page(report_of(plan_of(CHAIN, RECOMPUTE_A), message=message))
    assert all(f"word{n}" in source for n in range(40))
    assert "…" not in source


def test_page_and_text_have_the_same_row_for_an_epoch():
    report = report_of(plan_of(CHAIN, RECOMPUTE_A))
    source = page.report_page(report)
    (row,) = [line for line in str(report).splitlines() if line.startswith("    1 ")]
    cells = "1", "4", "2.00", "7.50x", "8 B", "4 s", "0 s"
    assert re.split("  +", row.strip()) == list(cells)
    assert "".join(f"<td>{cell}</td>" for cell in cells) in source


def test_an_epoch_whose_peak_nobody_knows_has_a_dash():
    assert epoch_rows(report_of(plan_of(CHAIN, RECOMPUTE_A), peak=0))[-1][4] == "-"


def test_an_epoch_that_keras_s_own_step_trained_has_no_rates():
    report = AutotuneReport(epochs=[EpochUsage(0, 0, 0, 1e-4, 0.5, 0, 4)])
    assert epoch_rows(report)[-1] == ["0", "4", "-", "-", "-", "-", "500 ms"]


def test_epochs_are_numbered_as_keras_counts_them():
    report = report_of(plan_of(CHAIN, RECOMPUTE_A))
    report.epochs = [EpochUsage(5, 8, 2, 4.0, 0.5, 12, 4), EpochUsage(6, 8, 2, 4.0, 0.0, 8, 4)]
    titles = re.findall(r"<title>epoch (\d+):", page.report_page(report))
    assert titles == ["5", "6"] * 2, "of speed and of memory"
