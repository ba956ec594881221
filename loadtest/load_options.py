"""The load test's own command line options, beside Locust's: declared, and made into a `Plan`."""

from typing import Any

from load_arrivals import KINDS
from load_session import TRANSPORTS, Plan
from load_slo import Slo

DEFAULT_URLS = {
    "grpc": "grpc://localhost:8001",
    "http": "http://localhost:8000",
    "openai": "http://localhost:9000",
}
STOP_TIMEOUT_S = 30.0


def add_to(parser: Any) -> None:
    """To Locust's parser. What is in the web UI's form too can be changed between two runs."""

    def option(name: str, help: str, *, in_ui: bool = True, **rest: Any) -> None:
        parser.add_argument(name, help=help, include_in_web_ui=in_ui, **rest)

    option("--transport", "grpc, http, openai, or several with commas", default="grpc")
    for transport, url in DEFAULT_URLS.items():
        option(f"--{transport}-url", f"where {transport} is ({url})", in_ui=False, default=url, metavar="URL")
    option(
        "--metrics-url",
        "where the server's metrics are; none are fetched unless set",
        in_ui=False,
        metavar="URL",
    )
    option("--model", "the model to ask", default="llm")
    option(
        "--workload",
        "chat, code, summarise, shared-prefix, mix, shares such as chat=2,code=1, or a file in JSON lines",
        default="chat",
    )
    option("--arrivals", f"one of {', '.join(KINDS)}", default="closed")
    option("--rate", "requests a second of an open loop", type=float, default=1.0)
    option("--burst-size", "requests that come at once with --arrivals bursts", type=int, default=8)
    option(
        "--max-in-flight",
        "an open loop's requests at once; more are not sent, and counted",
        type=int,
        default=256,
    )
    option("--max-tokens", "no answer is longer (0: as the workload says)", type=int, default=0)
    option("--seed", "the same seed asks the same", type=int, default=0)
    option("--request-timeout", "seconds that a request may take", type=float, default=300.0)
    option("--slo-ttft-ms", "limit of the time to first token (0: none)", type=float, default=0.0)
    option("--slo-tpot-ms", "limit of the time per output token (0: none)", type=float, default=0.0)
    option("--slo-goodput", "share of the requests that must keep both limits", type=float, default=0.9)
    option(
        "--steps",
        "numbers of users, one after the other, as in 1,2,4,8",
        in_ui=False,
        default="",
        metavar="N,N",
    )
    option("--step-seconds", "how long each of them asks", in_ui=False, type=float, default=20.0)
    option("--report", "write the report there, as one HTML file", in_ui=False, metavar="FILE")
    option("--report-json", "write its numbers there", in_ui=False, metavar="FILE")
    # Locust's own defaults are to listen everywhere, and to cut off what runs when a test ends.
    parser.set_defaults(web_host="127.0.0.1", stop_timeout=STOP_TIMEOUT_S)


def plan_of(options: Any) -> Plan:
    """Raises ValueError that names the option. Values from the web UI's form may be texts."""
    transports = tuple(dict.fromkeys(part.strip() for part in str(options.transport).split(",")))
    if unknown := [name for name in transports if name not in TRANSPORTS]:
        raise ValueError(f"--transport {unknown[0]!r}; allowed: {', '.join(TRANSPORTS)}")
    return Plan(
        transports=transports,
        urls={name: getattr(options, f"{name}_url") for name in transports},
        metrics_url=options.metrics_url or None,
        model=options.model,
        workload=options.workload,
        arrivals=options.arrivals,
        rate_per_s=_number("--rate", options.rate),
        burst_size=int(_number("--burst-size", options.burst_size)),
        max_in_flight=int(_number("--max-in-flight", options.max_in_flight)),
        max_tokens=int(_number("--max-tokens", options.max_tokens)) or None,
        seed=int(_number("--seed", options.seed)),
        timeout_s=_number("--request-timeout", options.request_timeout),
        slo=Slo(
            _number("--slo-ttft-ms", options.slo_ttft_ms) or None,
            _number("--slo-tpot-ms", options.slo_tpot_ms) or None,
            _number("--slo-goodput", options.slo_goodput),
        ),
        steps=_steps(options.steps),
        step_s=_number("--step-seconds", options.step_seconds),
    )


def _number(name: str, value: Any) -> float:
    try:
        return float(value or 0)
    except ValueError:
        raise ValueError(f"{name} is {value!r}, which is no number") from None


def _steps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ValueError(f"--steps {text!r}; write numbers of users, as in 1,2,4,8") from None
