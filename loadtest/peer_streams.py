"""The engine `tritonserver` of `peer_worker`: a server with Octavo, and a client of it in this process.

As a client of many users is, each prompt has a gRPC channel's client object and a stream of its own. The
client competes with the server for the same cores, so its callbacks only note when something came, and its
CPU time is part of the answer.
"""

import itertools
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc

from servers import REPOSITORY, serving

LONGEST_WORK_S = 600.0

Prompts = list[list[int]]
Arrival = tuple[float, Any]  # when, and the result


@contextmanager
def serve_and_ask(settings: Mapping[str, Any]) -> Iterator[Callable[[Prompts, int], dict[str, Any]]]:
    """The settings are the engine's, and `stream`: whether tokens come as they are made or all at the end."""
    engine = dict(settings)
    stream = engine.pop("stream")
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch) / "repository"
        shutil.copytree(REPOSITORY, repository)
        (repository / "llm/1/model.json").write_text(json.dumps(engine))
        with serving(repository, Path(scratch) / "log") as server:
            yield lambda prompts, output: ask(server.grpc, prompts, output, stream)


def ask(address: str, prompts: Prompts, output: int, stream: bool) -> dict[str, Any]:
    """Asks for all prompts at once, each on its own stream. Raises `RuntimeError` with the first error."""
    arrivals: list[list[Arrival]] = [[] for _ in prompts]
    requests = [_inputs(prompt, output, stream) for prompt in prompts]
    ended = threading.Semaphore(0)
    with ExitStack() as stack:
        clients = []
        for index in range(len(prompts)):
            client = stack.enter_context(grpc.InferenceServerClient(address))
            client.start_stream(_note(arrivals[index], ended))
            clients.append(client)
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for client, inputs in zip(clients, requests, strict=True):
            client.async_stream_infer("llm", inputs, enable_empty_final_response=True)
        for _ in prompts:
            if not ended.acquire(timeout=LONGEST_WORK_S):
                raise RuntimeError(f"no answer after {LONGEST_WORK_S:.0f} s")
        client_cpu_s = time.process_time() - start_cpu_s
    return {**_summary(arrivals, start_s), "client_cpu_s": client_cpu_s}


def _note(arrivals: list[Arrival], ended: threading.Semaphore) -> Callable[[Any, Any], None]:
    def note(result: Any, error: Any) -> None:
        arrivals.append((time.perf_counter(), result if error is None else error))
        if error or result.get_response().parameters["triton_final_response"].bool_param:
            ended.release()

    return note


def _summary(arrivals: Sequence[Sequence[Arrival]], start_s: float) -> dict[str, Any]:
    """Tokens that come in one response come 0 s after each other. `steady` is what comes once every stream
    has its first token: before that a stream waits for the prompts of the others."""
    streams = [list(_tokens(stream)) for stream in arrivals]
    counts = [count for stream in streams for _, count in stream]
    all_in_s = max(stream[0][0] for stream in streams)
    gaps_s, steady_s = [], []
    for stream in streams:
        for (before_s, _), (at_s, count) in itertools.pairwise(stream):
            gaps = [at_s - before_s, *[0.0] * (count - 1)]
            gaps_s += gaps
            if before_s >= all_in_s:
                steady_s += gaps
    return {
        "seconds": max(stream[-1][0] for stream in streams) - start_s,
        "tokens": sum(counts),
        "tokens_per_response": statistics.mean(counts),
        "inter_token_p50_s": _percentile(gaps_s, 50),
        "inter_token_p99_s": _percentile(gaps_s, 99),
        "steady_p99_s": _percentile(steady_s, 99),
    }


def _tokens(stream: Iterable[Arrival]) -> Iterator[tuple[float, int]]:
    """When a response came, and how many tokens were in it. Raises `RuntimeError` with the first error."""
    for at_s, result in stream:
        if isinstance(result, Exception):
            raise RuntimeError(f"the server answered: {result}")
        tokens = result.as_numpy("num_output_tokens")
        if tokens is not None:  # else it is the empty final response
            yield at_s, int(tokens.sum())


def _percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1] if len(values) > 1 else 0.0


def _inputs(prompt: Sequence[int], output: int, stream: bool) -> list[Any]:
    sampling = json.dumps({"temperature": 0, "max_tokens": output, "ignore_eos": True})
    return [
        _tensor("input_ids", "INT32", np.array(prompt, np.int32)),
        _tensor("sampling_parameters", "BYTES", np.array([sampling.encode()], np.object_)),
        _tensor("stream", "BOOL", np.array([stream])),
        _tensor("exclude_input_in_output", "BOOL", np.array([True])),
        _tensor("return_num_output_tokens", "BOOL", np.array([True])),
    ]


def _tensor(name: str, data_type: str, array: np.ndarray[Any, Any]) -> Any:
    tensor = grpc.InferInput(name, list(array.shape), data_type)
    tensor.set_data_from_numpy(array)
    return tensor
