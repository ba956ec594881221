"""`loadtest/traces.py`: what a trace may say, and the traces that it makes up."""

import itertools
import json
import statistics
from pathlib import Path

import pytest

import traces
from traces import Lengths, TraceError, TraceRequest, Traffic, generate, line_of, load, read

PLAIN = '{"arrival_s": 1.5, "prompt_tokens": 3, "output_tokens": 4}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "no JSON object"),
        ("{", "line 2 of the trace"),
        ('{"arrival_s": 2, "prompt_tokens": 3}', "output_tokens"),
        (PLAIN.replace("1.5", "1.25"), "arrives at 1.25 s, before the line above"),
        (PLAIN.replace("1.5", "NaN"), "'arrival_s' is nan; allowed: seconds, 0 and more"),
        (PLAIN.replace("3", "0"), "'prompt_tokens' is 0; allowed: 1 and more"),
        (PLAIN.replace("4", "true"), "'output_tokens' is True; allowed: 1 and more"),
        (PLAIN.replace("}", ', "prefix_tokens": 1}'), "'prefix_tokens' is 1; allowed: 0 to 0"),
        (PLAIN.replace("}", ', "prefix": 0, "prefix_tokens": 4}'), "allowed: 0 to 3"),
        (PLAIN.replace("}", ', "prefix": "a"}'), "'prefix' is 'a'; allowed: null, or a number"),
        (PLAIN.replace("}", ', "tenant": 1}'), "'tenant' is 1; allowed: null or a string"),
        (PLAIN.replace("}", ', "priority": 0.5}'), "'priority' is 0.5; allowed: an integer"),
        (PLAIN.replace("}", ', "user": "a"}'), "it has 'user'; allowed: arrival_s, output_tokens, "),
    ],
)
def test_a_wrong_line_is_named_with_what_is_allowed(line: str, message: str) -> None:
    with pytest.raises(TraceError) as error:
        list(read([PLAIN, line]))
    assert "line 2 of the trace" in str(error.value)
    assert message in str(error.value)


def test_what_is_written_is_read() -> None:
    requests = [
        TraceRequest(0, 5, 6),
        TraceRequest(0.25, 5, 6, prefix=0, prefix_tokens=4, tenant="a", priority=-1),
    ]
    lines = list(map(line_of, requests))
    assert list(json.loads(lines[0])) == ["arrival_s", "prompt_tokens", "output_tokens"]
    assert list(read(lines)) == requests


def test_made_up_traffic_is_as_it_is_asked_to_be() -> None:
    traffic = Traffic(50, Lengths(100, 0.5, 400), Lengths(20, 1, 60), shared=0.25, prefixes=3, tenants=2)
    requests = list(itertools.islice(generate(traffic, 1), 4000))
    assert requests == list(itertools.islice(generate(traffic, 1), 4000))
    assert requests != list(itertools.islice(generate(traffic, 2), 4000))
    assert requests[-1].arrival_s == pytest.approx(4000 / 50, rel=0.05)
    gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(requests)]
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.1)  # as of a Poisson process: as the mean
    own = [request.prompt_tokens - request.prefix_tokens for request in requests]
    assert statistics.median(own) == pytest.approx(100, rel=0.05)
    assert max(own) <= 400
    outputs = [request.output_tokens for request in requests]
    assert statistics.median(outputs) == pytest.approx(20, rel=0.1)
    assert max(outputs) == 60
    shared = [request for request in requests if request.prefix is not None]
    assert len(shared) / 4000 == pytest.approx(0.25, abs=0.03)
    assert len({(request.prefix, request.prefix_tokens) for request in shared}) == 3
    tenants = [request.tenant for request in requests]
    assert tenants.count("tenant-0") / 4000 == pytest.approx(2 / 3, abs=0.03)
    assert set(tenants) == {"tenant-0", "tenant-1"}


def test_the_mixed_trace_is_what_the_command_makes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["traces"])
    traces.main()
    made = tmp_path / "made.jsonl"
    made.write_text(capsys.readouterr().out)
    assert load(made) == load(traces.MIXED)
    assert traces.MIXED.stat().st_size < 120_000
