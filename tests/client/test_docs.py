"""The examples of backend/docs/client.md run, one after the other, against a server that is a function."""

import re
from pathlib import Path

import pytest

import octavo_client
from octavo_client import InvalidArgument, MockTransport, WireRequest

PAGE = Path(__file__).parents[2] / "backend/docs/client.md"


def answer(request: WireRequest) -> str | list[str]:
    if request.sampling.get("temperature") == -1:
        raise InvalidArgument("'temperature' is -1.0; allowed: 0 to 100")
    if "embedding_request" in request.inputs:
        return "[0.6, 0.8]"
    return [" Paris", "."]


def examples() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_examples_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    mock = MockTransport(
        answer,
        metadata={"name": "llm", "inputs": [{"name": "messages", "datatype": "BYTES", "shape": [1]}]},
        metrics='vllm:num_requests_running{model="llm"} 3\n',
    )
    for module, name in (("_client", "connect"), ("_async_client", "connect_async")):
        monkeypatch.setattr(f"octavo_client.{module}.{name}", lambda *_: mock)
    printed = []
    names: dict[str, object] = {}
    for code in examples():
        exec(compile(code, str(PAGE), "exec"), names)
        printed.append(capsys.readouterr().out)
    first, stream, asynchronous, chat, tools, many, embed, errors, options, server, own = printed
    assert first == " Paris. stop 2\n"
    assert stream == asynchronous == " Paris."
    assert chat == " Paris.\n"
    assert many == " Paris.\n" * 3
    assert tools == embed == own == ""
    assert errors == "INVALID_ARG 'temperature' is -1.0; allowed: 0 to 100\n"
    assert options == "None None\n"
    assert server == "True\nTrue\n3.0\n['llm']\n"
    assert names["vector"] == (0.6, 0.8)


def test_every_exception_is_in_the_table() -> None:
    rows = "".join(line for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    for name in octavo_client.__all__:
        thing = getattr(octavo_client, name)
        is_error = isinstance(thing, type) and issubclass(thing, octavo_client.OctavoError)
        if is_error and name not in ("OctavoError", "AlreadyExists"):
            assert f"`{name}`" in rows
