"""Triton without a server: a `triton_python_backend_utils` that records, and a model loaded into it.

`FakeTriton` is as strict as the real thing where a mistake would hang or crash a server: nothing may be sent
after the final flag, only one thread may send, and a request's tensors are wiped once `execute` returns.
"""

import importlib.util
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from fake_engine import FakeEngine
from octavo.serving.codec import num_bytes

FINAL = 1
TIMEOUT_S = 5.0
_CODES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "CANCELLED")


class TritonModelException(Exception):
    pass


class TritonError:
    def __init__(self, message: str, code: str) -> None:
        self.message = message
        self.code = code


for _code in _CODES:
    setattr(TritonError, _code, _code)


class Tensor:
    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        assert isinstance(array, np.ndarray)
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error

    def text(self) -> list[str]:
        return [element.decode() for element in self.outputs["text_output"]]


class ResponseSender:
    """Records responses, and in `finals` which sends had that flag. Tests set `cancelled`, `broken` (sends
    raise), `most_bytes` (larger responses do not fit) and clear `unblocked` (sends wait)."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.cancelled = False
        self.broken = False
        self.most_bytes: int | None = None
        self.finals: list[bool] = []
        self.unblocked = threading.Event()
        self.unblocked.set()
        self.closed = threading.Event()
        self.threads: set[str] = set()

    def is_cancelled(self) -> bool:
        self.threads.add(threading.current_thread().name)
        return self.cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        self.threads.add(threading.current_thread().name)
        if self.broken:
            raise TritonModelException("the client is gone")
        assert not self.closed.is_set(), "a response after the final one"
        assert self.unblocked.wait(TIMEOUT_S)
        self.finals.append(bool(flags & FINAL))
        if flags & FINAL:
            self.closed.set()
        if response is not None:
            if (
                self.most_bytes is not None
                and sum(map(num_bytes, response.outputs.values())) > self.most_bytes
            ):
                raise TritonModelException("Failed to increase the shared memory pool size")
            self.responses.append(response)

    def wait(self) -> "ResponseSender":
        assert self.closed.wait(TIMEOUT_S), "no final response"
        return self

    def error(self) -> TritonError:
        """The final response's."""
        error = self.wait().responses[-1].error
        assert error is not None, self.responses[-1].text()
        return error

    def texts(self) -> list[list[str]]:
        """The text of each response, which must all be results."""
        assert not any(r.error for r in self.wait().responses), self.responses[-1].error
        return [response.text() for response in self.responses]


class InferenceRequest:
    """Inputs by name: a string, a boolean, or a list of token ids."""

    def __init__(self, id: str = "", parameters: Mapping[str, Any] | None = None, **inputs: Any) -> None:
        self._id = id
        self._parameters = json.dumps(parameters) if parameters else ""
        self._inputs = [Tensor(name, as_array(value)) for name, value in inputs.items()]
        self.timeout_us = 0
        self.sender = ResponseSender()

    def request_id(self) -> str:
        return self._id

    def parameters(self) -> str:
        return self._parameters

    def timeout(self) -> int:
        return self.timeout_us

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def get_response_sender(self) -> ResponseSender:
        return self.sender

    def wipe(self) -> None:
        for tensor in self._inputs:
            tensor.as_numpy().fill(0)


def as_array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, (str, bytes)):
        return np.array([value.encode() if isinstance(value, str) else value], np.object_)
    if isinstance(value, bool):
        return np.array([value])
    return np.array(value, np.int32)


class Metric:
    def __init__(self) -> None:
        self.value = 0.0
        self.observed: list[float] = []

    def set(self, value: float) -> None:
        self.value = value

    def increment(self, value: float) -> None:
        assert value >= 0
        self.value += value

    def observe(self, value: float) -> None:
        self.observed.append(value)


class FakeTriton:
    """One server's worth of `pb_utils`: `module` goes into `sys.modules`, the rest is for looking at."""

    def __init__(self) -> None:
        self.log_lines: list[tuple[str, str]] = []
        self.metrics: dict[tuple[str, frozenset[tuple[str, str]]], Metric] = {}
        self.unloaded: list[str] = []
        self.module = ModuleType("triton_python_backend_utils")
        self.module.__dict__.update(
            Tensor=Tensor,
            InferenceResponse=InferenceResponse,
            TritonError=TritonError,
            TritonModelException=TritonModelException,
            TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
            Logger=SimpleNamespace(
                **{
                    f"log_{level}": lambda text, level=level: self.log_lines.append((level, text))
                    for level in ("info", "warn", "error", "verbose")
                }
            ),
            MetricFamily=self._metric_family(),
            unload_model=self.unloaded.append,
        )

    def metric(self, name: str, **labels: str) -> Metric:
        """The one metric of that name that has these labels among its own."""
        found = [m for (n, own), m in self.metrics.items() if n == name and labels.items() <= set(own)]
        assert len(found) == 1, f"{len(found)} metrics are {name} {labels}"
        return found[0]

    def log(self) -> str:
        return "\n".join(f"{level} {text}" for level, text in self.log_lines)

    def _metric_family(fake: "FakeTriton") -> type:
        class MetricFamily:
            COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

            def __init__(self, *, name: str, description: str, kind: str) -> None:
                assert description
                self._name = name
                self._kind = kind

            def Metric(self, *, labels: dict[str, str], buckets: Iterable[float] = ()) -> Metric:
                assert (self._kind == "histogram") == bool(buckets)
                assert sorted(buckets) == list(buckets)
                return fake.metrics.setdefault((self._name, frozenset(labels.items())), Metric())

        return MetricFamily


def real_model_config(config: Mapping[str, Any]) -> Any:
    """Triton's own class for `auto_complete_config`, which checks what is declared against what is added."""
    spec = importlib.util.find_spec("pytriton")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "tritonserver/backends/python/triton_python_backend_utils.py"
    spec = importlib.util.spec_from_file_location("real_pb_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    empty = {"name": "llm", "max_batch_size": 0, "input": [], "output": []}
    return module.ModelConfig(json.dumps({**empty, **config}))


class LoadedModel:
    """A `TritonPythonModel` that runs on a `FakeEngine`; `ask` is one `execute` of one request."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._finalized = False
        self.engine: FakeEngine = model._engine

    def execute(self, *requests: InferenceRequest) -> None:
        assert self._model.execute(list(requests)) is None
        for request in requests:
            request.wipe()

    def ask(
        self, id: str = "", parameters: Mapping[str, Any] | None = None, **inputs: Any
    ) -> InferenceRequest:
        request = InferenceRequest(id, parameters, **inputs)
        self.execute(request)
        return request

    def finalize(self) -> None:
        """As Triton does, once; a later call does nothing."""
        if not self._finalized:
            self._finalized = True
            self._model.finalize()


Load = Callable[..., LoadedModel]
