"""What a load test asks and when: seeds, lengths, arrivals, and what is said of a file that is wrong."""

import json
import statistics
from itertools import islice
from pathlib import Path

import pytest

import load_arrivals
from load_workloads import MAX_LINE_BYTES, Job, Shortened, parse, read

KINDS = ["chat", "code", "summarise", "shared-prefix", "mix", "chat=2,code=1"]


@pytest.mark.parametrize("spec", KINDS)
def test_a_request_depends_on_the_seed_and_its_number_alone(spec: str) -> None:
    one, other = parse(spec, 7), parse(spec, 7)
    forwards = [one.job(index) for index in range(20)]
    backwards = [other.job(index) for index in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert len({job.prompt or str(job.messages) for job in forwards}) == 20
    assert forwards != [parse(spec, 8).job(index) for index in range(20)]
    assert all((job.prompt is None) != (job.messages is None) and job.ignore_eos for job in forwards)


def test_lengths_differ_by_kind_and_shared_prefixes_are_shared() -> None:
    def words(spec: str) -> list[int]:
        jobs = [parse(spec, 0).job(index) for index in range(60)]
        return [len((job.prompt or json.dumps(job.messages)).split()) for job in jobs]

    assert statistics.median(words("summarise")) > 3 * statistics.median(words("code"))
    systems = [(parse("shared-prefix", 0).job(index).messages or ())[0]["content"] for index in range(200)]
    assert len(set(systems)) == 4
    assert statistics.mode(systems) == max(set(systems), key=systems.count)


def test_a_mix_has_its_shares_and_answers_can_be_shortened() -> None:
    names = [parse("chat=3,code=1", 1).job(index).workload for index in range(400)]
    assert 250 < names.count("chat") < 350
    assert {Shortened(parse("mix", 1), 3).job(index).max_tokens for index in range(50)} <= {1, 2, 3}


def test_poisson_and_bursts_keep_the_rate_and_the_seed() -> None:
    times = list(islice(load_arrivals.poisson(10, 1), 4000))
    gaps = [later - sooner for sooner, later in zip([0.0, *times[:-1]], times, strict=True)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.08)  # an exponential's is its mean
    assert times == list(islice(load_arrivals.poisson(10, 1), 4000))
    assert times != list(islice(load_arrivals.poisson(10, 2), 4000))
    burst = list(islice(load_arrivals.bursts(10, 8, 1), 4000))
    assert burst[-1] == pytest.approx(400, rel=0.15)
    assert all(len(set(burst[start : start + 8])) == 1 for start in range(0, 4000, 8))
    assert len(set(burst)) == 500


def test_a_file_of_requests(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    messages = [{"role": "user", "content": "Hi"}]
    path.write_text(
        json.dumps({"prompt": "Once", "max_tokens": 5, "at_s": 0})
        + "\n\n"
        + json.dumps({"messages": messages, "at_s": 1.5})
    )
    workload = parse(str(path), 0)
    assert workload.job(0) == workload.job(2) == Job("mine", 5, prompt="Once", ignore_eos=False, at_s=0)
    assert workload.job(1).messages == tuple(messages)
    assert list(load_arrivals.trace(read(path))) == [0, 1.5]
    with pytest.raises(ValueError, match=r"request 2 .* no 'at_s'"):
        list(load_arrivals.trace([Job("x", 1, at_s=0.0), Job("x", 1)]))
    with pytest.raises(ValueError, match="before the one above"):
        list(load_arrivals.trace([Job("x", 1, at_s=2.0), Job("x", 1, at_s=1.0)]))


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "Expecting"),
        ("[1]", "is a JSON object"),
        ('{"prompt": "x", "mox_tokens": 1}', "'mox_tokens' is not known; allowed: prompt"),
        ('{"prompt": "x", "messages": []}', "either 'prompt' or 'messages'"),
        ("{}", "either 'prompt' or 'messages'"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": "x", "max_tokens": true}', "'max_tokens' is True; allowed: 1 to"),
        ('{"prompt": "x", "max_tokens": 0}', "'max_tokens' is 0"),
        ('{"prompt": "x", "at_s": -1}', "'at_s' is -1"),
        ('{"messages": [{"role": "user"}]}', "'messages' must be a list"),
        ('{"messages": "hi"}', "'messages' must be a list"),
        ("[" * 100_000, "recursion"),
        ("x" * (MAX_LINE_BYTES + 1), "at most"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, wrong: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"mine\.jsonl:2: .*{wrong}"):
        read(path)


def test_other_mistakes(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no request in it"):
        read(tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match=r"--workload 'chatt' is none; allowed: chat, code"):
        parse("chatt", 0)
    with pytest.raises(ValueError, match="'chat=no' is no share"):
        parse("chat=no", 0)
