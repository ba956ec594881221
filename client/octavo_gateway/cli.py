"""`octavo gateway`: the application in uvicorn, on loopback unless asked."""

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
import uvicorn

from octavo_gateway.app import create_app
from octavo_gateway.security import is_loopback
from octavo_gateway.settings import Settings

_BAD_ARGUMENT = 2
_NOT_STARTED = 3  # such as for want of the port
_KEEP_ALIVE_S = 75  # longer than clients and proxies keep a connection: whoever closes first loses requests


def gateway(
    url: Annotated[
        str, typer.Argument(envvar="OCTAVO_URL", help="The Triton server: grpc://HOST:PORT or http://.")
    ] = "grpc://localhost:8001",
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 9000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that lets in; may be repeated. Others see it in `ps`.")
    ] = None,
    api_keys_file: Annotated[
        Path | None, typer.Option(help="A file with a key on each line.", exists=True, dir_okay=False)
    ] = None,
    api_keys: Annotated[
        str, typer.Option("--api-keys", envvar="OCTAVO_API_KEYS", hidden=True, help="Keys, by commas.")
    ] = "",
    no_api_keys: Annotated[
        bool, typer.Option("--no-api-keys", help="Let everybody in, beyond loopback too.")
    ] = False,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="An origin whose pages may ask (CORS); may be repeated.")
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(help="NAME=MODEL: another name for a model; may be repeated.")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Of a request.")] = 8 << 20,
    max_inputs: Annotated[int, typer.Option(min=1, help="Prompts or texts in one request.")] = 64,
    tool_parser: Annotated[
        str, typer.Option(help="How the model writes tool calls: auto, hermes, llama3 or mistral.")
    ] = "auto",
    timeout: Annotated[float | None, typer.Option(min=0.001, help="Seconds that a request may take.")] = None,
    metrics_url: Annotated[
        str | None, typer.Option(help="The server's metrics; port 8002 of its host unless given.")
    ] = None,
) -> None:
    """Offer OpenAI's HTTP interface in front of a running server."""
    try:
        keys = _keys(api_key or [], api_keys_file, api_keys)
        if no_api_keys and keys:
            raise ValueError("--no-api-keys is given, and so are keys; leave one of them out")
        if not keys and not no_api_keys and not is_loopback(host):
            raise ValueError(
                f"--host {host} can be reached from other machines, and there are no API keys: give "
                "--api-keys-file FILE or OCTAVO_API_KEYS, or --no-api-keys to let everybody in"
            )
        app = create_app(
            Settings(
                url=url,
                metrics_url=metrics_url,
                api_keys=keys,
                allow_origins=tuple(allow_origin or ()),
                max_body_bytes=max_body_bytes,
                max_inputs=max_inputs,
                tool_parser=tool_parser,
                timeout_s=timeout,
                aliases=_aliases(alias or []),
            )
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(_BAD_ARGUMENT) from None
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    for chatty in ("httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=10,
    )
    server = uvicorn.Server(config)
    app.state.is_stopping = lambda: server.should_exit
    with suppress(KeyboardInterrupt):  # which uvicorn raises anew after it has stopped
        server.run()
    if not server.started:
        raise typer.Exit(_NOT_STARTED)


def _keys(given: list[str], file: Path | None, listed: str) -> tuple[str, ...]:
    """Raises ValueError."""
    lines = [] if file is None else file.read_text().splitlines()
    in_file = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if file is not None and not in_file:
        raise ValueError(f"{file} has no key in it: write one on each line")
    return (*given, *in_file, *(key.strip() for key in listed.split(",") if key.strip()))


def _aliases(given: list[str]) -> dict[str, str]:
    """Raises ValueError."""
    pairs = [entry.partition("=") for entry in given]
    for alias, _, model in pairs:
        if not alias or not model:
            raise ValueError(f"--alias {alias} is no NAME=MODEL")
    return {alias: model for alias, _, model in pairs}
