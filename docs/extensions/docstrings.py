"""Reads docstrings as the Python packages write them.

Arguments are entries "name: meaning" in a paragraph of their own, with or without a heading "Parameters"; they become
fields. An indented paragraph is code.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from sphinx.application import Sphinx

HEADING = "Parameters"
NAME = r"\*{0,2}\w+(?: \([^)]*\))?"
ENTRY = re.compile(rf"({NAME}(?:, {NAME})*): +(\S.*)")


def paragraphs(lines: list[str]) -> list[list[str]]:
    return [list(group) for is_text, group in itertools.groupby(lines, key=bool) if is_text]


def is_code(paragraph: list[str]) -> bool:
    return all(line.startswith("    ") for line in paragraph)


def fields_of(paragraph: list[str]) -> list[str]:
    """Entries as fields; lines between them that are not indented, and what follows such a line, stay text."""
    lines: list[str] = []
    for line in paragraph:
        entry = ENTRY.fullmatch(line)
        if entry:
            # Sphinx takes a word before a space for the type.
            names = re.sub(r" \([^)]*\)|[* ]", "", entry[1])
            lines.append(f":param {names}: {entry[2]}")
        elif lines and not line.startswith(" ") and lines[-1]:
            lines += ["", line]
        else:
            lines.append(line)
    return lines


def read_docstring(_app: Sphinx, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    read: list[str] = []
    before = ""
    for paragraph in paragraphs(lines):
        if paragraph[0] == HEADING:
            paragraph = paragraph[2:]
        if ENTRY.fullmatch(paragraph[0]):
            read += fields_of(paragraph)
        elif is_code(paragraph) and before and not before.endswith("::") and not before.startswith(" "):
            read += ["::", "", *paragraph]
        else:
            read += paragraph
        before = paragraph[-1]
        read.append("")
    lines[:] = read


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", read_docstring, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
