"""Triton over gRPC streams, one for each request, on one connection. Sync and async, by tritonclient's stubs.

Not by tritonclient's own client: it has one stream at a time, and cancels a stream by cancelling the call. A
call that is cancelled in the moment in which its last response is sent seems to make the server keep the
model for ever, and fail at its shutdown. So whoever leaves cancels the request by its id, on its own stream
where the two cannot overtake each other, and reads the stream to its end; the call itself is cancelled only
when a server does not answer that. For the same reason a time limit is never a gRPC deadline, which is such
a cancellation.
"""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from octavo_client import _metrics
from octavo_client._base import (
    ASK_TIMEOUT_S,
    CANCEL_PAUSE_S,
    CANCEL_TIMEOUT_S,
    Address,
    Deadline,
    Question,
    WireRequest,
)
from octavo_client._errors import Cancelled, OctavoError
from octavo_client._grpc_messages import (
    StreamState,
    answer_to,
    asking,
    credentials,
    early_end,
    encode,
    from_rpc,
    typed_errors,
)
from octavo_client._replies import Reply
from octavo_client._types import TLS


class _Grpc:
    """What the twins share."""

    def __init__(
        self, address: Address, headers: Mapping[str, str], tls: TLS | None, connect_timeout_s: float
    ) -> None:
        if any(name.lower() == "triton_grpc_error" for name in headers):
            # backend/docs/adr/0007-streams-without-status-codes.md
            raise ValueError("the header triton_grpc_error makes servers of 2024 crash; leave it out")
        self.metadata = tuple((name.lower(), value) for name, value in headers.items())
        self._metrics_url = address.metrics_url
        self._tls = tls or TLS()
        self.options = (
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),  # clients do not share a connection
            ("grpc.min_reconnect_backoff_ms", int(connect_timeout_s * 1000)),  # how long it tries to connect
            ("grpc.initial_reconnect_backoff_ms", 100),  # or tries that come sooner fail without being made
        )
        self.credentials = credentials(self._tls) if address.secure else None

    def get_metrics(self) -> str:
        """Over HTTP: Triton has them there only."""
        return _metrics.fetch(self._metrics_url, self._tls)


class GrpcTransport:
    def __init__(
        self, address: Address, headers: Mapping[str, str], tls: TLS | None, connect_timeout_s: float
    ) -> None:
        self._grpc = _Grpc(address, headers, tls, connect_timeout_s)
        netloc, options = address.netloc, self._grpc.options
        if self._grpc.credentials is None:
            self._channel = grpc.insecure_channel(netloc, options)
        else:
            self._channel = grpc.secure_channel(netloc, self._grpc.credentials, options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def send(self, request: WireRequest, deadline: Deadline) -> "_Exchange":
        return _Exchange(self._stub, request, deadline, self._grpc.metadata)

    def ask(self, question: Question, model: str, version: str) -> Mapping[str, Any]:
        call, message = asking(self._stub, question, model, version)
        with typed_errors():
            answer = call(message, timeout=ASK_TIMEOUT_S, metadata=self._grpc.metadata)
        return answer_to(question, answer)

    def metrics(self) -> str:
        return self._grpc.get_metrics()

    def close(self) -> None:
        self._channel.close()


class _Exchange:
    def __init__(self, stub: Any, request: WireRequest, deadline: Deadline, metadata: Any) -> None:
        self._request = request
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outgoing.put(encode(request))
        self._stream = StreamState(request)
        self._timers: list[threading.Timer] = []
        self._call = stub.ModelStreamInfer(iter(self._outgoing.get, None), metadata=metadata)
        if deadline.left_s is not None:
            self._after(deadline.left_s, self._expire)

    def __next__(self) -> Reply:
        while not self._stream.final:
            try:
                message = next(self._call)
            except StopIteration:
                self._close()
                raise self._stream.over(early_end()) from None
            except grpc.RpcError as error:
                self._close()
                raise self._stream.over(from_rpc(error)) from error
            reply = self._stream.take(message)
            if self._stream.cut:
                self._call.cancel()
            elif self._stream.cancel_again:
                time.sleep(CANCEL_PAUSE_S)
                self._cancel()
            if reply is not None:
                return reply
        self._finish()
        raise StopIteration

    def leave(self) -> None:
        if not self._stream.final:
            self._abandon()
        with suppress(OctavoError):
            while not self._stream.final:
                next(self, None)
        self._finish()

    def _finish(self) -> None:
        """After the last message: closes both sides. To cancel the call now would still be a race."""
        self._close()
        with suppress(grpc.RpcError):
            for _ in self._call:
                pass

    def _close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._outgoing.put(None)

    def _expire(self) -> None:
        self._stream.out_of_time = True
        self._abandon()

    def _abandon(self) -> None:
        self._cancel()
        self._after(CANCEL_TIMEOUT_S, self._call.cancel)

    def _cancel(self) -> None:
        self._stream.cancel_again = False
        self._outgoing.put(encode(self._request.cancelling()))

    def _after(self, delay_s: float, action: Any) -> None:
        timer = threading.Timer(delay_s, action)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()


class AsyncGrpcTransport:
    """Its channel is made by the first request, since it belongs to the event loop that is then running."""

    def __init__(
        self, address: Address, headers: Mapping[str, str], tls: TLS | None, connect_timeout_s: float
    ) -> None:
        self._grpc = _Grpc(address, headers, tls, connect_timeout_s)
        self._netloc = address.netloc
        self._channel: Any = None
        self._stub: Any = None

    def _connected(self) -> Any:
        if self._stub is None:
            options = self._grpc.options
            if self._grpc.credentials is None:
                self._channel = grpc.aio.insecure_channel(self._netloc, options)
            else:
                self._channel = grpc.aio.secure_channel(self._netloc, self._grpc.credentials, options)
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self._stub

    async def asend(self, request: WireRequest, deadline: Deadline) -> "_AsyncExchange":
        return _AsyncExchange(self._connected(), request, deadline, self._grpc.metadata)

    async def aask(self, question: Question, model: str, version: str) -> Mapping[str, Any]:
        call, message = asking(self._connected(), question, model, version)
        with typed_errors():
            answer = await call(message, timeout=ASK_TIMEOUT_S, metadata=self._grpc.metadata)
        return answer_to(question, answer)

    async def ametrics(self) -> str:
        return await asyncio.to_thread(self._grpc.get_metrics)

    async def aclose(self) -> None:
        if self._channel is not None:
            await self._channel.close()


class _AsyncExchange:
    def __init__(self, stub: Any, request: WireRequest, deadline: Deadline, metadata: Any) -> None:
        self._request = request
        self._deadline = deadline
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self._outgoing.put_nowait(encode(request))
        self._stream = StreamState(request)
        self._call = stub.ModelStreamInfer(self._requests(), metadata=metadata)
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()  # messages, and what ended the call
        self._reader = asyncio.ensure_future(self._read())
        self._abandoned = False

    async def __anext__(self) -> Reply:
        while not self._stream.final:
            message = await self._receive()
            if isinstance(message, OctavoError):
                self._outgoing.put_nowait(None)
                raise self._stream.over(message)
            reply = self._stream.take(message)
            if self._stream.cut:
                self._call.cancel()
            elif self._stream.cancel_again:
                await asyncio.sleep(CANCEL_PAUSE_S)
                self._cancel()
            if reply is not None:
                return reply
        await self._finish()
        raise StopAsyncIteration

    @property
    def waiting(self) -> bool:
        return not self._incoming.empty()

    async def aleave(self) -> None:
        if not self._stream.final:
            self._abandon()
        with suppress(OctavoError):
            while not self._stream.final:
                await anext(self, None)
        await self._finish()

    async def _finish(self) -> None:
        """After the last message: closes both sides. To cancel the call now would still be a race."""
        self._outgoing.put_nowait(None)
        await asyncio.wait({self._reader})

    async def _receive(self) -> Any:
        """The next message. When time is up, the request is cancelled; once that took too long, the call."""
        while True:
            try:
                if self._deadline.left_s is None or not self._incoming.empty():
                    return await self._incoming.get()
                async with asyncio.timeout(self._deadline.left_s):
                    return await self._incoming.get()
            except TimeoutError:
                if self._abandoned:
                    self._deadline = Deadline(None)
                    self._call.cancel()
                else:
                    self._stream.out_of_time = True
                    self._abandon()

    async def _read(self) -> None:
        """In a task of its own: gRPC cancels a call when a task that reads from it is cancelled."""
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._incoming.put_nowait(message)
            end = early_end()
        except grpc.RpcError as error:
            end = from_rpc(error)
        except asyncio.CancelledError:
            end = Cancelled("the call was cancelled")
        self._incoming.put_nowait(end)

    async def _requests(self) -> AsyncIterator[Any]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    def _abandon(self) -> None:
        self._abandoned = True
        self._cancel()
        self._deadline = Deadline(CANCEL_TIMEOUT_S)

    def _cancel(self) -> None:
        self._stream.cancel_again = False
        self._outgoing.put_nowait(encode(self._request.cancelling()))
