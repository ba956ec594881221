"""Octavo as a model of Triton's Python backend. The only caller of Triton's `pb_utils`.

    execute -> Intake (parse, tokenise) -> EngineLoop -> Outbox -> Sender -> response senders

Triton makes one `TritonPythonModel` per model instance, in a process of its own, and calls `execute` on its
main thread, which never waits for anything here. See `intake`, `outbox` and `sender` for the threads.
"""

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from octavo.config import resolve
from octavo.engine.loop import EngineLoop
from octavo.errors import Cancelled, InvalidArgument, OctavoError, Unavailable
from octavo.serving import codec, request_parameters
from octavo.serving.codec import Tensors
from octavo.serving.health import Health
from octavo.serving.intake import Intake
from octavo.serving.model_settings import Settings, engine_arguments, parameters_of, refuse_adapters
from octavo.serving.outbox import OpenRequest, Outbox
from octavo.serving.parent_watch import ParentWatch
from octavo.serving.placement import VISIBLE_DEVICES, Placement, place
from octavo.serving.quiet_collector import QuietCollector
from octavo.serving.reporting import Reporting
from octavo.serving.request_log import log_surprise
from octavo.serving.sender import Sender
from octavo.serving.shutdown_signal import ShutdownSignal
from octavo.serving.tracing import carrier_of, exporter_of

log = logging.getLogger("octavo")

_JOIN_S = 5.0  # for threads that have nothing left to do
_SMALL_RESPONSE_BYTES = 64 << 10  # there is room for so little as soon as the request's own tensors are gone


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
        self._name = args["model_name"]
        self._settings = settings = Settings.read(parameters_of(config))
        self._outbox = Outbox(settings.coalesce_responses)
        arguments = engine_arguments(folder / "model.json")
        refuse_adapters(folder, arguments)
        kind, device_id = args["model_instance_kind"], int(args["model_instance_device_id"])
        _apply(place(kind, device_id, settings.gpu_ids, arguments, os.environ), arguments)
        # Imported late: `auto_complete_config` runs in a process of its own, which need not wait for torch.
        from octavo.engine.engine import Engine

        engine_config = resolve(arguments)
        exporter = exporter_of(engine_config)  # what is wrong with it is said before minutes of loading
        self._engine = Engine(engine_config)
        self._loop = EngineLoop(self._engine)
        self._health = Health(self._loop, self._engine.steps)
        self._unloading = False
        self._reporting = Reporting(
            getattr(pb_utils, "MetricFamily", None), settings, engine_config, args, exporter
        )
        self._intake = Intake(self._engine, self._loop, self._outbox, self._reporting.accepted)
        self._channel = _Channel("vllm" if config.get("backend") == "vllm" else "octavo")
        self._sender = Sender(
            self._outbox,
            self._channel,
            cancel=self._cancel,
            on_done=self._reporting.ended,
            on_tick=self._update_metrics,
        )
        self._shutdown_signal = ShutdownSignal(self._drain)
        self._parent_watch = ParentWatch()
        self._collector = QuietCollector()
        for part in (
            self._loop,
            self._reporting,
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
                self._refuse_when_failed()
                # The memory of the request's tensors is Triton's again when this returns.
                opened.tensors = {name: array.copy() for name, array in arrays.items()}
                opened.parameters = parameters
                if self._reporting.has_spans:
                    opened.trace_context = carrier_of(_trace_of(request))
                time_limit_s = request_parameters.time_limit_s(parameters, request.timeout())
                self._intake.put(opened, num_bytes, time_limit_s)
            except OctavoError as error:
                self._outbox.fail(opened, error)
            except UnicodeDecodeError as error:
                what = f"the request's id or a parameter is not UTF-8: {error.reason} at byte {error.start}"
                self._outbox.fail(opened, InvalidArgument(what))
            except Exception as error:
                log_surprise(f"request {opened} could not be read", error)
                self._outbox.fail(opened, OctavoError(f"the request could not be read: {error!r}"))

    def is_ready(self) -> bool:
        """Asked by servers of 2026 and newer before they call the model ready."""
        return self._health.problem() is None

    def finalize(self) -> None:
        """Answers everyone and ends every thread. Triton calls it after the last response, if it can."""
        self._shutdown_signal.close()
        self._drain()
        self._intake.join(_JOIN_S)
        self._sender.stop(_JOIN_S)
        self._reporting.close(_JOIN_S)
        self._engine.close()
        self._parent_watch.close()
        self._collector.close()
        log.info("unloaded")
        log.removeHandler(self._log_handler)

    def _drain(self) -> None:
        """Takes no more requests and gives those in flight `shutdown_timeout_s` to finish."""
        if self._health.draining:
            return
        self._health.drain()
        log.info("shutting down: %d requests in flight", len(self._outbox.requests()))
        self._intake.close()
        self._loop.stop(self._settings.shutdown_timeout_s)

    def _cancel(self, request: OpenRequest) -> None:
        if request.cancel_seen:
            self._channel.log("Cancelling the request", request)
        self._intake.cancel(request)

    def _refuse_when_failed(self) -> None:
        """With ENABLE_VLLM_HEALTH_CHECK, the first request that comes to an engine that cannot go on unloads
        the model; loading it anew heals it. Raises `Unavailable`."""
        if not (self._settings.check_health and self._health.failed):
            return
        if not self._unloading:
            self._unloading = True
            log.error("the model is being unloaded, since its engine cannot go on")
            try:
                pb_utils.unload_model(self._name)  # returns at once
            except Exception as error:
                log.warning("it cannot be, which takes --model-control-mode=explicit: %r", error)
        why = self._health.problem()
        raise Unavailable(f"the model is being unloaded, since its engine cannot go on: {why}")

    def _update_metrics(self) -> None:
        self._health.watch()
        self._reporting.update(
            self._engine.stats(), self.is_ready(), self._sender.num_coalesced, self._engine.steps.take()
        )


class _Channel:
    """What the sender thread does through `pb_utils`. `name` is what the backend is called here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def send(self, request: OpenRequest, tensors: Tensors, final: bool) -> None:
        outputs = [pb_utils.Tensor(name, array) for name, array in tensors.items()]
        response = pb_utils.InferenceResponse(outputs)
        if not final:
            request.sender.send(response)
        elif sum(map(codec.num_bytes, tensors.values())) <= _SMALL_RESPONSE_BYTES:
            request.sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        else:
            # One that does not fit in shared memory fails, but closes the sender when it is the final one:
            # then no error could follow, and the client would wait for ever.
            request.sender.send(response)
            request.sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def send_error(self, request: OpenRequest, error: OctavoError) -> None:
        code = getattr(pb_utils.TritonError, error.code, pb_utils.TritonError.INTERNAL)
        response = pb_utils.InferenceResponse(error=pb_utils.TritonError(error.wire, code))
        request.sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        if request.cancel_seen and isinstance(error, Cancelled):
            self.log("Successfully cancelled the request", request)

    def is_cancelled(self, request: OpenRequest) -> bool:
        return bool(request.sender.is_cancelled())

    def log(self, what: str, request: OpenRequest) -> None:
        """In the words that operators of Triton's vLLM backend search for, when served as that."""
        log.info("[%s] %s %s", self._name, what, request)


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


def _trace_of(request: Any) -> str | None:
    """Triton's own trace of a request, as JSON, where it makes them in OpenTelemetry's way."""
    context: str | None = None
    with contextlib.suppress(Exception):  # old servers have none, and no request fails for want of a parent
        context = request.trace().get_context()
    return context


def _apply(placement: Placement, arguments: dict[str, Any]) -> None:
    """Before torch is imported: CUDA reads its mask once."""
    if placement.device is not None:
        arguments["device"] = placement.device
    if placement.visible_devices is not None:
        os.environ[VISIBLE_DEVICES] = placement.visible_devices
