"""What was promised to each request, and whether it was kept. Goodput is the rate of requests that got it.

The definition is DistServe's (Zhong and others, OSDI 2024): a request is good when its time to first token
and its time per output token both lie within their limits. One that failed, that was cut off, or that could
not be sent is not good. Used by `load_stats.py`.
"""

from dataclasses import dataclass

EXIT_MISSED = 3  # Locust's own codes are 1 (a request failed) and 2 (it crashed)


@dataclass(frozen=True, slots=True)
class Slo:
    """A limit that is None is none. `share` of all requests must be good."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    share: float = 0.9

    def __post_init__(self) -> None:
        for name, limit in (("--slo-ttft-ms", self.ttft_ms), ("--slo-tpot-ms", self.tpot_ms)):
            if limit is not None and not 0 < limit < 1e9:
                raise ValueError(f"{name} is {limit:g}; allowed: milliseconds above 0")
        if not 0 < self.share <= 1:
            raise ValueError(f"--slo-goodput is {self.share:g}; allowed: a share above 0, up to 1")

    @property
    def stated(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def kept(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """For a request that succeeded. One without tokens keeps nothing; one of a single token has no
        time per output token and keeps that limit."""
        if ttft_s is None:
            return False
        if self.ttft_ms is not None and ttft_s * 1000 > self.ttft_ms:
            return False
        return self.tpot_ms is None or tpot_s is None or tpot_s * 1000 <= self.tpot_ms

    def __str__(self) -> str:
        if not self.stated:
            return "none"
        limits = [
            f"{name} <= {limit:g} ms"
            for name, limit in (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms))
            if limit is not None
        ]
        return f"{' and '.join(limits)} for {100 * self.share:g} % of the requests"


def exit_code(slo: Slo, attained: float | None, failures: int, code_on_error: int) -> int:
    """Of the whole run. `attained` is the share of good requests, None where none was asked."""
    if attained is None:
        return EXIT_MISSED if slo.stated else 1  # a test of nothing proves nothing
    if slo.stated and attained < slo.share:
        return EXIT_MISSED
    return code_on_error if failures else 0
