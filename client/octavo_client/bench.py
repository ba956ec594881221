"""`octavo bench`: a short load on a running server, and a table of what it took. The load is in `_load`."""

import asyncio
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo_client._async_client import AsyncClient
from octavo_client._errors import InvalidArgument, OctavoError
from octavo_client._load import PERCENTS, Figures, Load, Run
from octavo_client._types import Retries

_INTERRUPTED = 130  # what a shell makes of Ctrl-C
_DEFAULT_REQUESTS = 64
_DEFAULT_CONCURRENCY = 8


def bench(
    url: Annotated[
        str, typer.Argument(envvar="OCTAVO_URL", help="http://HOST:PORT, https://, grpc:// or grpcs://.")
    ] = "http://localhost:8000",
    requests: Annotated[
        int | None, typer.Option(min=1, help="How many; 64 unless --seconds is given.", show_default=False)
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Begin no request after so long.", show_default=False)
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Requests at once, at most; 8, or no limit with --rate.", show_default=False
        ),
    ] = None,
    input_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Of a prompt's tokens, so many are the same in all of them.")
    ] = 0,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Requests a second, at random moments.", show_default=False),
    ] = None,
    model: Annotated[str, typer.Option(help="The model to ask.")] = "llm",
    seed: Annotated[int, typer.Option(help="Of the prompts, and of the moments of --rate.")] = 0,
    timeout: Annotated[float | None, typer.Option(help="Seconds that an answer may take.")] = None,
    text: Annotated[bool, typer.Option(help="Send texts, though the model takes token ids.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there too; - for stdout.")
    ] = None,
) -> None:
    """Load a running server for a short while and print what it took. Fails when a request did."""
    if shared_prefix > input_tokens:
        raise typer.BadParameter(
            f"it is {shared_prefix}, and a prompt has {input_tokens} tokens", param_hint="--shared-prefix"
        )
    load = Load(
        requests=_DEFAULT_REQUESTS if requests is None and seconds is None else requests,
        seconds=seconds,
        concurrency=concurrency or (None if rate else _DEFAULT_CONCURRENCY),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        shared_prefix=shared_prefix,
        rate=rate,
        seed=seed,
        timeout_s=timeout,
    )
    bench = _Bench(url, model, load, text)
    try:
        asyncio.run(bench.run())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="URL") from None
    except OctavoError as error:
        print(f"error: [{error.code}] {error}", file=sys.stderr)
        if bench.as_ids and isinstance(error, InvalidArgument):
            print("should the model's vocabulary be too small for random ids: --text", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        bench.interrupted = True
    finally:
        bench.progress.end()
    if bench.measured is None:  # it was interrupted before there was anything
        raise typer.Exit(_INTERRUPTED)
    figures = bench.measured.figures()
    if json_file is not None:
        _write_json(json_file, bench, figures)
    if json_file != Path("-"):
        _print_table(bench.about(), figures)
    for code, first in figures.first_errors.items():
        print(f"error: {figures.failed[code]} x [{code}] {first}", file=sys.stderr)
    raise typer.Exit(_INTERRUPTED if bench.interrupted else bool(figures.failed))


class _Bench:
    """One run of the command, as far as it got."""

    def __init__(self, url: str, model: str, load: Load, text: bool) -> None:
        self.url = url
        self.load = load
        self.progress = _ProgressLine()
        self.measured: Run | None = None
        self.interrupted = False
        self._model = model
        self._text = text
        self.as_ids = False
        self._warmed_up = 0

    async def run(self) -> None:
        """Raises `OctavoError` where the server cannot be asked, ValueError for a wrong URL."""
        # A request that is tried again would be measured as a slow one.
        async with AsyncClient(self.url, model=self._model, retries=Retries(attempts=1)) as client:
            self.as_ids = not self._text and (await client.model_info()).takes("input_ids")
            run = Run(self.load, client, as_ids=self.as_ids)
            self.progress.say("warming up")
            self._warmed_up = await run.warm_up()
            self.measured = run
            await run.measure(self.progress)

    def about(self) -> dict[str, Any]:
        load = self.load
        ends = [f"{load.requests} requests"] if load.requests else []
        ends += [f"{load.seconds:g} s"] if load.seconds else []
        begin = f"{load.rate:g} a second, at random moments" if load.rate else "one when another has ended"
        shared = f"the first {load.shared_prefix} tokens shared" if load.shared_prefix else "no prefix shared"
        return {
            "server": f"{self.url}, model {self._model}",
            "load": f"{' or '.join(ends)}, {begin}; "
            + (f"at most {load.concurrency} at once" if load.concurrency else "no limit to those at once"),
            "prompts": f"{load.input_tokens} tokens in, {load.output_tokens} out; random "
            f"{'token ids' if self.as_ids else 'words'}, {shared}; greedy, seed {load.seed}",
            "measured": f"by this client, streaming, after a warm-up of {self._warmed_up} requests"
            + (", from the moment at which a request was due" if load.rate else "")
            + ("; interrupted" if self.interrupted else ""),
        }


class _ProgressLine:
    """How far a run is, written over and over on a terminal, and nowhere else."""

    def __init__(self) -> None:
        self._shown = False
        self._on_terminal = sys.stderr.isatty()

    def __call__(self, run: Run) -> None:
        ended = [sent for sent in run.sent if sent.ended_s]
        failed = sum(sent.error is not None for sent in ended)
        elapsed_s = time.monotonic() - run.started_s
        tokens = sum(sent.output_tokens for sent in ended)
        of = f"/{run.load.requests}" if run.load.requests else ""
        self.say(
            f"{elapsed_s:.0f} s: {len(ended)}{of} requests done, {len(run.sent) - len(ended)} running, "
            f"{tokens / max(elapsed_s, 1e-9):.0f} output tokens/s" + (f", {failed} failed" if failed else "")
        )

    def say(self, text: str) -> None:
        if self._on_terminal:
            self._shown = True
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._shown = False


def _write_json(file: Path, bench: _Bench, figures: Figures) -> None:
    report = {
        "about": bench.about(),
        "load": dataclasses.asdict(bench.load),
        "interrupted": bench.interrupted,
        "figures": dataclasses.asdict(figures),
    }
    written = json.dumps(report, indent=2)
    if file == Path("-"):
        print(written)
        return
    try:
        file.write_text(written + "\n")
    except OSError as error:
        print(f"error: the figures cannot be written to {file}: {error.strerror}", file=sys.stderr)


def _print_table(about: dict[str, str], figures: Figures) -> None:
    for name, what in about.items():
        print(f"{name:<9}{what}")
    failures = ", ".join(f"{count} {code}" for code, count in sorted(figures.failed.items()))
    print()
    rows = [
        ("requests ok", str(figures.ok)),
        ("requests failed", f"{sum(figures.failed.values())}" + (f" ({failures})" if failures else "")),
        *([("requests unfinished", str(figures.unfinished))] if figures.unfinished else []),
        ("duration, s", f"{figures.duration_s:.2f}"),
        ("tokens in", f"{figures.prompt_tokens:,}"),
        ("tokens out", f"{figures.output_tokens:,}"),
        ("requests/s", f"{figures.requests_per_s:,.2f}"),
        ("input tokens/s", f"{figures.input_tokens_per_s:,.1f}"),
        ("output tokens/s", f"{figures.output_tokens_per_s:,.1f}"),
    ]
    for name, value in rows:
        print(f"{name:<30}{value}")
    print()
    print(f"{'ms':<30}" + "".join(f"{f'p{percent}':>11}" for percent in PERCENTS))
    for name, times in (
        ("TTFT, to the first token", figures.ttft_ms),
        ("TPOT, mean for each after it", figures.tpot_ms),
        ("ITL, between two responses", figures.itl_ms),
        ("end to end", figures.e2e_ms),
    ):
        print(f"{name:<30}" + "".join(f"{_shown(value):>11}" for value in dataclasses.astuple(times)))


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
