"""The picture of benchmarks/beside.py: a panel for each measure, times by tokens, one line a way. SVG as text."""

import math
import sys
from html import escape
from pathlib import Path

from beside_report import panels_of
from beside_ways import TITLES

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from pictures import Picture

_COLOURS = {
    "ferry": "#1f6fd0",
    "deep_ep": "#12a3a3",
    "original": "#b35a10",
    "all_to_all": "#8a4fbf",
    "all_gather": "#7a8793",
}
_COLUMNS = 2
_PANEL_WIDTH, _PANEL_HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 34, 30  # margins inside a panel
_LEGEND_HEIGHT = 64
_LETTER_WIDTH = 7  # about


class _Axes:
    """Places of a panel's points: tokens side by side, times on a logarithmic scale of whole steps of 1, 2, 5, 10."""

    def __init__(self, left, top, lines):
        self.left, self.top = left + _LEFT, top + _TOP
        self.width, self.height = _PANEL_WIDTH - _LEFT - _RIGHT, _PANEL_HEIGHT - _TOP - _BOTTOM
        self.lines = lines
        times = [column["us"] for line in lines for column in line["ways"].values() if "us" in column]
        ticks = [digit * 10**power for power in range(-1, 9) for digit in (1, 2, 5)]
        least, most = min(times), max(times)
        low = max((tick for tick in ticks if tick <= least), default=ticks[0])
        high = min((tick for tick in ticks if tick >= most), default=ticks[-1])
        if low == high:
            high = next(tick for tick in ticks if tick > low)
        self.ticks = [tick for tick in ticks if low <= tick <= high]

    def x(self, idx):
        return round(self.left + self.width * (idx + 0.5) / len(self.lines), 1)

    def y(self, us):
        low, high = self.ticks[0], self.ticks[-1]
        return round(self.top + self.height * (1 - math.log(us / low) / math.log(high / low)), 1)


def _panel(picture, left, top, title, lines):
    picture.box(left + 4, top + 4, _PANEL_WIDTH - 8, _PANEL_HEIGHT - 8)
    picture.text(left + 16, top + 24, escape(title), "title", "start")
    if not any("us" in column for line in lines for column in line["ways"].values()):
        picture.text(left + _PANEL_WIDTH // 2, top + _PANEL_HEIGHT // 2, "not measured", "quiet")
        return
    axes = _Axes(left, top, lines)
    for tick in axes.ticks:
        picture.line(axes.left, axes.y(tick), axes.left + axes.width, axes.y(tick), "rail")
        picture.text(axes.left - 6, axes.y(tick) + 4, f"{tick:g}", "quiet", "end")
    for idx, line in enumerate(lines):
        picture.text(axes.x(idx), top + _PANEL_HEIGHT - 14, f"{line['tokens']}", "quiet")
    for way, colour in _COLOURS.items():
        points = [
            (axes.x(idx), axes.y(line["ways"][way]["us"]))
            for idx, line in enumerate(lines)
            if "us" in line["ways"].get(way, {})
        ]
        path = " ".join(f"{x},{y}" for x, y in points)
        picture.parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        picture.parts += [f'<circle fill="{colour}" cx="{x}" cy="{y}" r="3"/>' for x, y in points]


def picture_of(result):
    """SVG of a result."""
    panels = panels_of(result)
    num_rows = math.ceil(len(panels) / _COLUMNS)
    width, height = _COLUMNS * _PANEL_WIDTH, _LEGEND_HEIGHT + num_rows * _PANEL_HEIGHT
    picture = Picture("beside", width, height, "Time of a step in microseconds by tokens of a rank, for each way")
    shape = ", ".join(f"{name} {value}" for name, value in result["shape"].items())
    where = result["gpu"] or f"{result['host']['num_cpus']} CPUs"
    title = (
        f"Time of a step in \N{MICRO SIGN}s by tokens of a rank, least of {result['rounds']} rounds: {where}, {shape}"
    )
    picture.text(12, 22, escape(title), "title", "start")
    left = 12
    for way, colour in _COLOURS.items():
        picture.parts.append(f'<circle fill="{colour}" cx="{left + 5}" cy="44" r="5"/>')
        picture.text(left + 16, 49, escape(TITLES[way]), "", "start")
        left += 44 + len(TITLES[way]) * _LETTER_WIDTH
    for idx, (panel_title, lines) in enumerate(panels.items()):
        left, top = idx % _COLUMNS * _PANEL_WIDTH, _LEGEND_HEIGHT + idx // _COLUMNS * _PANEL_HEIGHT
        _panel(picture, left, top, panel_title, lines)
    return picture.svg()
