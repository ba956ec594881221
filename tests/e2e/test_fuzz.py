"""500 wild requests to a real server: it answers each, soon, and answers a good one afterwards as before."""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from octavo.serving.launcher import RunningServer
from raw_requests import fits_grpc, grpc_answers, grpc_message, http_body
from triton_clients import connect, generate, wait_idle
from wild_requests import requests

REQUESTS = int(os.environ.get("OCTAVO_FUZZ_REQUESTS", "500"))
GOOD = {"text_input": "Once upon a time", "temperature": 0, "max_tokens": 12}
wildly = settings(
    max_examples=REQUESTS // 2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module", autouse=True)
def unharmed(llm: RunningServer) -> Iterator[None]:
    before = generate(llm, **GOOD)
    yield
    assert generate(llm, **GOOD) == before
    wait_idle(llm)


@wildly
@given(request=requests())
def test_http_answers_each(llm: RunningServer, request: dict[str, Any]) -> None:
    connection = connect(llm)
    verb = "generate_stream" if request.get("stream") else "generate"
    connection.request("POST", f"/v2/models/llm/{verb}", http_body(request))
    response = connection.getresponse()
    *_, last = (json.loads(line.removeprefix(b"data: ")) for line in response if line.strip())
    connection.close()
    if response.status != 200 or "error" in last:
        assert last.keys() == {"error"}
        assert "[INTERNAL]" not in last["error"]
    else:
        assert "text_output" in last


@wildly
@given(request=requests().filter(fits_grpc))
def test_grpc_answers_each(llm: RunningServer, request: dict[str, Any]) -> None:
    *_, last = grpc_answers(llm, grpc_message(request))
    if last.error_message:
        assert "[INTERNAL]" not in last.error_message
    else:
        assert last.infer_response.parameters["triton_final_response"].bool_param
