"""`octavo top`: a running server's models in the terminal, from its metrics, until q or Ctrl-C.

On a terminal a full screen that is drawn anew; into a pipe or file a plain text, or a line of JSON, for each
interval. What the metrics say is worked out in `_watch`.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from octavo_client import _metrics
from octavo_client._base import Address
from octavo_client._errors import OctavoError
from octavo_client._types import TLS
from octavo_client._watch import Instance, ModelView, Quantiles, views

_HISTORY = 60  # readings that a sparkline shows
_BARS = "▁▂▃▄▅▆▇█"


def top(
    url: Annotated[
        str,
        typer.Argument(
            envvar="OCTAVO_URL",
            help="The server; its metrics are at port 8002 unless --metrics-url says otherwise.",
        ),
    ] = "http://localhost:8000",
    metrics_url: Annotated[
        str | None, typer.Option(help="Where the metrics are, such as http://localhost:8002/metrics.")
    ] = None,
    interval: Annotated[
        float,
        typer.Option(min=0.2, help="Seconds between two readings; a server renews its own each second."),
    ] = 2.0,
    once: Annotated[bool, typer.Option(help="Print what one interval shows, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one line for each interval.")] = False,
) -> None:
    """Watch a running server: requests, KV blocks, tokens a second, latencies. q or Ctrl-C ends it."""
    try:
        address = Address.parse(url, metrics_url)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="URL") from None
    watch = Watch(lambda: _metrics.parse(_metrics.fetch(address.metrics_url, TLS())), address.metrics_url)
    try:
        if once or as_json or not sys.stdout.isatty():
            status = _plain(watch, interval, once, as_json)
        else:
            status = _screen(watch, interval)
    except KeyboardInterrupt:
        status = 0
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    raise typer.Exit(status)


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """One reading. `problem` says why there is none now; `models` are then those of the last one."""

    models: list[ModelView]
    seconds: float | None  # that the window is long; None at the first reading
    problem: str | None = None


class Watch:
    """Reads again and again, and remembers the reading before and the tokens a second."""

    def __init__(self, read: Callable[[], _metrics.Metrics], where: str) -> None:
        self.where = where
        self._read = read
        self._before: _metrics.Metrics | None = None
        self._read_s = 0.0
        self._shown = Shown([], None)
        self._history: dict[tuple[str, str], deque[float]] = {}

    def look(self) -> Shown:
        try:
            now = self._read()
        except OctavoError as error:
            self._before = None  # who comes back may be another server
            self._shown = Shown(self._shown.models, None, f"[{error.code}] {error}")
            return self._shown
        now_s = time.monotonic()
        seconds = now_s - self._read_s
        models = views(self._before, now, seconds)
        self._shown = Shown(models, seconds if self._before is not None else None)
        for model in models:
            if model.tokens_out_per_s is not None:
                history = self._history.setdefault((model.name, model.version), deque(maxlen=_HISTORY))
                history.append(model.tokens_out_per_s)
        self._before, self._read_s = now, now_s
        return self._shown

    def sparkline(self, model: ModelView) -> str:
        return sparkline(self._history.get((model.name, model.version), ()))


def sparkline(values: Any) -> str:
    """One character a value, from 0 to the greatest."""
    most = max(values, default=0.0)
    return "".join(_BARS[round(value / most * (len(_BARS) - 1)) if most else 0] for value in values)


def text(shown: Shown, watch: Watch) -> str:
    """All of it, as lines."""
    head = f"{time.strftime('%H:%M:%S')}  {watch.where}"
    if shown.seconds is not None:
        head += f"  over {shown.seconds:.1f} s"
    lines = [head]
    if shown.problem:
        lines.append(f"no metrics now: {shown.problem}")
        if shown.models:
            lines.append("what follows is the last that was seen")
    elif not shown.models:
        lines.append("no model has reported yet: there is no vllm: series")
    for model in shown.models:
        lines += ["", *_model_lines(model, watch.sparkline(model))]
    return "\n".join(lines)


def _model_lines(model: ModelView, history: str) -> Iterator[str]:
    yield f"{model.name}  version {model.version or '?'}"
    for instance in model.instances:
        yield f"  {'requests':<12}{_instance(instance)}"
        if instance.blocks or instance.kv_usage is not None:
            yield f"  {'KV cache':<12}{_cache(instance)}"
    rates = f"{_number(model.tokens_in_per_s)} in, {_number(model.tokens_out_per_s)} out"
    yield f"  {'tokens/s':<12}{rates}  {history}".rstrip()
    yield f"  {'first token':<12}{_quantiles(model.ttft)}"
    yield f"  {'inter-token':<12}{_quantiles(model.itl)}"
    yield f"  {'queue':<12}{_quantiles(model.queue)}"
    rate = "-" if model.prefix_hit_rate is None else f"{model.prefix_hit_rate:.1%}"
    yield f"  {'prefix hits':<12}{rate}"
    if model.preemptions_total is not None:
        yield f"  {'preemptions':<12}{_number(model.preemptions)} now, {model.preemptions_total:,} in all"
    ended = [
        f"{outcome} {model.outcomes.get(outcome, 0):,} ({total:,})"
        for outcome, total in model.outcomes_total.items()
        if total
    ]
    yield f"  {'ended':<12}{', '.join(ended) or 'none'}" + (" (in all)" if ended else "")


def _instance(instance: Instance) -> str:
    parts = [f"{_number(instance.running)} running", f"{_number(instance.waiting)} waiting"]
    if instance.ready is not None:
        parts.append("ready" if instance.ready else "NOT READY")
    name = f"{instance.name}: " if instance.name else ""
    return name + ", ".join(parts)


def _cache(instance: Instance) -> str:
    parts = [] if instance.kv_usage is None else [f"{instance.kv_usage:.1%} in use"]
    if instance.blocks:
        parts.append("blocks: " + ", ".join(f"{count:,} {kind}" for kind, count in instance.blocks.items()))
    return "; ".join(parts)


def _quantiles(quantiles: Quantiles) -> str:
    if quantiles.p50_ms is None or quantiles.p99_ms is None:
        return "-"
    return f"p50 {quantiles.p50_ms:,.1f} ms, p99 {quantiles.p99_ms:,.1f} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _plain(watch: Watch, interval_s: float, once: bool, as_json: bool) -> int:
    """The first reading is what the first window begins with. Status 1 where `once` has found nothing."""
    shown = watch.look()
    if once and shown.problem:
        print(f"error: {shown.problem}", file=sys.stderr)
        return 1
    while True:
        if not shown.problem:
            time.sleep(interval_s)
        shown = watch.look()
        if as_json:
            print(json.dumps({"time_s": round(time.time(), 3), **dataclasses.asdict(shown)}), flush=True)
        else:
            print(text(shown, watch) + ("" if once else "\n"), flush=True)
        if once:
            return 1 if shown.problem else 0
        if shown.problem:
            time.sleep(interval_s)


def _screen(watch: Watch, interval_s: float) -> int:
    from rich.console import Console  # takes long; who writes into a pipe does not need it
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with (
        _ended_by_signal(),
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        live.update(Text(f"reading {watch.where}"), refresh=True)
        while True:
            shown = watch.look()
            drawn = Text(text(shown, watch) + "\n\nq or Ctrl-C ends", no_wrap=True, overflow="ellipsis")
            live.update(drawn, refresh=True)
            # The second reading soon, since the first one knows no rates.
            if pressed(interval_s if shown.seconds or shown.problem else min(1.0, interval_s)) in ("q", "Q"):
                return 0


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key, "" if there is none. The terminal is restored."""
    if not sys.stdin.isatty():

        def wait(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield wait
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def key(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[None]:
    """SIGTERM and SIGHUP end it as Ctrl-C does, so that the terminal is restored."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
