"""The sorts of requests that a soak makes, good, bad and abandoned, each on connections of its own.

A `Client` is one thread's: it draws from its own random numbers which request comes next, makes it, and says
how it went as an `Outcome`. Streams over gRPC are read from the bare stub, since a client of `tritonclient`
leaves a thread behind for each stream that it cancels.
"""

import http.client
import json
import random
import re
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from soak_verdict import Outcome
from triton_clients import bare_stream, own_channel, stream_message

PATIENCE_S = 60.0  # for an answer
MAX_MODEL_LEN = 768
KNOWN_TOKENS = 24
KNOWN = tuple(
    f"Tell me {how} about {what}." for how in ("all", "less", "more") for what in ("tea", "ice", "us")
)
_WORDS = "the in an then other thin hat bin tan thing than and".split()
_CODE = re.compile(r"\[([A-Z_]+)\] ")
_REFUSED = frozenset({"INVALID_ARG"})
_CANCELLED = frozenset({"CANCELLED", "OK"})  # which it was before that was asked
_TIMED = frozenset({"OK", "UNAVAILABLE"})
# A queue that is full, or a model that is not loaded, of which the server says so in its own words.
_GONE = frozenset({"OK", "UNAVAILABLE", "server"})

BAD: tuple[dict[str, Any], ...] = (
    {},
    {"text_input": ""},
    {"text_input": "a", "temprature": 1},
    {"text_input": "a", "temperature": -1},
    {"text_input": "a", "sampling_parameters": "{"},
    {"text_input": "a", "sampling_parameters": "[]"},
    {"text_input": "a", "sampling_parameters": '{"n": 0}'},
    {"text_input": "a", "sampling_parameters": '{"top_p": 2}'},
    {"text_input": "a", "sampling_parameters": '{"stop": [""]}'},
    {"text_input": "a", "sampling_parameters": '{"max_tokens": NaN}'},
    {"text_input": "a", "stream": True, "exclude_input_in_output": False},
    {"text_input": "a", "embedding_request": "{}"},
    {"text_input": "x" * (2 * MAX_MODEL_LEN)},
    {"text_input": "x" * 300_000},
    {"messages": "{}"},
    {"input_ids": [1 << 20]},
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request: final responses, their code, and all the text."""

    finals: int
    code: str
    text: str = ""


class Client:
    """`next` makes one request. `expected` is what each of the known prompts is answered with, alone."""

    def __init__(self, http: str, grpc_address: str, seed: str, expected: Mapping[str, str]) -> None:
        self._http = http
        self._grpc = grpc_address
        self._random = random.Random(seed)
        self._expected = expected
        self._channel = own_channel(grpc_address)
        self._numbers = 0
        self._seed = seed

    def next(self) -> Outcome:
        (kind,) = self._random.choices(list(_KINDS), [weight for weight, _ in _KINDS.values()])
        try:
            return _KINDS[kind][1](self, kind)
        except (OSError, ValueError, http.client.HTTPException) as error:
            return Outcome(kind, 0, "connection", repr(error))
        except grpc.RpcError as error:
            return Outcome(kind, 0, error.code().name, error.details() or "")

    def close(self) -> None:
        self._channel.close()

    # Requests that are read to their end.

    def _known_grpc(self, kind: str) -> Outcome:
        prompt = self._random.choice(KNOWN)
        return self._compared(kind, prompt, self.call(text_input=prompt, **greedy()))

    def _known_http(self, kind: str) -> Outcome:
        prompt = self._random.choice(KNOWN)
        return self._compared(kind, prompt, self._post({"text_input": prompt, **greedy()}))

    def _grpc_stream(self, kind: str) -> Outcome:
        answer = self.call(text_input=self._prompt(), stream=True, **self._sampling())
        return Outcome(kind, answer.finals, answer.code, answer.text)

    def _http_stream(self, kind: str) -> Outcome:
        answer = self._events({"text_input": self._prompt(), **self._sampling()})
        return Outcome(kind, answer.finals, answer.code, answer.text)

    def _several(self, kind: str) -> Outcome:
        more = self._random.choice(
            ({"n": 4}, {"best_of": 3}, {"use_beam_search": True, "beam_width": 3, "temperature": 0})
        )
        answer = self.call(text_input=self._prompt(), **self._sampling(most=16, **more))
        return Outcome(kind, answer.finals, answer.code, answer.text)

    def _embedding(self, kind: str) -> Outcome:
        answer = self._post({"embedding_request": json.dumps({"input": self._prompt()})})
        return Outcome(kind, answer.finals, answer.code, answer.text)

    def _bad(self, kind: str) -> Outcome:
        body = self._random.choice(BAD)
        tensors = body and all(isinstance(value, str | bool) for value in body.values())
        answer = self.call(**body) if tensors and self._random.random() < 0.5 else self._post(body)
        return Outcome(kind, answer.finals, answer.code, answer.text, allowed=_REFUSED)

    def _deadline(self, kind: str) -> Outcome:
        limit = {"octavo_deadline_ms": self._random.randint(1, 200)}
        body = {"text_input": self._prompt(), **endless()}
        if self._random.random() < 0.5:
            answer = self._post({**body, **limit})
        else:
            answer = self.call(parameters=limit, stream=True, **body)
        return Outcome(kind, answer.finals, answer.code, answer.text, allowed=_TIMED)

    def _other(self, kind: str) -> Outcome:
        """To the model that is unloaded and loaded all the time, and has a queue that is soon full."""
        body = {"text_input": self._prompt(), **self._sampling()}
        if self._random.random() < 0.5:
            answer = self.call(model="other", stream=True, **body)
        else:
            answer = self._events(body, model="other")
        return Outcome(kind, answer.finals, answer.code, answer.text, allowed=_GONE)

    # Requests that end early, and clients that leave.

    def _cancelled_by_id(self, kind: str) -> Outcome:
        self._numbers += 1
        name = f"{self._seed}-{self._numbers}"
        call = self._start(stream_message(name, text_input=self._prompt(), stream=True, **endless()))
        if _is_final(first := next(call)):
            return self._ended(kind, first, call)
        asked = self._post({"cancel_request_id": name})
        rest = _read(call)
        if asked.code == "NOT_FOUND":  # it was over before
            return Outcome(kind, rest.finals, rest.code, rest.text)
        return Outcome(kind, rest.finals, rest.code, rest.text, allowed=_CANCELLED)

    def _grpc_cancel(self, kind: str) -> Outcome:
        """A call that is cancelled, while it waits, computes its prompt or streams."""
        call = self._start(stream_message(text_input=self._prompt(), stream=True, **endless()))
        return self._leave(kind, call, call.cancel)

    def _grpc_disconnect(self, kind: str) -> Outcome:
        channel = own_channel(self._grpc)
        call = self._start(stream_message(text_input=self._prompt(), stream=True, **endless()), channel)
        return self._leave(kind, call, channel.close)

    def _leave(self, kind: str, call: Any, leave: Callable[[], object]) -> Outcome:
        for _ in range(self._random.choice((0, 0, 1, 2, 5))):
            if _is_final(response := next(call)):
                return self._ended(kind, response, call)
        leave()
        return Outcome(kind, 0, "OK", left=True)

    def _ended(self, kind: str, final: service_pb2.ModelStreamInferResponse, call: Any) -> Outcome:
        """One that was over before its client left; what comes after its final response is read, since a call
        that is dropped is a call that is cancelled."""
        rest = _read(call)
        why = final.error_message
        return Outcome(kind, 1 + rest.finals, code_of(why) if why else "OK", why)

    def _http_leave(self, kind: str) -> Outcome:
        """Resets the connection, before the answer, in its middle, or without waiting for one."""
        verb = self._random.choice(("generate", "generate_stream"))
        # Without streaming nobody notices that the client is gone.
        length = endless() if verb == "generate_stream" else self._sampling()
        body = {"text_input": self._prompt(), "stream": verb == "generate_stream", **length}
        connection = http.client.HTTPConnection(self._http, timeout=PATIENCE_S)
        connection.request("POST", f"/v2/models/llm/{verb}", json.dumps(body))
        if verb == "generate_stream" and self._random.random() < 0.7:
            connection.getresponse().read(self._random.choice((1, 100, 2000)))
        # Nothing is sent any more, and nothing that comes is read.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        return Outcome(kind, 0, "OK", left=True)

    # What they are made of.

    def _prompt(self) -> str:
        return " ".join(self._random.choices(_WORDS, k=int(self._random.lognormvariate(2.5, 1)) % 60 + 1))

    def _sampling(self, most: int = 100, **more: Any) -> dict[str, str]:
        max_tokens = int(most ** self._random.random())
        return {"sampling_parameters": json.dumps({"max_tokens": max_tokens, "ignore_eos": True, **more})}

    def _compared(self, kind: str, prompt: str, answer: Answer) -> Outcome:
        differs = answer.text != self._expected[prompt] if answer.code == "OK" else None
        return Outcome(kind, answer.finals, answer.code, answer.text, differs=differs)

    def _post(self, body: Mapping[str, Any]) -> Answer:
        connection = http.client.HTTPConnection(self._http, timeout=PATIENCE_S)
        connection.request("POST", "/v2/models/llm/generate", json.dumps(body))
        found = json.loads(connection.getresponse().read())
        connection.close()
        if "error" in found:
            return Answer(1, code_of(found["error"]), found["error"])
        return Answer(1, "OK", str(found["text_output"]))

    def _events(self, body: Mapping[str, Any], model: str = "llm") -> Answer:
        connection = http.client.HTTPConnection(self._http, timeout=PATIENCE_S)
        body = {**body, "stream": True, "return_finish_reason": True}
        connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(body))
        answer = connection.getresponse()
        finals, code, text = 0, "OK", ""
        for line in answer:
            event = json.loads(line.removeprefix(b"data: ") if line.strip() else b"{}")
            if "error" in event:
                finals, code, text = finals + 1, code_of(event["error"]), event["error"]
            elif event.get("finish_reason", "None") != "None":
                finals += 1
        connection.close()
        return Answer(finals, code, text)

    def call(self, **request: Any) -> Answer:
        """Over gRPC, to the end of the stream."""
        return _read(self._start(stream_message(**request)))

    def _start(self, message: service_pb2.ModelInferRequest, channel: Any = None) -> Any:
        return bare_stream(channel or self._channel, message, PATIENCE_S)


_Make = Callable[[Client, str], Outcome]
# How often each sort comes, in shares of all.
_KINDS: dict[str, tuple[int, _Make]] = {
    "known, grpc": (12, Client._known_grpc),
    "known, http": (12, Client._known_http),
    "grpc stream": (12, Client._grpc_stream),
    "http stream": (12, Client._http_stream),
    "several sequences": (5, Client._several),
    "embedding": (4, Client._embedding),
    "bad": (10, Client._bad),
    "deadline": (6, Client._deadline),
    "other model": (8, Client._other),
    "cancel by id": (4, Client._cancelled_by_id),
    "grpc cancel": (8, Client._grpc_cancel),
    "grpc disconnect": (3, Client._grpc_disconnect),
    "http leave": (6, Client._http_leave),
}


def greedy() -> dict[str, Any]:
    parameters = {"temperature": 0, "max_tokens": KNOWN_TOKENS, "ignore_eos": True}
    return {"sampling_parameters": json.dumps(parameters), "exclude_input_in_output": True}


def endless() -> dict[str, Any]:
    """So long that whoever leaves early leaves long before the last response: a call that is cancelled while
    that one is on its way is kept by the 24.10 server, and its model with it, for ever."""
    return {"sampling_parameters": json.dumps({"max_tokens": MAX_MODEL_LEN - 200, "ignore_eos": True})}


def code_of(error: str) -> str:
    match = _CODE.match(error)
    return match[1] if match else "server"


def alone(http_address: str, grpc_address: str) -> dict[str, str]:
    """What each of the known prompts is answered with while nobody else asks."""
    client = Client(http_address, grpc_address, "", {})
    answers = {prompt: client.call(text_input=prompt, **greedy()) for prompt in KNOWN}
    client.close()
    assert all(answer.code == "OK" and answer.finals == 1 for answer in answers.values()), answers
    return {prompt: answer.text for prompt, answer in answers.items()}


def _is_final(response: service_pb2.ModelStreamInferResponse) -> bool:
    """An error is one, whatever the flag says: a client of another library stops reading there."""
    flags = response.infer_response.parameters
    final = "triton_final_response" in flags and flags["triton_final_response"].bool_param
    return bool(response.error_message) or final


def _read(responses: Iterable[service_pb2.ModelStreamInferResponse]) -> Answer:
    finals, code, text = 0, "OK", ""
    for response in responses:
        finals += _is_final(response)
        if response.error_message:
            code, text = code_of(response.error_message), response.error_message
        else:
            text += _text(response.infer_response)
    return Answer(finals, code, text)


def _text(response: service_pb2.ModelInferResponse) -> str:
    """Of the first sequence; a response with the flag alone has none."""
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.name == "text_output":
            (size,) = struct.unpack_from("<I", raw)
            return raw[4 : 4 + size].decode()
    return ""
