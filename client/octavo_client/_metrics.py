"""A server's metrics: where to get them, and Prometheus' text format as values."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from octavo_client._errors import ServerUnreachable, from_status
from octavo_client._types import TLS

_TIMEOUT_S = 10.0
_LINE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>[-+]?(?:\d\S*|Inf|NaN))")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:\\.|[^"\\])*)"')
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One series at one moment."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """All series of a server, in its order. Its models' have the labels `model` and `version`."""

    samples: tuple[Sample, ...]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def select(self, name: str, **labels: str) -> tuple[Sample, ...]:
        """The series of that name with at least these labels."""
        return tuple(
            sample
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def value(self, name: str, **labels: str) -> float:
        """The sum over the series that `select` finds. Raises KeyError where it finds none."""
        found = self.select(name, **labels)
        if not found:
            raise KeyError(f"no metric {name} {labels or ''}".rstrip())
        return sum(sample.value for sample in found)


def parse(text: str) -> Metrics:
    """Comments and lines that are no sample are left out."""
    return Metrics(tuple(_samples(text)))


def _samples(text: str) -> Iterator[Sample]:
    for line in text.split("\n"):
        match = _LINE.match(line)
        if match is None:
            continue
        labels = {name: _unescape(value) for name, value in _LABEL.findall(match["labels"] or "")}
        yield Sample(match["name"], labels, float(match["value"]))  # which reads +Inf and NaN too


def _unescape(value: str) -> str:
    return _ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], value)


def fetch(url: str, tls: TLS) -> str:
    """The text at a URL. Without a client's headers: whoever has the metrics may not be who has the models.

    Raises `ServerUnreachable`, or what the status stands for.
    """
    import httpx  # takes long; who asks a server nothing does not need it

    verify = tls.context() if url.startswith("https:") else False
    try:
        response = httpx.get(url, timeout=_TIMEOUT_S, verify=verify)
    except httpx.TransportError as error:
        raise ServerUnreachable(f"no metrics at {url}: {error}") from error
    if response.is_error:
        raise from_status(response.status_code, response.text[:200])
    return response.text
