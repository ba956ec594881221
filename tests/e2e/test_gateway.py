"""The gateway before a real tritonserver, asked by the official clients of OpenAI: Python's and npm's."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.serving.launcher import RunningServer
from servers import gateway_before
from tools import tool
from triton_clients import RUNNING, wait_for_metric, wait_idle

KEY = "a key of the tests"
FRANCE = "The capital of France is"
HELLO: Any = [{"role": "user", "content": "Say hi."}]
NPM = Path(__file__).with_name("npm")


@pytest.fixture(scope="module")
def url(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("gateway") / "log"
    with gateway_before(server, log, {"OCTAVO_API_KEYS": KEY}) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture
def ai(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_models_completions_and_embeddings(ai: openai.OpenAI) -> None:
    assert [model.id for model in ai.models.list()] == ["llm"]
    done = ai.completions.create(model="llm", prompt=FRANCE, max_tokens=2, temperature=0, logprobs=1)
    assert done.choices[0].text == " Paris."
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 2)
    assert done.choices[0].logprobs is not None
    assert done.choices[0].logprobs.tokens == [" Paris", "."]
    vectors = ai.embeddings.create(model="llm", input=["a cat", "a dog"], dimensions=8)
    assert [len(one.embedding) for one in vectors.data] == [8, 8]
    assert sum(number**2 for number in vectors.data[0].embedding) == pytest.approx(1, abs=1e-3)


def test_a_stream_says_what_the_whole_answer_says(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "llm", "messages": HELLO, "max_tokens": 6, "temperature": 0}
    whole = ai.chat.completions.create(**asked)
    chunks = list(ai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(texts) == whole.choices[0].message.content
    assert len(texts) > 2
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_n_seed_stop_and_several_prompts(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "llm", "max_tokens": 4, "seed": 3, "n": 2}
    first = ai.completions.create(prompt=[FRANCE, "One, two,"], **asked)
    again = ai.completions.create(prompt=[FRANCE, "One, two,"], **asked)
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]
    stopped = ai.completions.create(model="llm", prompt=FRANCE, max_tokens=4, temperature=0, stop=".")
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (" Paris", "stop")


def test_errors_are_the_client_s_own(ai: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ai.chat.completions.create(model="llm", messages=HELLO, temperature=-1)
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        ai.chat.completions.create(model="nobody", messages=HELLO, stream=True)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="'structured_outputs' is not supported"):
        ai.chat.completions.create(model="llm", messages=HELLO, response_format={"type": "json_object"})
    tools: Any = [{"type": "function", "function": {"name": "add"}}]
    with pytest.raises(openai.BadRequestError, match="chat template does not use them"):
        ai.chat.completions.create(model="llm", messages=HELLO, tools=tools)
    with openai.OpenAI(base_url=url, api_key="x") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_the_asynchronous_client_and_its_leaving(url: str, server: RunningServer) -> None:
    endless: dict[str, Any] = {"model": "llm", "messages": HELLO, "extra_body": {"ignore_eos": True}}

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as ai:
            asked: dict[str, Any] = {"model": "llm", "prompt": FRANCE, "max_tokens": 2, "temperature": 0}
            answers = await asyncio.gather(*(ai.completions.create(**asked) for _ in range(4)))
            assert {answer.choices[0].text for answer in answers} == {" Paris."}
            stream = await ai.chat.completions.create(**endless, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            await asyncio.to_thread(wait_idle, server)
            waiting = asyncio.create_task(ai.chat.completions.create(**endless))
            await asyncio.to_thread(wait_for_metric, server, 1, RUNNING)
            waiting.cancel()
            await asyncio.wait({waiting})

    asyncio.run(run())
    wait_idle(server)


def test_the_npm_package(url: str, tmp_path: Path) -> None:
    npm, node = tool("npm", "npm"), tool("node", "nodejs")
    for path in NPM.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    arguments = ["ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    ran = subprocess.run([npm, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
    environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": KEY}
    ran = subprocess.run(
        [node, "client.test.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "all passed"
