"""What the comparison of the two ways reads and reckons; the ways themselves are for `make bench-gateway`."""

import asyncio
import time

import pytest

from gateway_overhead import Done, parse_arguments, read_events, summary, verdict

ANSWER = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b'30\r\ndata: {"choices":[{"text":"a"}],"usage":null}\n\n\r\n'
    b'3c\r\ndata: {"choices":[],"usage":{"completion_tokens":7}}\n\n\r\n'
    b"e\r\ndata: [DONE]\n\n\r\n"
    b"0\r\n\r\n"
)


def read(*parts: bytes) -> tuple[Done, bytes]:
    async def run() -> tuple[Done, bytes]:
        reader = asyncio.StreamReader()
        for part in parts:
            reader.feed_data(part)
        reader.feed_eof()
        done = await read_events(reader, time.perf_counter() - 1)
        return done, await reader.read()

    return asyncio.run(run())


def test_an_answer_is_read_to_its_last_byte() -> None:
    done, rest = read(ANSWER, b"HTTP/1.1 200 OK")
    assert done.num_tokens == 7
    assert 1 <= done.ttft_s < 2
    assert rest == b"HTTP/1.1 200 OK"


def test_what_is_no_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="503"):
        read(b"HTTP/1.1 503 No\r\n\r\n")
    with pytest.raises(ValueError, match="before the answer's end"):
        read(ANSWER[:-5])


def rounds(gateway_ttft_ms: float, gateway_tokens_per_s: float) -> list[dict[str, dict[str, float]]]:
    return [
        {
            "straight": {"ttft_ms": 20.0 * slow, "tokens_per_s": 500.0 / slow},
            "gateway": {"ttft_ms": gateway_ttft_ms * slow, "tokens_per_s": gateway_tokens_per_s / slow},
        }
        for slow in (1, 1.5, 4)
    ]


@pytest.mark.parametrize(
    ("ttft_ms", "tokens_per_s", "met"), [(21, 480, True), (23, 480, False), (21, 440, False)]
)
def test_both_goals_count(ttft_ms: float, tokens_per_s: float, met: bool) -> None:
    found = summary(rounds(ttft_ms, tokens_per_s))
    assert found["ttft_ms_ratio"] == pytest.approx(ttft_ms / 20)
    assert found["tokens_per_s_ratio"] == pytest.approx(tokens_per_s / 500)
    assert found["straight_ttft_ms"] == 30
    text, fine = verdict(found, 32)
    assert fine is met
    assert ("MISSED" in text) is not met


def test_the_size_of_the_work_can_be_chosen() -> None:
    assert parse_arguments(["--streams", "4"]).streams == 4
    assert parse_arguments([]).streams == 32
