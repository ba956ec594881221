"""Octavo's gateway: OpenAI's HTTP interface in front of a Triton server, on `octavo_client` only.

    cli -> app (routes) -> chat, completions, embeddings -> octavo_client -> tritonserver

`octavo gateway` runs it; `create_app(Settings(...))` is the application for a server of one's own.
"""

from octavo_gateway.app import create_app
from octavo_gateway.settings import Settings

__all__ = ["Settings", "create_app"]
