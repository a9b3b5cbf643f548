"""Reads docstrings as the Python packages write them.

Arguments are entries "name: meaning" in a paragraph of their own, with or without a heading "Parameters"; they become
fields. An indented paragraph is code.
"""

from __future__ import annotations

import inspect
import itertools
import re
from typing import Any

import sphinx.util.inspect
from sphinx.application import Sphinx

HEADING = "Parameters"
NAME = r"\*{0,2}\w+(?: \([^)]*\))?"
ENTRY = re.compile(rf"({NAME}(?:, {NAME})*): +(\S.*)")


def paragraphs(lines: list[str]) -> list[list[str]]:
    return [list(group) for is_text, group in itertools.groupby(lines, key=bool) if is_text]


def is_code(paragraph: list[str]) -> bool:
    return all(line.startswith("    ") for line in paragraph)


def parameters_of(documented: Any) -> set[str] | None:
    """Names of the parameters of a function or class; None if there are none to be found."""
    function = documented.__init__ if inspect.isclass(documented) else documented
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def is_entry(line: str, parameters: set[str] | None) -> re.Match[str] | None:
    """Entry of the list; not a line of text that happens to begin with a word and a colon."""
    entry = ENTRY.fullmatch(line)
    return entry if entry and (parameters is None or set(names_of(entry)) & parameters) else None


def names_of(entry: re.Match[str]) -> list[str]:
    return re.sub(r" \([^)]*\)|[* ]", "", entry[1]).split(",")


def indented(paragraph: list[str], parameters: set[str] | None) -> list[str]:
    parts: list[str] = []
    for line in paragraph:
        for part in re.split(r"[;.] (?=\w+: )", line):
            parts.append(part if is_entry(part, parameters) else f"    {part}")
    return parts


def fields_of(paragraph: list[str], parameters: set[str] | None) -> list[str]:
    """Entries as fields; lines that are neither entries nor indented below one stay text.

    Where no line is indented, every line between two entries belongs to the first, and a line may have several entries.
    """
    if not any(line.startswith(" ") for line in paragraph):
        paragraph = indented(paragraph, parameters)
    lines: list[str] = []
    in_field = False
    for line in paragraph:
        entry = is_entry(line, parameters)
        if (entry is not None) != in_field and lines and not line.startswith(" "):
            lines.append("")
        if entry:
            # Sphinx takes a word before a space for the type.
            lines.append(f":param {','.join(names_of(entry))}: {entry[2]}")
            in_field = True
        else:
            lines.append(line)
            in_field = in_field and line.startswith(" ")
    return lines


def read_docstring(_app: Sphinx, _what: str, _name: str, documented: Any, _options: Any, lines: list[str]) -> None:
    read: list[str] = []
    parameters = parameters_of(documented)
    before = ""
    for paragraph in paragraphs(lines):
        if paragraph[0] == HEADING:
            paragraph = paragraph[2:]
        if is_entry(paragraph[0], parameters):
            read += fields_of(paragraph, parameters)
        elif is_code(paragraph) and before and not before.endswith("::") and not before.startswith(" "):
            read += ["::", "", *paragraph]
        else:
            read += paragraph
        before = paragraph[-1]
        read.append("")
    lines[:] = read


def read_signature(
    _app: Sphinx, what: str, _name: str, documented: Any, _options: Any, arguments: str | None, _returned: str | None
) -> tuple[str, None] | None:
    """Arguments of a class whose base is one of torch: the base's stand-in hides them."""
    if what != "class" or not (arguments or "").startswith("(*args"):
        return None
    signature = sphinx.util.inspect.signature(documented.__init__, bound_method=True)
    return sphinx.util.inspect.stringify_signature(signature, show_return_annotation=False), None


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-signature", read_signature)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
