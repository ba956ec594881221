"""Whatever a request asks for, `make_request` makes it or names what is wrong, and what it makes can be run.

`make fuzz` draws 10,000 of them; by default there are fewer, to keep the suite short.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import Engine
from octavo.errors import InvalidArgument, OctavoError, PromptTooLong
from octavo.request import PoolingParams, Request, SamplingParams, TextDelta
from tiny_engine import tiny_engine, whole

EXAMPLES = int(os.environ.get("OCTAVO_FUZZ_EXAMPLES", "500"))
VOCAB_SIZE = 320
MAX_MODEL_LEN = 48


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    """Little of everything, so that little is too much."""
    with whole(
        tiny_engine(folder, max_model_len=MAX_MODEL_LEN, max_num_seqs=4, num_gpu_blocks_override=6)
    ) as engine:
        yield engine


ids = st.sampled_from([0, 1, 2, 3, VOCAB_SIZE - 1] * 4 + [VOCAB_SIZE, 2**31 - 1])
# Above 2^31 and below 0 only where a prompt brings them: `SamplingParams` lets none through.
prompt_ids = ids | st.sampled_from([-1, -(2**31), 2**63])
texts = st.text(max_size=12) | st.sampled_from(
    ["", " ", "\0", "\ud800", "the", " the", "<eos>", "<user>", "é" * 9]
)
prompts = st.one_of(
    st.lists(prompt_ids, max_size=6),
    st.integers(0, MAX_MODEL_LEN + 2).map(lambda length: [5] * length),
    texts,
    st.sampled_from(["x" * (MAX_MODEL_LEN - 1), "x" * MAX_MODEL_LEN, "x" * 5000]),
)
sampling = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 6),
        "best_of": st.integers(1, 6),
        "use_beam_search": st.booleans(),
        "beam_width": st.integers(1, 6),
        "max_tokens": st.sampled_from([1, 2, MAX_MODEL_LEN, 2**31 - 1]),
        "min_tokens": st.integers(0, 2),
        "temperature": st.sampled_from([0, 1, 1e-9, 100]),
        "top_k": st.sampled_from([-1, 1, VOCAB_SIZE + 1, 2**31 - 1]),
        "top_p": st.sampled_from([1e-300, 0.5, 1]),
        "seed": st.sampled_from([-(2**63), 0, 2**64 - 1]),
        "stop": st.lists(texts.filter(bool), max_size=2),
        "stop_token_ids": st.lists(ids, max_size=3),
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=VOCAB_SIZE + 3),
        "bad_words": st.lists(texts.filter(bool), max_size=3),
        "logit_bias": st.dictionaries(ids, st.sampled_from([-100, 0.5, 100]), max_size=3),
        "logprobs": st.integers(0, 20),
        "prompt_logprobs": st.integers(0, 20),
        "ignore_eos": st.booleans(),
    },
)
embedding = st.builds(
    PoolingParams, st.sampled_from(["last", "mean"]), st.sampled_from([None, 1, 48, 0, 49, -1, 2**64])
)


def made(engine: Engine, prompt: Any, values: dict[str, Any], **settings: Any) -> Request | OctavoError:
    try:
        return engine.make_request("r", prompt, SamplingParams.parse(values), **settings)
    except OctavoError as error:
        return error


@settings(max_examples=EXAMPLES, deadline=10_000)
@given(
    prompt=prompts, values=sampling, embed=st.none() | embedding, priority=st.sampled_from([0, -(2**31), 5])
)
def test_a_request_is_made_or_told_what_is_wrong(
    engine: Engine, prompt: Any, values: dict[str, Any], embed: PoolingParams | None, priority: int
) -> None:
    request = made(engine, prompt, values, priority=priority, embed=embed)
    if isinstance(request, OctavoError):
        assert type(request) in (InvalidArgument, PromptTooLong)
        assert request.wire.startswith("[INVALID_ARG] ")
        assert request.wire.isprintable()
        assert len(request.wire) < 1000
        return
    assert 1 <= len(request.prompt_token_ids) <= MAX_MODEL_LEN - (embed is None)
    assert all(0 <= token < VOCAB_SIZE for token in request.prompt_token_ids)
    if isinstance(prompt, str):
        assert request.prompt_token_ids == tuple(engine.tokenizer.encode(prompt))
    deltas: list[TextDelta] = []
    engine.add(request, deltas.append)
    for _ in range(2):
        engine.step()
    engine.abort("r")
    assert [delta.request_finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    # Words of several tokens may forbid, on the way, the last one that was allowed.
    dead_end = bool(request.params.bad_words and request.params.allowed_token_ids)
    codes = {"CANCELLED", "INTERNAL"} if dead_end else {"CANCELLED"}
    assert deltas[-1].error is None or deltas[-1].error.code in codes
    engine.check_integrity()


def test_a_prompt_is_embedded_or_continued(engine: Engine) -> None:
    with pytest.raises(InvalidArgument, match="embedded is not continued: give no sampling parameters"):
        engine.make_request("r", [5], SamplingParams(n=2), embed=PoolingParams())
    assert engine.make_request("r", [5], SamplingParams(), embed=PoolingParams()).embed == PoolingParams()
