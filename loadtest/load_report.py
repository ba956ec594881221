"""What a load test came to: as data, as JSON, and as lines for a terminal. `load_page.py` makes a page of
it.

The data are JSON of the format `octavo-loadtest`, version 1; backend/docs/load-tests.md describes it. A
version gets new fields, but none of another meaning. Neither prompts nor answers are in it.
"""

import datetime
import json
import os
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from load_session import Session
from load_slo import exit_code
from load_stats import NOT_SENT, UNFINISHED
from load_timeline import growth

FORMAT, VERSION = "octavo-loadtest", 1
_MOST_REQUESTS = 2000  # of the timeline, evenly chosen

# Of the table: in the web UI, on the page and in the terminal.
COLUMNS: Mapping[str, str] = {
    "transport": "transport",
    "workload": "workload",
    "requests": "requests",
    "failed": "failed",
    "attained": "in SLO %",
    "goodput": "goodput req/s",
    "rate": "req/s",
    "tokens": "output tok/s",
    "ttft_p50": "TTFT p50 ms",
    "ttft_p99": "TTFT p99 ms",
    "tpot_p50": "TPOT p50 ms",
    "tpot_p99": "TPOT p99 ms",
    "itl_p50": "ITL p50 ms",
    "itl_p99": "ITL p99 ms",
    "e2e_p50": "E2E p50 ms",
    "e2e_p99": "E2E p99 ms",
}


def machine() -> dict[str, Any]:
    """Of the machine that asked, which need not be the server's."""
    cpuinfo = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu[1] if cpu else platform.machine(), "cores": cores, "system": platform.system()}


def data(session: Session, first_errors: Mapping[str, str], code_on_error: int = 1) -> dict[str, Any]:
    """Of a session that is over."""
    tally, plan = session.tally, session.plan
    result = running_data(session)
    attained = result["total"]["attained"]
    errors = result["total"]["errors"]
    code = exit_code(plan.slo, attained, tally.failures(), code_on_error)
    steps = [
        {
            "users": step.users,
            "begin_s": round(step.begin_s - tally.begin_s, 3),
            "end_s": round((step.end_s or tally.begin_s) - tally.begin_s, 3),
            **asdict(tally.step_figures(index)),
        }
        for index, step in enumerate(tally.steps)
    ]
    begun = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=time.monotonic() - tally.begin_s)
    settings = asdict(plan)
    del settings["slo"]
    return {
        "format": FORMAT,
        "version": VERSION,
        "begun": begun.isoformat(timespec="seconds"),
        "settings": settings,
        "machine": machine(),
        **result,
        "slo": {
            "ttft_ms": plan.slo.ttft_ms,
            "tpot_ms": plan.slo.tpot_ms,
            "share": plan.slo.share,
            "stated": str(plan.slo),
            "attained": attained,
            "met": attained is not None and attained >= plan.slo.share if plan.slo.stated else None,
        },
        "exit_code": code,
        "errors": {code: {"count": count, "first": first_errors.get(code)} for code, count in errors.items()},
        "steps": steps,
        "sender": {
            "most_in_flight": session.most_in_flight,
            "not_sent": errors.get(NOT_SENT, 0),
            "unfinished": errors.get(UNFINISHED, 0),
        },
        "server": {
            "preemptions": growth(session.moments, "preemptions_total"),
            "prefix_hit_rate": _hit_rate(session),
        },
        "timeline": {
            "output_tokens_per_s": tally.tokens_by_second(),
            "requests": _requests(session),
            "metrics": [{"at_s": moment.at_s, **moment.values} for moment in session.moments],
        },
    }


def running_data(session: Session) -> dict[str, Any]:
    """The figures alone, at any time: `duration_s`, `total`, and `rows` by transport and workload."""
    tally, now_s = session.tally, time.monotonic()
    return {
        "duration_s": round((tally.end_s or now_s) - tally.begin_s, 3),
        "slo_stated": session.plan.slo.stated,
        "total": asdict(tally.figures(now_s)),
        "rows": [
            {
                "transport": transport,
                "workload": workload,
                **asdict(tally.figures(now_s, transport, workload)),
            }
            for transport, workload in tally.kinds()
        ],
    }


def table(of: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows with the keys of COLUMNS, the sum last where there are several."""
    rows = [_row(row, of["slo_stated"]) for row in of["rows"]]
    if len(rows) != 1:
        rows.append(_row({"transport": "all", "workload": "all", **of["total"]}, of["slo_stated"]))
    return rows


def _row(figures: Mapping[str, Any], slo_stated: bool) -> dict[str, Any]:
    row = {
        "transport": figures["transport"],
        "workload": figures["workload"],
        "requests": figures["requests"],
        "failed": figures["requests"] - figures["succeeded"],
        "attained": _percent(figures["attained"]) if slo_stated else None,
        "goodput": figures["goodput_per_s"] if slo_stated else None,
        "rate": figures["requests_per_s"],
        "tokens": figures["output_tokens_per_s"],
    }
    for part in ("ttft", "tpot", "itl", "e2e"):
        for percentile in ("p50", "p99"):
            value = figures[f"{part}_ms"][percentile]
            row[f"{part}_{percentile}"] = None if value is None else round(value, 1)
    return row


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)


def text(of: Mapping[str, Any]) -> str:
    """The verdict and the figures of the sum, for a terminal."""
    total, slo = of["total"], of["slo"]
    lines = [
        "",
        f"requests   {total['succeeded']} of {total['requests']} succeeded in {of['duration_s']:.1f} s"
        + "".join(f"; {code} {error['count']}" for code, error in of["errors"].items()),
        f"rate       {total['requests_per_s']:g} requests/s, "
        f"{total['output_tokens_per_s']:g} output tokens/s",
    ]
    for part, name in (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2e", "E2E")):
        values = total[f"{part}_ms"]
        if values["p50"] is not None:
            shown = ", ".join(f"{key} {value:.1f}" for key, value in values.items())
            lines.append(f"{name:10} {shown} ms")
    if slo["met"] is not None:
        lines += [
            f"SLO        {slo['stated']}",
            f"goodput    {total['goodput_per_s']:g} requests/s; {100 * (slo['attained'] or 0):.1f} % "
            f"in the SLO: {'met' if slo['met'] else 'MISSED'}",
        ]
    return "\n".join([*lines, "", ""])


def write_json(path: Path, of: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(of, indent=1) + "\n", encoding="utf-8")


def _requests(session: Session) -> list[dict[str, Any]]:
    """When requests were due, and how long their first tokens took."""
    tally = session.tally
    timed = sorted((r for r in tally.records if r.ttft_s is not None), key=lambda record: record.due_s)
    stride = -(-len(timed) // _MOST_REQUESTS) or 1
    return [
        {
            "due_s": round(r.due_s - tally.begin_s, 3),
            "ttft_ms": round(1000 * (r.ttft_s or 0.0), 2),
            "e2e_ms": round(1000 * (r.e2e_s or 0.0), 2),
            "good": r.good,
        }
        for r in timed[::stride]
    ]


def _hit_rate(session: Session) -> float | None:
    """Of prompt tokens, over the whole test."""
    queries = growth(session.moments, "prefix_queries_total")
    hits = growth(session.moments, "prefix_hits_total")
    return round(hits / queries, 4) if queries and hits is not None else None
