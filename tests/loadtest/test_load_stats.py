"""A load test's numbers, by hand-made answers: latencies, rates, goodput, steps, exit code and page."""

import json
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest

import load_page
import load_report
from load_link import Answer
from load_options import plan_of
from load_plots import Plot, Series, svg, thinned, ticks
from load_session import Plan
from load_slo import EXIT_MISSED, Slo, exit_code
from load_stats import NOT_SENT, Histogram, Record, Tally, gaps, percentiles, record
from load_timeline import Moment, growth, rates, series

SLO = Slo(ttft_ms=500, tpot_ms=100)


def answer(
    begin: float, first: float, gap: float, tokens: int, error: tuple[str, str] | None = None, each: int = 1
) -> Answer:
    times = tuple(begin + first + index * gap for index in range(tokens // each))
    return Answer(begin, times[-1] if times else begin + first, times, 10, tokens, error)


def test_the_times_of_a_request() -> None:
    got = answer(100.0, 0.4, 0.05, 5)
    closed = record("grpc", "chat", None, got, SLO)
    assert (closed.ttft_s, closed.tpot_s) == (pytest.approx(0.4), pytest.approx(0.05))
    assert closed.e2e_s == pytest.approx(0.6)
    assert closed.good
    assert closed.late_s == 0
    assert gaps(got) == pytest.approx([0.05] * 4)
    late = record("grpc", "chat", 99.8, got, SLO)  # it was due earlier, and that counts
    assert (late.ttft_s, late.late_s) == (pytest.approx(0.6), pytest.approx(0.2))
    assert not late.good
    merged = record("grpc", "chat", None, answer(0, 0.1, 0.2, 6, each=2), SLO)
    assert merged.tpot_s == pytest.approx(0.4 / 5)
    assert merged.responses == 3


def test_what_is_good() -> None:
    assert SLO.kept(0.5, 0.1)
    assert not SLO.kept(0.501, 0.1)
    assert not SLO.kept(0.1, 0.101)
    assert SLO.kept(0.1, None)  # a single token
    assert not SLO.kept(None, None)
    assert not record("grpc", "chat", None, answer(0, 0.1, 0.01, 3, ("INTERNAL", "x")), SLO).good
    assert str(SLO) == "TTFT <= 500 ms and TPOT <= 100 ms for 90 % of the requests"


@pytest.mark.parametrize(
    ("slo", "attained", "failures", "code"),
    [
        (SLO, 0.9, 0, 0),
        (SLO, 0.899, 0, EXIT_MISSED),
        (SLO, 0.95, 2, 1),  # the SLO is met, and Locust's own code for failures stands
        (SLO, 0.5, 2, EXIT_MISSED),
        (SLO, None, 0, EXIT_MISSED),
        (Slo(), 1.0, 0, 0),
        (Slo(), 0.9, 1, 1),
        (Slo(), None, 0, 1),
    ],
)
def test_the_exit_code(slo: Slo, attained: float | None, failures: int, code: int) -> None:
    assert exit_code(slo, attained, failures, 1) == code


def test_percentiles_are_by_the_nearest_rank() -> None:
    values = [index / 1000 for index in range(1, 101)]
    assert percentiles(values) == {"p50": 50, "p90": 90, "p99": 99}
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert histogram.percentiles() == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([]) == Histogram().percentiles() == {"p50": None, "p90": None, "p99": None}


def tally() -> Tally:
    """Two steps of ten seconds from 1000 on. One good request each second of the first; in the second one
    half are late, one fails and one is not sent."""
    made = Tally(SLO, 1000.0)
    made.begin_step(1, 1000.0)
    for index in range(10):
        got = answer(1000.0 + index, 0.1, 0.05, 11)
        made.add(record("grpc", "chat", None, got, SLO), got)
    made.begin_step(4, 1010.0)
    for index in range(10):
        got = answer(1010.0 + index / 2, 0.1 if index % 2 else 0.9, 0.08, 11)
        made.add(record("http", "code", None, got, SLO), got)
    failed = answer(1012.0, 0.1, 0.1, 0, ("UNAVAILABLE", "the queue is full"))
    made.add(record("http", "code", None, failed, SLO), failed)
    made.add(Record("http", "code", 1013.0, error=NOT_SENT))
    made.end(1020.0)
    return made


def test_figures() -> None:
    of = tally()
    total = of.figures(0)
    assert (total.requests, total.succeeded) == (22, 20)
    assert total.errors == {"UNAVAILABLE": 1, NOT_SENT: 1}
    assert of.failures() == 1
    assert total.attained == round(15 / 22, 4)
    assert (total.requests_per_s, total.goodput_per_s) == (1.0, 0.75)
    assert total.output_tokens_per_s == 11.0
    assert total.tokens_per_response == 1.0
    chat, code = of.figures(0, "grpc", "chat"), of.figures(0, "http", "code")
    assert chat.ttft_ms == {"p50": 100, "p90": 100, "p99": 100}
    assert (code.ttft_ms["p50"], code.ttft_ms["p99"]) == (100, 900)
    assert (chat.itl_ms["p50"], code.itl_ms["p50"]) == (50, 80)
    assert of.kinds() == [("grpc", "chat"), ("http", "code")]
    first, second = of.step_figures(0), of.step_figures(1)
    assert (first.requests, first.attained, first.output_tokens_per_s) == (10, 1.0, 11.0)
    assert (second.requests, second.goodput_per_s, second.itl_ms["p99"]) == (12, 0.5, 80)
    assert sum(value for _, value in of.tokens_by_second()) == 220


def test_a_request_that_outlives_the_window_adds_no_rate() -> None:
    of = Tally(SLO, 0.0)
    of.end(10.0)
    got = answer(9.0, 0.5, 0.1, 21)  # ends at 11.5; tokens from 9.5 on
    of.add(record("grpc", "chat", None, got, SLO), got)
    figures = of.figures(99.0)
    assert (figures.requests, figures.requests_per_s) == (1, 0.0)
    assert figures.output_tokens_per_s == 0.5
    assert figures.ttft_ms["p50"] == 500


def test_timelines() -> None:
    moments = [Moment(float(s), {"preemptions_total": value}) for s, value in enumerate((1, 3, 0, 5))]
    assert rates(moments, "preemptions_total") == [(1.0, 2.0), (3.0, 5.0)]  # it fell: a restart
    assert growth(moments, "preemptions_total") == 4
    assert series(moments, "running") == []
    assert growth(moments[:1], "preemptions_total") is None


def finished() -> SimpleNamespace:
    """A session that is over, as the report sees it."""
    plan = Plan(urls={"grpc": "grpc://localhost:1"}, workload="<chat>", slo=SLO, steps=(1, 4))
    values = {"running": 3.0, "waiting": 1.0, "blocks_used": 7.0, "blocks_cached": 2.0}
    moments = [
        Moment(float(s), {**values, "prefix_queries_total": 100.0 * s, "prefix_hits_total": 25.0 * s})
        for s in range(20)
    ]
    return SimpleNamespace(tally=tally(), plan=plan, moments=moments, most_in_flight=4)


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "line", "circle", "polyline"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_as_data_and_as_a_page() -> None:
    data = load_report.data(finished(), {"UNAVAILABLE": "the <queue> is full"})  # type: ignore[arg-type]
    assert json.loads(json.dumps(data))["version"] == load_report.VERSION
    assert data["format"] == "octavo-loadtest"
    assert data["exit_code"] == EXIT_MISSED
    assert data["slo"]["met"] is False
    assert data["errors"]["UNAVAILABLE"] == {"count": 1, "first": "the <queue> is full"}
    assert [(step["users"], step["output_tokens_per_s"]) for step in data["steps"]] == [(1, 11.0), (4, 11.0)]
    assert data["server"]["prefix_hit_rate"] == 0.25
    assert data["sender"]["not_sent"] == 1
    assert len(data["timeline"]["requests"]) == 20
    assert "68.2 % in the SLO: MISSED" in load_report.text(data)
    rows = load_report.table(data)
    assert [row["workload"] for row in rows] == ["chat", "code", "all"]
    assert all(set(row) == set(load_report.COLUMNS) for row in rows)

    page = _Page(load_page.page(data))
    assert page.links == []  # all in one file
    assert "script" not in page.tags
    assert page.tags.count("svg") == 9
    assert "SLO missed" in page.text
    assert "the <queue> is full" in page.text
    assert "Load test: <chat> over grpc" in page.text


def test_a_report_of_nothing() -> None:
    session = finished()
    session.tally = Tally(Slo(), 0.0)
    session.tally.end(5.0)
    session.plan = Plan(urls={})
    session.moments = []
    data = load_report.data(session, {})  # type: ignore[arg-type]
    assert data["exit_code"] == 1
    assert "no SLO stated" in _Page(load_page.page(data)).text


def test_plots() -> None:
    assert ticks(10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.03, 4) == pytest.approx([0, 0.01, 0.02, 0.03])
    assert ticks(0) == [0, 1]
    points = [(float(x), 1.0 if x != 777 else 9.0) for x in range(5000)]
    assert len(thinned(points)) <= 600
    assert (777.0, 9.0) in thinned(points)  # the peak stays
    plot = Plot("T", "x", "y", (Series("s", [(0, 0), (10, 4)], labels=["a", "<b>"]),), ("limit", 2.0))
    drawn = svg(plot)
    assert 'points="52.0,210.0 446.0,14.0"' in drawn
    assert 'class="limit" x1="52" x2="446" y1="112.0" y2="112.0"' in drawn
    assert "&lt;b&gt;" in drawn


OPTIONS: dict[str, Any] = {
    "transport": "grpc", "grpc_url": "grpc://a:1", "http_url": "http://a:2", "openai_url": "http://a:3",
    "metrics_url": None, "model": "llm", "workload": "chat", "arrivals": "closed", "rate": 1.0,
    "burst_size": 8,
    "max_in_flight": 256, "max_tokens": 0, "seed": 0, "request_timeout": 300.0, "slo_ttft_ms": 0.0,
    "slo_tpot_ms": 0.0, "slo_goodput": 0.9, "steps": "", "step_seconds": 20.0,
}  # fmt: skip


def test_options_become_a_plan() -> None:
    plan = plan_of(SimpleNamespace(**OPTIONS | {"transport": "grpc,openai", "rate": "2.5", "steps": "1,2"}))
    assert plan.urls == {"grpc": "grpc://a:1", "openai": "http://a:3"}
    assert (plan.rate_per_s, plan.steps, plan.max_tokens, plan.slo.stated) == (2.5, (1, 2), None, False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"transport": "udp"}, "--transport 'udp'; allowed: grpc, http, openai"),
        ({"arrivals": "sometimes"}, "--arrivals 'sometimes'; allowed: closed"),
        ({"rate": 0}, "--rate is 0; allowed: 0.001 to"),
        ({"rate": "fast"}, "--rate is 'fast', which is no number"),
        ({"rate": float("nan")}, "--rate is nan"),
        ({"slo_goodput": 1.5}, "--slo-goodput is 1.5"),
        ({"slo_ttft_ms": -1.0}, "--slo-ttft-ms is -1"),
        ({"steps": "1,x"}, "--steps '1,x'"),
        ({"steps": "1,0"}, "--steps: allowed"),
        ({"steps": "1,2", "arrivals": "poisson"}, "closed loop only"),
        ({"max_in_flight": 0}, "--max-in-flight is 0"),
    ],
)
def test_wrong_options_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(SimpleNamespace(**OPTIONS | wrong))


def test_a_trace_needs_a_file() -> None:
    with pytest.raises(ValueError, match="--arrivals trace needs --workload FILE"):
        Plan(urls={}, arrivals="trace").load()
