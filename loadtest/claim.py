"""What a claim is made of: a way to measure it, the table and the plot that come out, and whether its goal is
met. Each stands in a module of its own, `claim_<name>.py`; `claims.py` is the command that measures them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

_BARS_AT, _LONGEST, _WIDTH = 270, 340, 720  # where bars begin, how long they get, all of it: pixels
_THICK, _LINE, _MARGIN = 16, 24, 16

# A ground of its own, so that it can be read on a page of either kind whatever the reader's system prefers.
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1b263b}.title{font-weight:600}.ground{fill:#f6f8fa}"
    ".off{fill:#94a3b8}.on{fill:#2563eb}@media(prefers-color-scheme:dark){text{fill:#e6edf3}"
    ".ground{fill:#161b22}.off{fill:#64748b}.on{fill:#60a5fa}}"
)


@dataclass(frozen=True)
class Bar:
    """`shown` is the value as the table has it; one that is `off` is what others are held against."""

    label: str
    value: float
    shown: str
    off: bool = False


@dataclass(frozen=True)
class Panel:
    """Bars of one quantity, the longest of them as long as the panel is wide."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Result:
    """A claim as measured: the table in Markdown, whether its goal is met, and the plot."""

    table: str
    met: bool
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Claim:
    """`exact`: it measures the same on every machine, so that a test can measure it again."""

    measure: Callable[[], Result]
    exact: bool


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; each row has as many cells as the header."""
    lines = [" | ".join(cells) for cells in (header, *rows)]
    lines.insert(1, "|".join("---" for _ in header))
    return "\n".join([f"| {lines[0]} |", f"|{lines[1]}|", *(f"| {line} |" for line in lines[2:])])


def svg(panels: Sequence[Panel]) -> str:
    """The panels, one below the other."""
    parts: list[str] = []
    y = _MARGIN
    for panel in panels:
        parts.append(f'<text class="title" x="{_MARGIN}" y="{y + 13}">{escape(panel.title)}</text>')
        y += _LINE
        longest = max(bar.value for bar in panel.bars) or 1.0
        for bar in panel.bars:
            width, kind = _LONGEST * bar.value / longest, "off" if bar.off else "on"
            parts += [
                f'<text x="{_MARGIN}" y="{y + 13}">{escape(bar.label)}</text>',
                f'<rect class="{kind}" x="{_BARS_AT}" y="{y}" width="{width:.1f}" height="{_THICK}"/>',
                f'<text class="value" x="{_BARS_AT + width + 8:.1f}" y="{y + 13}">{escape(bar.shown)}</text>',
            ]
            y += _LINE
        y += _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}">'
        f'<style>{_STYLE}</style><rect class="ground" width="{_WIDTH}" height="{y}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
