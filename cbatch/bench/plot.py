"""A page with curves of each schedule's run over time: sequences in the batch, and output tokens a second."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence

from cbatch.bench.timeline import Piece

Curves = Mapping[str, Sequence[Piece]]  # schedule -> the timeline of its run

_PANELS = {"occupancy": "sequences in the batch", "tokens_per_second": "output tokens/s"}
_COLOURS = ("#0b6e4f", "#c8553d", "#3d5a98")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 250, 70, 20, 30, 40
_CAPTION = (
    "A static batch keeps its places until its longest row ends, so that it empties and the processor idles. "
    "Continuous batching fills a place at the step after it becomes free."
)


def page(curves: Curves, title: str) -> str:
    """An HTML page with an SVG for each panel, complete in itself: it loads nothing."""
    title = html.escape(title)
    panels = "\n".join(_svg(curves, panel, label) for panel, label in _PANELS.items())
    style = "body{font:14px sans-serif;max-width:780px;margin:2em auto}svg{width:100%}text{font-size:12px}"
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{style}</style>\n'
        f"<h1>{title}</h1>\n<p>{_CAPTION}</p>\n{panels}\n</html>\n"
    )


def _svg(curves: Curves, panel: str, label: str) -> str:
    longest = max((pieces[-1].end for pieces in curves.values() if pieces), default=1.0)
    highest = max((getattr(piece, panel) for pieces in curves.values() for piece in pieces), default=1.0) or 1.0
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(seconds: float) -> float:
        return round(_LEFT + seconds / longest * (right - _LEFT), 1)

    def y(value: float) -> float:
        return round(bottom - value / highest * (bottom - _TOP), 1)

    parts = [f'<text x="{_LEFT}" y="{_TOP - 12}">{label}</text>']
    parts += [
        f'<line x1="{_LEFT}" x2="{right}" y1="{y(tick)}" y2="{y(tick)}" stroke="#ddd"/>'
        f'<text x="{_LEFT - 8}" y="{y(tick) + 4}" text-anchor="end">{tick:,g}</text>'
        for tick in ticks(highest)
    ]
    parts += [
        f'<text x="{x(tick)}" y="{bottom + 18}" text-anchor="middle">{tick:g} s</text>' for tick in ticks(longest)
    ]
    for number, ((name, pieces), colour) in enumerate(zip(curves.items(), _COLOURS, strict=False)):
        points = " ".join(f"{x(seconds)},{y(value)}" for seconds, value in corners(pieces, panel))
        parts.append(f'<polyline class="{name}" points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{right - 100 * number}" y="{_TOP - 12}" text-anchor="end" fill="{colour}">{name}</text>'
        )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">' + "\n".join(parts) + "</svg>"


def corners(pieces: Sequence[Piece], panel: str) -> Iterator[tuple[float, float]]:
    """The corners of a curve, a staircase, as (seconds, value)."""
    for piece in pieces:
        value = getattr(piece, panel)
        yield piece.start, value
        yield piece.end, value


def ticks(highest: float) -> list[float]:
    """Round numbers from 0 to `highest`, four to nine of them."""
    size = 10.0 ** len(str(int(highest)))
    while highest / size < 4:
        size /= 2 if highest / size * 2 >= 4 else 10 if highest / size * 10 < 4 else 5
    return [step * size for step in range(int(highest / size) + 1)]
