"""Models that come and go under load, many streams, and thousands of requests: what a server is left with."""

import json
import shutil
import threading
import time
from collections.abc import Callable

import pytest

from octavo.serving.launcher import RunningServer
from octavo.serving.model_processes import model_processes
from processes import children, num_threads, regions, resident_bytes, zombies
from triton_clients import (
    GrpcStream,
    Metrics,
    StartServer,
    control,
    generate,
    generate_stream,
    get,
    make_repository,
    post,
    wait_idle,
)
from waiting import wait_until

PATIENCE_S = 60.0
GREEDY = json.dumps({"temperature": 0, "max_tokens": 12, "ignore_eos": True})
LONG = json.dumps({"temperature": 0, "max_tokens": 200, "ignore_eos": True})
NUM_LONG_TOKENS = 200
MOST_GROWTH_BYTES = 2048  # of resident memory, for each request


@pytest.fixture(scope="module")
def pair(start_server: StartServer, weights: str, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """A server with two models, `llm` and `other`, of the same weights. Leave both loaded."""
    engine = {
        "model": weights,
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 64,
        "num_threads": 1,
    }
    folder = tmp_path_factory.mktemp("pair")
    repository = make_repository(folder / "repository", backend="octavo", **engine)
    other = make_repository(folder / "other", backend="octavo", **engine) / "llm"
    other.rename(repository / "other")
    return start_server(repository)


def until(condition: Callable[[], bool], what: str) -> None:
    wait_until(condition, what, PATIENCE_S)


def processes_of(server: RunningServer, model: str) -> list[int]:
    return [pid for pid, name in model_processes(server.process.pid).items() if name == f"{model}_0_0"]


def unload(server: RunningServer, model: str = "llm") -> None:
    """Returns when the model is gone, not when that was asked for."""
    assert control(server, model, "unload") == (200, "")
    until(lambda: get(server, f"/v2/models/{model}/ready")[0] != 200, f"{model} is still ready")
    until(lambda: not processes_of(server, model), f"{model} still has a process")


def load(server: RunningServer, model: str = "llm") -> None:
    status, answer = control(server, model, "load")
    assert status == 200, answer


class Streams:
    """Over gRPC and HTTP, in flight while something happens to their model."""

    def __init__(self, server: RunningServer) -> None:
        self.over_grpc = [GrpcStream(server) for _ in range(6)]
        for stream in self.over_grpc:
            stream.send(
                text_input="the", stream=True, sampling_parameters=LONG, return_num_output_tokens=True
            )
        self._events: list[list[dict[str, object]]] = []
        body = {"text_input": "the", "stream": True, "sampling_parameters": LONG}
        self._threads = [
            threading.Thread(
                target=lambda: self._events.append(generate_stream(server, **body, return_finish_reason=True))
            )
            for _ in range(2)
        ]
        for thread in self._threads:
            thread.start()
        self.first = [stream.next() for stream in self.over_grpc]

    def all_finish(self) -> None:
        """Each with all its tokens, and nothing after its one final response."""
        for first, stream in zip(self.first, self.over_grpc, strict=True):
            with stream:
                parts = [first, *stream.all()]
            assert [part.error for part in parts] == [None] * len(parts)
            assert [part.final for part in parts] == [False] * (len(parts) - 1) + [True]
            assert sum(part.outputs["num_output_tokens"][0] for part in parts) == NUM_LONG_TOKENS
            assert stream.is_silent()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        reasons = [[event.get("finish_reason") for event in events] for events in self._events]
        assert reasons == [["None"] * (len(events) - 1) + ["length"] for events in self._events]
        assert len(reasons) == len(self._threads)


def test_a_model_that_is_unloaded_finishes_its_streams_and_can_be_loaded_again(pair: RunningServer) -> None:
    """New requests are refused meanwhile, in the server's own words; the other model goes on."""
    expected = generate(pair, text_input="the", sampling_parameters=GREEDY)
    streams = Streams(pair)
    assert control(pair, "llm", "unload") == (200, "")
    status, answer = post(pair, "generate", {"text_input": "the", "sampling_parameters": GREEDY})
    assert status in (400, 404)
    assert "llm" in answer["error"]
    streams.all_finish()
    until(lambda: not processes_of(pair, "llm"), "the model still has a process")
    assert Metrics(pair).value("octavo:ready", model="llm") == 0
    assert get(pair, "/v2/models/other/ready")[0] == 200
    load(pair)
    assert generate(pair, text_input="the", sampling_parameters=GREEDY) == expected


def test_a_model_that_is_reloaded_finishes_its_streams_in_the_old_process(pair: RunningServer) -> None:
    (old,) = processes_of(pair, "llm")
    streams = Streams(pair)
    (pair.options.repository / "llm" / "1" / "model.json").touch()
    load(pair)
    assert generate(pair, text_input="the", sampling_parameters=GREEDY)["text_output"]
    streams.all_finish()
    until(lambda: len(processes_of(pair, "llm")) == 1, "the old process is still there")
    assert processes_of(pair, "llm") != [old]
    wait_idle(pair)


def test_nothing_of_a_model_is_left_when_it_is_unloaded_after_streaming(pair: RunningServer) -> None:
    """No process, dead or alive, no file in shared memory, no thread of the server's."""
    left = []
    for _ in range(2):
        Streams(pair).all_finish()
        unload(pair)
        until(lambda: len(children(pair.process.pid)) == 1, "a process is left")
        left.append((len(regions(pair)), num_threads(pair.process.pid)))
        load(pair)
    assert left[0][0] == 1, "the other model's region"
    assert left[1] <= left[0]


def test_a_model_that_cannot_be_loaded_says_why_and_leaves_the_others_alone(pair: RunningServer) -> None:
    before = generate(pair, text_input="the", sampling_parameters=GREEDY)
    processes = model_processes(pair.process.pid)
    broken = pair.options.repository / "broken"
    shutil.copytree(pair.options.repository / "other", broken)
    for key, value, words in (
        ("dtype", "float8", "'dtype' is 'float8'; allowed: auto, "),
        ("max_model_length", 5, "unknown engine argument 'max_model_length'; did you mean 'max_model_len'"),
    ):
        arguments = json.loads((pair.options.repository / "other/1/model.json").read_text())
        (broken / "1/model.json").write_text(json.dumps({**arguments, key: value}))
        status, answer = control(pair, "broken", "load")
        assert status == 400
        assert "broken cannot be loaded: " in answer
        assert words in answer
    shutil.rmtree(broken)
    until(lambda: model_processes(pair.process.pid) == processes, "a process is left, or gone")
    assert generate(pair, text_input="the", sampling_parameters=GREEDY) == before


def test_two_models_get_the_same_room_whichever_is_loaded_first(pair: RunningServer) -> None:
    def rooms() -> list[float]:
        return [Metrics(pair).value("octavo:kv_blocks", model=model) for model in ("llm", "other")]

    before = rooms()
    assert before[0] == before[1] > 0
    for model in ("llm", "other"):
        unload(pair, model)
    for model in ("other", "llm"):
        load(pair, model)
    until(lambda: rooms() == before, f"{rooms()}, not {before}")


def test_256_streams_at_once(pair: RunningServer) -> None:
    """Each with its own text to the end; no process dies, no block stays taken."""
    alone = {text: generate(pair, text_input=text, sampling_parameters=GREEDY) for text in "abcdefgh"}
    before = model_processes(pair.process.pid)
    streams = [GrpcStream(pair) for _ in range(256)]
    for number, stream in enumerate(streams):
        stream.send(text_input="abcdefgh"[number % 8], stream=True, sampling_parameters=GREEDY)
    for number, stream in enumerate(streams):
        text = "abcdefgh"[number % 8]
        with stream:
            assert text + stream.result() == alone[text]["text_output"]
        assert stream.is_silent()
    assert model_processes(pair.process.pid) == before
    assert zombies(pair.process.pid) == []
    time.sleep(1.5)
    wait_idle(pair)
    assert Metrics(pair).value("octavo:kv_blocks_used", model="llm") == 0


def test_memory_does_not_grow_over_thousands_of_requests(pair: RunningServer) -> None:
    """Of the model's process and of the server's, after a warm-up."""
    pids = {"server": pair.process.pid, "model": processes_of(pair, "llm")[0]}

    def ask(count: int) -> None:
        with GrpcStream(pair) as stream:
            for _ in range(count // 100):
                for number in range(100):
                    stream.send(
                        text_input=f"the {number}", stream=True, sampling_parameters='{"max_tokens": 3}'
                    )
                finals = 0
                while finals < 100:
                    response = stream.next()
                    assert response.error is None
                    finals += response.final

    ask(2000)
    before = {name: resident_bytes(pid) for name, pid in pids.items()}
    ask(4000)
    growth = {name: (resident_bytes(pid) - before[name]) / 4000 for name, pid in pids.items()}
    assert max(growth.values()) < MOST_GROWTH_BYTES, f"bytes a request: {growth}"
