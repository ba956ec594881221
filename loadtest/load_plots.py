"""Plots as SVG that stands inside a page: lines and dots over two linear axes. `load_page.py` has their
colours.

A drawing library would be the heaviest dependency of the load test, for three kinds of marks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 14, 40
_MOST_POINTS = 600  # of a line; more cannot be seen

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """`labels` stand beside the points. `colour` is one of those of the page, 0 to 3."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    dots: bool = False  # no line
    dashed: bool = False
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Plot:
    """Both axes begin at 0. `limit` is a line across, with its name."""

    title: str
    x_axis: str
    y_axis: str
    series: tuple[Series, ...]
    limit: tuple[str, float] | None = None
    note: str = ""
    x_most: float | None = None


def ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to `most` or just above it."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / count
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    return [step * index for index in range(math.ceil(most / step - 1e-9) + 1)]


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """The highest of each stretch, so that no peak is lost."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / most)
    return [
        max(points[start : start + size], key=lambda point: point[1]) for start in range(0, len(points), size)
    ]


def svg(plot: Plot) -> str:
    """Without a title of its own; for people who cannot see it, one in words."""
    xs = [x for series in plot.series for x, _ in series.points]
    ys = [y for series in plot.series for _, y in series.points]
    top = max(ys, default=0.0)
    if plot.limit is not None and plot.limit[1] <= 2 * top:
        top = max(top, plot.limit[1])
    x_ticks, y_ticks = ticks(plot.x_most or max(xs, default=0.0)), ticks(top, 4)
    x_end = plot.x_most or x_ticks[-1]
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def at(point: Point) -> tuple[float, float]:
        x = _LEFT + (right - _LEFT) * point[0] / x_end
        return round(x, 1), round(bottom - (bottom - _TOP) * point[1] / y_ticks[-1], 1)

    parts = []
    for value in y_ticks:
        _, y = at((0, value))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{_short(value)}</text>'
        )
    for value in x_ticks:
        if value <= x_end * 1.001:
            x, _ = at((value, 0))
            parts.append(
                f'<text class="tick" x="{x}" y="{bottom + 16}" text-anchor="middle">{_short(value)}</text>'
            )
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(
        f'<text class="name" x="{(_LEFT + right) / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">'
        f"{escape(plot.x_axis)}</text>"
    )
    for series in plot.series:
        parts += _marks(series, at)
    if plot.limit is not None and plot.limit[1] <= y_ticks[-1]:
        name, value = plot.limit
        _, y = at((0, value))
        parts.append(f'<line class="limit" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="limit" x="{right}" y="{y - 4}" text-anchor="end">{escape(name)}</text>')
    words = f"{plot.title}: {plot.y_axis} over {plot.x_axis}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(words)}">'
        + "".join(parts)
        + "</svg>"
    )


def _marks(series: Series, at: Callable[[Point], Point]) -> list[str]:
    """`at` gives pixels."""
    points = [at(point) for point in thinned(series.points)]
    if series.dots:
        return [f'<circle class="c{series.colour}" cx="{x}" cy="{y}" r="2"/>' for x, y in points]
    dashed = " dashed" if series.dashed else ""
    path = " ".join(f"{x},{y}" for x, y in points)
    parts = [f'<polyline class="c{series.colour}{dashed}" points="{path}"/>']
    for (x, y), label in zip(points, series.labels, strict=False):
        parts.append(f'<circle class="c{series.colour}" cx="{x}" cy="{y}" r="3"/>')
        if label:
            anchor = "end" if x > _WIDTH - 60 else "middle"
            place = f'x="{x}" y="{max(y - 8, 10)}" text-anchor="{anchor}"'
            parts.append(f'<text class="label" {place}>{escape(label)}</text>')
    return parts


def _short(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.4g}"
