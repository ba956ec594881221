"""Octavo as a model of Triton's Python backend. The only caller of Triton's `pb_utils`.

    execute -> Intake (parse, tokenise) -> EngineLoop -> Outbox -> Sender -> response senders

Triton makes one `TritonPythonModel` per model instance, in a process of its own, and calls `execute` on its
main thread, which never waits for anything here. See `intake`, `outbox` and `sender` for the threads.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from octavo.engine.loop import EngineLoop
from octavo.errors import ConfigError, InvalidArgument, OctavoError
from octavo.serving import codec, strict_json
from octavo.serving.codec import Tensors
from octavo.serving.intake import Intake
from octavo.serving.outbox import OpenRequest, Outbox
from octavo.serving.parent_watch import ParentWatch
from octavo.serving.quiet_collector import QuietCollector
from octavo.serving.sender import Sender
from octavo.serving.shutdown_signal import ShutdownSignal
from octavo.serving.triton_metrics import TritonMetrics

log = logging.getLogger("octavo")

SHUTDOWN_TIMEOUT_S = 20.0  # Triton's own, --exit-timeout-secs, is 30 by default
# The launcher says here how long, since Triton does not pass its own deadline on.
SHUTDOWN_TIMEOUT_VARIABLE = "OCTAVO_SHUTDOWN_TIMEOUT_S"
_JOIN_S = 5.0  # for threads that have nothing left to do


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Fills in what the repository's config.pbtxt leaves out, which may be everything but the backend."""
        declared = {entry["name"]: entry for entry in config.as_dict()["input"]}
        for spec in codec.INPUTS:
            entry = spec.config()
            if spec.name not in declared:
                entry["optional"] = True
            elif spec.name == "input_ids" and declared[spec.name]["data_type"] == "TYPE_INT64":
                entry["data_type"] = "TYPE_INT64"
            config.add_input(entry)
        for spec in codec.OUTPUTS:
            config.add_output(spec.config())
        config.set_model_transaction_policy({"decoupled": True})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the model. Raises `TritonModelException` that says why it cannot be."""
        self._log_handler = _TritonLog()
        log.addHandler(self._log_handler)
        log.setLevel(logging.INFO)
        try:
            self._start(args)
        except OctavoError as error:
            log.removeHandler(self._log_handler)
            raise pb_utils.TritonModelException(f"{args['model_name']} cannot be loaded: {error}") from None

    def _start(self, args: Mapping[str, str]) -> None:
        folder = Path(args["model_repository"]) / args["model_version"]
        config = json.loads(args["model_config"])
        self._shutdown_timeout_s = _shutdown_timeout_s(config)
        self._outbox = Outbox(_coalesce_responses(config))
        # Imported late: `auto_complete_config` runs in a process of its own, which need not wait for torch.
        from octavo.engine.engine import Engine

        self._engine = Engine(_engine_arguments(folder / "model.json"))
        self._loop = EngineLoop(self._engine)
        self._intake = Intake(self._engine, self._loop, self._outbox)
        family = getattr(pb_utils, "MetricFamily", None)
        self._metrics = TritonMetrics(
            family, args["model_name"], args["model_version"], args["model_instance_name"]
        )
        self._sender = Sender(
            self._outbox,
            _Channel(),
            cancel=self._intake.cancel,
            on_done=self._metrics.observe,
            on_tick=self._update_metrics,
        )
        self._shutdown_signal = ShutdownSignal(self._drain)
        self._parent_watch = ParentWatch()
        self._collector = QuietCollector()
        self._draining = False
        for part in (
            self._loop,
            self._sender,
            self._intake,
            self._shutdown_signal,
            self._parent_watch,
            self._collector,
        ):
            part.start()
        log.info("%s: version %s is ready", args["model_instance_name"], args["model_version"])

    def execute(self, requests: list[Any]) -> None:
        """Queues the requests. They are answered later, each by its own response sender."""
        for request in requests:
            opened = self._outbox.open(request.get_response_sender())
            try:
                opened.client_id = request.request_id()
                parameters = request.parameters()
                arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                num_bytes = codec.check_sizes(arrays, parameters)
                # The memory of the request's tensors is Triton's again when this returns.
                opened.tensors = {name: array.copy() for name, array in arrays.items()}
                opened.parameters = parameters
                self._intake.put(opened, num_bytes)
            except OctavoError as error:
                self._outbox.fail(opened, error)
            except UnicodeDecodeError as error:
                what = f"the request's id or a parameter is not UTF-8: {error.reason} at byte {error.start}"
                self._outbox.fail(opened, InvalidArgument(what))
            except Exception as error:
                log.exception("request %s could not be read", opened)
                self._outbox.fail(opened, OctavoError(f"the request could not be read: {error!r}"))

    def is_ready(self) -> bool:
        """Asked by servers of 2026 and newer before they call the model ready."""
        return not self._draining and self._loop.failure is None

    def finalize(self) -> None:
        """Answers everyone and ends every thread. Triton calls it after the last response, if it can."""
        self._shutdown_signal.close()
        self._drain()
        self._intake.join(_JOIN_S)
        self._sender.stop(_JOIN_S)
        self._metrics.close()
        self._engine.close()
        self._parent_watch.close()
        self._collector.close()
        log.info("unloaded")
        log.removeHandler(self._log_handler)

    def _drain(self) -> None:
        """Takes no more requests and gives those in flight `shutdown_timeout_s` to finish."""
        if self._draining:
            return
        self._draining = True
        log.info("shutting down: %d requests in flight", len(self._outbox.requests()))
        self._intake.close()
        self._loop.stop(self._shutdown_timeout_s)

    def _update_metrics(self) -> None:
        self._metrics.update(self._engine.stats(), self.is_ready(), self._sender.num_coalesced)


class _Channel:
    """What the sender thread does through `pb_utils`."""

    def send(self, request: OpenRequest, tensors: Tensors, final: bool) -> None:
        outputs = [pb_utils.Tensor(name, array) for name, array in tensors.items()]
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        request.sender.send(pb_utils.InferenceResponse(outputs), flags=flags)

    def send_error(self, request: OpenRequest, error: OctavoError) -> None:
        code = getattr(pb_utils.TritonError, error.code, pb_utils.TritonError.INTERNAL)
        response = pb_utils.InferenceResponse(error=pb_utils.TritonError(error.wire, code))
        request.sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self, request: OpenRequest) -> bool:
        return bool(request.sender.is_cancelled())


class _TritonLog(logging.Handler):
    """Our log lines, in the server's log."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if record.levelno >= logging.ERROR:
                pb_utils.Logger.log_error(line)
            elif record.levelno >= logging.WARNING:
                pb_utils.Logger.log_warn(line)
            else:
                pb_utils.Logger.log_info(line)
        except Exception:
            self.handleError(record)


def _engine_arguments(path: Path) -> dict[str, Any]:
    """The engine's arguments. Paths in the file are relative to its folder. Raises `ConfigError`."""
    try:
        arguments = strict_json.load_object(path.read_text(encoding="utf-8"), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; it holds the engine's arguments, as JSON"
        ) from None
    except OctavoError as error:
        raise ConfigError(f"{path}: {error}") from None
    for key in ("model", "tokenizer"):
        value = arguments.get(key)
        if isinstance(value, str) and value and "://" not in value and not value.startswith("~"):
            arguments[key] = str(path.parent / value)  # which an absolute path survives
    return arguments


def _parameter(config: Mapping[str, Any], name: str) -> str:
    """Of config.pbtxt; empty when it is not there."""
    return str(config.get("parameters", {}).get(name, {}).get("string_value", ""))


def _coalesce_responses(config: Mapping[str, Any]) -> bool:
    """From the parameter of that name. Raises `ConfigError`."""
    value = _parameter(config, "coalesce_responses") or "true"
    if value not in ("true", "false"):
        raise ConfigError(
            f"parameter 'coalesce_responses' is {value!r}; allowed: 'true' (what waits for a stream while "
            "the sender is behind becomes one response) and 'false' (every delta is a response of its own)"
        )
    return value == "true"


def _shutdown_timeout_s(config: Mapping[str, Any]) -> float:
    """From the parameter of that name in config.pbtxt, or the launcher. Raises `ConfigError`."""
    value = (
        _parameter(config, "shutdown_timeout_s")
        or os.environ.get(SHUTDOWN_TIMEOUT_VARIABLE)
        or SHUTDOWN_TIMEOUT_S
    )
    try:
        seconds = float(value)
        if 0 <= seconds < 86400:
            return seconds
    except ValueError:
        pass
    raise ConfigError(
        f"parameter 'shutdown_timeout_s' is {value!r}; allowed: 0 to 86400 seconds, and less "
        "than the server's --exit-timeout-secs"
    )
