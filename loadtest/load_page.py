"""A load test's report as one HTML file: numbers, plots and tables, of the data that `load_report.py` makes.

It loads nothing from elsewhere and runs no script. Light and dark by the reader's system.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from load_plots import Plot, Series, svg
from load_report import COLUMNS, table
from load_timeline import Moment, rates, series

_STYLE = Path(__file__).with_name("load_page.css")
_COLOURS = 4


def write(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(data), encoding="utf-8")


def page(data: Mapping[str, Any]) -> str:
    settings = data["settings"]
    title = f"Load test: {settings['workload']} over {', '.join(settings['transports'])}"
    steps = list(data["steps"])
    sections = [
        _head(title, data),
        _tiles(data),
        _section("Throughput against latency", _curves(data), "Each point is a number of users at once."),
        _section("Over time", _timelines(data), "Seconds after the test's begin."),
        f"<section><h2>By transport and workload</h2>{_table(COLUMNS, table(data))}</section>",
        _steps_table(steps) if steps else "",
        _errors(data["errors"]),
        _settings(data),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE.read_text(encoding='utf-8')}</style></head>"
        "<body><main>" + "\n".join(sections) + "</main></body></html>\n"
    )


def _head(title: str, data: Mapping[str, Any]) -> str:
    slo, machine = data["slo"], data["machine"]
    if slo["met"] is None:
        verdict, kind = "no SLO stated", "none"
    elif slo["met"]:
        verdict, kind = "SLO met", "met"
    else:
        verdict, kind = "SLO missed", "missed"
    promise = f"Promise: {slo['stated']}." if slo["met"] is not None else ""
    return (
        f'<header><p class="brand">Octavo</p><div class="title"><h1>{escape(title)}</h1>'
        f'<span class="verdict {kind}">{verdict}</span></div>'
        f"<p>{escape(promise)} {escape(data['begun'][:16].replace('T', ' '))} UTC, "
        f"{data['duration_s']:.0f} s, asked from "
        f"{escape(machine['cpu'])} ({machine['cores']} cores).</p></header>"
    )


def _tiles(data: Mapping[str, Any]) -> str:
    total, slo = data["total"], data["slo"]
    goodput = (
        (
            "Goodput",
            f"{total['goodput_per_s']:.2f}",
            "req/s",
            f"{100 * (slo['attained'] or 0):.1f} % in the SLO",
        )
        if slo["met"] is not None
        else ("Requests", f"{total['requests_per_s']:.2f}", "req/s", f"{total['succeeded']} succeeded")
    )
    failed = total["requests"] - total["succeeded"]
    tiles = [
        goodput,
        ("Output", f"{total['output_tokens_per_s']:.0f}", "tokens/s", f"{total['output_tokens']:,} in all"),
        ("First token", *_median(total["ttft_ms"])),
        ("Per output token", *_median(total["tpot_ms"])),
        ("Between tokens", *_median(total["itl_ms"])),
        ("Failed", f"{failed}", "", f"of {total['requests']} requests"),
    ]
    return (
        '<section class="tiles">'
        + "".join(
            f"<div><h3>{name}</h3><p><b>{value}</b> {unit}</p><small>{more}</small></div>"
            for name, value, unit, more in tiles
        )
        + "</section>"
    )


def _median(values: Mapping[str, float | None]) -> tuple[str, str, str]:
    if values["p50"] is None:
        return "–", "", "nothing measured"
    return _number(values["p50"]), "ms", f"median; p99 {_number(values['p99'])} ms"


def _curves(data: Mapping[str, Any]) -> list[Plot]:
    steps, slo = data["steps"], data["slo"]
    if len(steps) < 2:
        return []
    users = [str(step["users"]) for step in steps]

    def latency(part: str, name: str, limit_ms: float | None) -> Plot:
        lines = []
        for colour, percentile in enumerate(("p50", "p99")):
            named = [
                ((step["output_tokens_per_s"], step[f"{part}_ms"][percentile]), label)
                for step, label in zip(steps, users, strict=True)
                if step[f"{part}_ms"][percentile] is not None
            ]
            points = [point for point, _ in named]
            labels = ["" if colour else label for _, label in named]  # once is enough
            lines.append(Series(percentile, points, colour, labels=labels))
        limit = (f"SLO {limit_ms:g} ms", limit_ms) if limit_ms is not None else None
        return Plot(f"{name}, ms", "output tokens/s (points: users)", "ms", tuple(lines), limit)

    rate = [(step["users"], step["output_tokens_per_s"]) for step in steps]
    requests = [
        Series("requests/s", [(step["users"], step["requests_per_s"]) for step in steps], 0, labels=users)
    ]
    if slo["met"] is not None:
        good = [(step["users"], step["goodput_per_s"]) for step in steps]
        requests.append(Series("goodput", good, 1, dashed=True, labels=[""] * len(good)))
    return [
        latency("ttft", "Time to first token", slo["ttft_ms"]),
        latency("tpot", "Time per output token", slo["tpot_ms"]),
        latency("itl", "Inter-token latency", None),
        Plot(
            "Output tokens per second",
            "users at once",
            "tokens/s",
            (Series("tokens/s", rate, 0, labels=[""] * len(rate)),),
        ),
        Plot("Requests per second", "users at once", "requests/s", tuple(requests)),
    ]


def _timelines(data: Mapping[str, Any]) -> list[Plot]:
    timeline, end_s = data["timeline"], data["duration_s"]
    moments = [
        Moment(entry["at_s"], {key: value for key, value in entry.items() if key != "at_s"})
        for entry in timeline["metrics"]
        if 0 <= entry["at_s"] <= end_s
    ]

    def plot(title: str, unit: str, *lines: Series, limit: tuple[str, float] | None = None) -> Plot:
        return Plot(title, "seconds", unit, tuple(line for line in lines if line.points), limit, x_most=end_s)

    requests = timeline["requests"]
    good = [(r["due_s"], r["ttft_ms"]) for r in requests if r["good"]]
    late = [(r["due_s"], r["ttft_ms"]) for r in requests if not r["good"]]
    limit_ms = data["slo"]["ttft_ms"]
    stated = data["slo"]["met"] is not None
    plots = [
        plot(
            "Requests on the server",
            "requests",
            Series("running", series(moments, "running"), 0),
            Series("waiting", series(moments, "waiting"), 1),
        ),
        plot(
            "KV blocks",
            "blocks",
            Series("used", series(moments, "blocks_used"), 0),
            Series("cached, reusable", series(moments, "blocks_cached"), 2),
        ),
        plot("Output tokens per second", "tokens/s", Series("tokens/s", timeline["output_tokens_per_s"], 0)),
        plot(
            "Time to first token, ms",
            "ms",
            Series("in the SLO" if stated else "requests", good, 0, dots=True),
            Series("not in it", late, 1, dots=True),
            limit=(f"SLO {limit_ms:g} ms", limit_ms) if limit_ms is not None else None,
        ),
        plot(
            "Preemptions per second",
            "preemptions/s",
            Series("preemptions", rates(moments, "preemptions_total"), 1),
        ),
    ]
    if not series(moments, "blocks_used"):  # a server with a share only
        plots[1] = plot("KV cache in use", "share", Series("used", series(moments, "kv_usage"), 0))
    if not any(value for _, value in rates(moments, "preemptions_total")):
        plots.pop()
    return [one for one in plots if one.series]


def _section(title: str, plots: Sequence[Plot], note: str) -> str:
    if not plots:
        return ""
    return (
        f"<section><h2>{title}</h2><p>{note}</p>"
        f'<div class="plots">{"".join(_figure(plot) for plot in plots)}</div></section>'
    )


def _figure(plot: Plot) -> str:
    keys = "".join(
        f'<li class="k{line.colour % _COLOURS}{" dashed" if line.dashed else ""}">{escape(line.name)}</li>'
        for line in plot.series
    )
    legend = f"<ul>{keys}</ul>" if len(plot.series) > 1 else ""
    return f"<figure><figcaption>{escape(plot.title)}{legend}</figcaption>{svg(plot)}</figure>"


def _steps_table(steps: Sequence[Mapping[str, Any]]) -> str:
    columns = {
        "users": "users",
        "requests_per_s": "req/s",
        "goodput_per_s": "goodput req/s",
        "output_tokens_per_s": "output tok/s",
        **{
            f"{part}_{percentile}": f"{part.upper()} {percentile} ms"
            for part in ("ttft", "tpot", "itl", "e2e")
            for percentile in ("p50", "p99")
        },
    }
    rows = [
        {
            **step,
            **{
                f"{part}_{key}": step[f"{part}_ms"][key]
                for part in ("ttft", "tpot", "itl", "e2e")
                for key in ("p50", "p99")
            },
        }
        for step in steps
    ]
    return f"<section><h2>By number of users</h2>{_table(columns, rows)}</section>"


def _table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in columns.values())
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_shown(row.get(key)))}</td>" for key in columns) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _errors(errors: Mapping[str, Mapping[str, Any]]) -> str:
    if not errors:
        return ""
    columns = {"code": "code", "count": "requests", "first": "the first one"}
    rows = [{"code": code, **error} for code, error in errors.items()]
    return f"<section><h2>Errors</h2>{_table(columns, rows)}</section>"


def _settings(data: Mapping[str, Any]) -> str:
    shown = {
        **{name.replace("_", " "): value for name, value in data["settings"].items()},
        "most requests in flight": data["sender"]["most_in_flight"],
        "sent late, p99 ms": data["total"]["late_ms"]["p99"],
        "tokens per response": data["total"]["tokens_per_response"],
        "preemptions": data["server"]["preemptions"],
        "prefix hit rate": data["server"]["prefix_hit_rate"],
        "exit code": data["exit_code"],
    }
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(_shown(value))}</dd></div>" for name, value in shown.items()
    )
    return (
        f"<section><h2>Settings</h2><dl>{rows}</dl><p>Times are a client's. TTFT: to the first response with "
        "tokens, from when the request was due. TPOT: from there to the last, over the tokens but one. "
        "ITL: between two responses with tokens. Latencies are of requests that succeeded.</p></section>"
    )


def _shown(value: Any) -> str:
    if value is None or value == [] or value == ():
        return "–"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        return ", ".join(map(str, value.values()))
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
