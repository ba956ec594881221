"""Octavo's client package: a client of its servers, its twin for asyncio, and the `octavo` command.

    from octavo_client import Client

    with Client("grpc://localhost:8001") as client, client.stream("Once upon a time") as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)

Needs no part of the engine. All that is public is here. Importing it is cheap: the libraries that talk to
servers are imported when a client is made.
"""

from octavo_client._async_client import AsyncClient, AsyncStream
from octavo_client._base import Question, WireRequest
from octavo_client._client import Client, Stream
from octavo_client._errors import (
    AlreadyExists,
    Cancelled,
    ConnectionLost,
    InternalError,
    InvalidArgument,
    NoAdapters,
    NotFound,
    OctavoError,
    PermissionDenied,
    ProtocolError,
    ServerUnreachable,
    TimedOut,
    Unavailable,
    Unsupported,
)
from octavo_client._many import ManyResults, Progress
from octavo_client._metrics import Metrics, Sample
from octavo_client._replies import Reply
from octavo_client._transports import AsyncTransport, MockTransport, Transport
from octavo_client._types import (
    TLS,
    ChatMessage,
    ChatOptions,
    Choice,
    Completion,
    Delta,
    Embedding,
    FinishReason,
    Health,
    Logprob,
    ModelInfo,
    ModelState,
    Options,
    Prompt,
    RequestStats,
    Retries,
    SamplingParams,
    TensorInfo,
    TokenLogprobs,
    Usage,
)

__all__ = [
    "TLS",
    "AlreadyExists",
    "AsyncClient",
    "AsyncStream",
    "AsyncTransport",
    "Cancelled",
    "ChatMessage",
    "ChatOptions",
    "Choice",
    "Client",
    "Completion",
    "ConnectionLost",
    "Delta",
    "Embedding",
    "FinishReason",
    "Health",
    "InternalError",
    "InvalidArgument",
    "Logprob",
    "ManyResults",
    "Metrics",
    "MockTransport",
    "ModelInfo",
    "ModelState",
    "NoAdapters",
    "NotFound",
    "OctavoError",
    "Options",
    "PermissionDenied",
    "Progress",
    "Prompt",
    "ProtocolError",
    "Question",
    "Reply",
    "RequestStats",
    "Retries",
    "Sample",
    "SamplingParams",
    "ServerUnreachable",
    "Stream",
    "TensorInfo",
    "TimedOut",
    "TokenLogprobs",
    "Transport",
    "Unavailable",
    "Unsupported",
    "Usage",
    "WireRequest",
]
