#!/usr/bin/env python3
"""Draws the pictures of the documentation: scripts/pictures.py [--check]

Writes docs/pictures/*.svg; with --check compares them instead, and exits 1 if one differs. Colours are those of the
page that a picture is part of; in a file by itself they follow the reader's preference for light or dark.
"""

from __future__ import annotations

import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "docs" / "pictures"
STYLE = """
  .ferry { --alone-ink: #1f2328; --alone-quiet: #57606a; --alone-line: #c4cad1; --alone-paper: #f6f8fa;
    --ink: var(--color-foreground-primary, var(--alone-ink));
    --quiet: var(--color-foreground-secondary, var(--alone-quiet));
    --line: var(--color-background-border, var(--alone-line));
    --paper: var(--color-background-secondary, var(--alone-paper));
    font-family: system-ui, sans-serif; font-size: 13px }
  @media (prefers-color-scheme: dark) {
    .ferry { --alone-ink: #e6edf3; --alone-quiet: #9ea7b3; --alone-line: #3d444d; --alone-paper: #151b23 } }
  .ferry text { fill: var(--ink) } .ferry .quiet { fill: var(--quiet) } .ferry .title { font-weight: 600 }
  .ferry .box { fill: var(--paper); stroke: var(--line); stroke-width: 1.5 }
  .ferry .inner { fill: none; stroke: var(--line); stroke-dasharray: 4 3 }
  .ferry .token text { fill: #fff; font-weight: 600 }
  .ferry .a rect { fill: #1f6fd0 } .ferry .b rect { fill: #b35a10 }
  .ferry path.a { stroke: #3b8bea } .ferry path.b { stroke: #d9772b }
  .ferry .way { fill: none; stroke-width: 1.8 } .ferry .far { stroke-width: 3.5 }
  .ferry .rail { fill: none; stroke: var(--quiet); stroke-dasharray: 3 4 }
"""
ROW = 24


class Picture:
    def __init__(self, name: str, width: int, height: int, description: str) -> None:
        self.name = name
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="ferry" viewBox="0 0 {width} {height}" role="img"'
            f' aria-label="{description}">',
            f"<style>{STYLE}</style>",
            "<defs>",
            *(
                f'<marker id="{name}-{source}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
                f' markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
                for source, colour in (("a", "#3b8bea"), ("b", "#d9772b"))
            ),
            "</defs>",
        ]

    def box(self, x: int, y: int, width: int, height: int, kind: str = "box") -> None:
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>')

    def text(self, x: int, y: int, text: str, kind: str = "", anchor: str = "middle") -> None:
        attribute = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text{attribute} x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>')

    def token(self, x: int, y: int, text: str, width: int = 44, source: str = "") -> None:
        """A row whose middle is at the height y; its colour is that of the source of its text, a or b."""
        self.parts.append(f'<g class="token {source or text[0]}">')
        self.parts.append(f'<rect x="{x}" y="{y - 10}" width="{width}" height="20" rx="4"/>')
        self.text(x + width // 2, y + 5, text)
        self.parts.append("</g>")

    def way(self, begin: tuple[int, int], end: tuple[int, int], source: str, kind: str = "") -> None:
        (x1, y1), (x2, y2) = begin, end
        bend = (x2 - x1) // 2
        self.parts.append(
            f'<path class="way {source} {kind}" d="M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}"'
            f' marker-end="url(#{self.name}-{source})"/>'
        )

    def line(self, x1: int, y1: int, x2: int, y2: int, kind: str, source: str = "") -> None:
        end = f' marker-end="url(#{self.name}-{source})"' if source else ""
        self.parts.append(f'<path class="{kind} {source}" d="M{x1} {y1}L{x2} {y2}"{end}/>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def one_node() -> Picture:
    """The worked example of docs/overview.md, in layout kExperts without gaps."""
    picture = Picture(
        "one-node", 780, 372, "Two ranks: dispatch writes each token to the rows of its experts, combine sums them back"
    )
    bands = (44, 216)
    tokens = (("a0", "a1", "a2"), ("b0", "b1"))
    rows = (
        (("a0", 0), ("a1", 0), ("a1", 1), ("b0", 1)),
        (("a0", 2), ("b1", 2), ("a2", 3), ("b0", 3), ("b1", 3)),
    )
    for x, text in ((118, "tokens"), (390, "rows of the rank's experts"), (662, "sums of the tokens")):
        picture.text(x, 24, text, "title")
    for x, text in ((246, "dispatch"), (534, "combine")):
        picture.text(x, 24, f"{text} \N{RIGHTWARDS ARROW}", "quiet")
    height = 146
    places: dict[str, int] = {}
    for rank, top in enumerate(bands):
        picture.box(10, top, 760, height)
        picture.text(24, top + 22, f"rank {rank}", "title", "start")
        for idx, token in enumerate(tokens[rank]):
            places[token] = top + height // 2 + round((idx - (len(tokens[rank]) - 1) / 2) * (ROW + 6))
    for rank, top in enumerate(bands):
        for idx, (token, expert) in enumerate(rows[rank]):
            y = top + height // 2 + round((idx - (len(rows[rank]) - 1) / 2) * (ROW + 2))
            picture.way((142, places[token]), (330, y), token[0])
            picture.way((450, y), (638, places[token]), token[0])
            picture.token(332, y, f"{token} \N{MIDDLE DOT} expert {expert}", 116)
    for token, y in places.items():
        picture.token(96, y, token)
        picture.token(640, y, token)
    return picture


def two_nodes() -> Picture:
    picture = Picture(
        "two-nodes", 780, 400, "A token crosses the network once along its rail; the rank there writes it to its node"
    )
    for top, title in ((10, "dispatch"), (206, "combine")):
        for left, node in ((90, 0), (530, 1)):
            picture.box(left, top, 240, 184)
            picture.text(left + 120, top + 20, f"node {node}", "title")
            for idx in (0, 1):
                y = top + 34 + idx * 74
                picture.box(left + 12, y, 216, 62, "inner")
                picture.text(left + 24, y + 18, f"rank {2 * node + idx}", "quiet", "start")
        picture.text(14, top + 20, title, "title", "start")
        picture.line(332, top + 139, 530, top + 139, "rail")
        picture.text(430, top + 133, "rail 1", "quiet")
        picture.text(430, top + 58, "rail 0, network", "quiet")
    # Dispatch: one row crosses, and becomes two rows.
    picture.token(240, 74, "a0", 60)
    picture.line(302, 74, 610, 74, "way far", "a")
    picture.text(430, 94, "one row")
    picture.token(612, 74, "a0 \N{MIDDLE DOT} expert 4", 134)
    picture.line(680, 86, 680, 138, "way", "a")
    picture.text(690, 116, "memory", "quiet", "start")
    picture.token(612, 150, "a0 \N{MIDDLE DOT} expert 6", 134)
    # Combine: two rows become one sum, which crosses.
    picture.token(612, 346, "a0 \N{MIDDLE DOT} expert 6", 134)
    picture.line(680, 334, 680, 282, "way", "a")
    picture.text(690, 314, "memory", "quiet", "start")
    picture.token(612, 270, "sum of the node", 134, "a")
    picture.line(610, 270, 302, 270, "way far", "a")
    picture.text(430, 290, "one row")
    picture.token(240, 270, "sum", 60, "a")
    return picture


def main() -> int:
    differing = 0
    for picture in (one_node(), two_nodes()):
        path = FOLDER / f"{picture.name}.svg"
        if "--check" not in sys.argv[1:]:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(picture.svg(), encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != picture.svg():
            print(f"{path.relative_to(FOLDER.parents[1])} differs from what scripts/pictures.py draws", file=sys.stderr)
            differing = 1
    return differing


if __name__ == "__main__":
    sys.exit(main())
