#!/usr/bin/env python3
"""Relative links of Markdown documents lead to files, and to headings, that exist:  check_links.py document..."""

from __future__ import annotations

import functools
import pathlib
import re
import sys
from collections.abc import Iterator

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"#{1,6} +(.*)")
ELSEWHERE = re.compile(r"[a-z]+://|mailto:")


def lines_of_text(document: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Lines outside of code blocks, with their numbers."""
    in_code = False
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, line


def anchor_of(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@functools.cache
def anchors_of(document: pathlib.Path) -> frozenset[str]:
    anchors: list[str] = []
    for _, line in lines_of_text(document):
        if heading := HEADING.match(line):
            anchor = anchor_of(heading.group(1))
            num_before = anchors.count(anchor)
            anchors.append(anchor)
            if num_before:
                anchors.append(f"{anchor}-{num_before}")
    return frozenset(anchors)


def fault_of(document: pathlib.Path, target: str) -> str:
    """What is wrong with a link, or an empty string."""
    if ELSEWHERE.match(target):
        return ""
    path, _, anchor = target.partition("#")
    file = (document.parent / path).resolve() if path else document.resolve()
    if not file.exists():
        return f"link to {target}, which does not exist"
    if anchor and file.suffix == ".md" and anchor not in anchors_of(file):
        return f"link to {target}: {file.name} has no such heading"
    return ""


def main() -> int:
    num_faults = 0
    for name in sys.argv[1:]:
        document = pathlib.Path(name)
        for number, line in lines_of_text(document):
            for target in LINK.findall(line):
                if fault := fault_of(document, target):
                    print(f"{name}:{number}: {fault}")
                    num_faults += 1
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
