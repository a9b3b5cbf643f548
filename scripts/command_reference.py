#!/usr/bin/env python3
"""Writes docs/reference/command.md from what the ferry command says about itself:

    scripts/command_reference.py COMMAND [--check]

COMMAND is the path of a built ferry command. With --check the page is compared instead; exits 1 if it differs.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "reference" / "command.md"
# Guides of the subcommands, relative to the page.
GUIDES = {name: f"../{name}.md" for name in ("demo", "bench", "tune", "plan", "doctor")}
# Descriptions begin here, on the line of an entry that leaves room, else on the next one.
COLUMN = 30
NAMES = re.compile(r"^(?P<names>-\S+)(?: (?P<value>.+))?$")


def help_of(command: str, *subcommand: str) -> str:
    return subprocess.run([command, *subcommand, "--help"], check=True, capture_output=True, text=True).stdout


def entries(text: str, heading: str) -> list[tuple[str, str]]:
    """Entries below a heading, each with its description."""
    lines = text.splitlines()
    found = []
    for idx in range(lines.index(f"{heading}:") + 1, len(lines)):
        line = lines[idx]
        if line and not line.startswith(" "):
            break
        below = lines[idx + 1] if idx + 1 < len(lines) and lines[idx + 1].startswith(" " * COLUMN) else ""
        if line.strip() and not line.startswith(" " * COLUMN):
            found.append((line.strip(), below.strip()) if below else (line[:COLUMN].strip(), line[COLUMN:].strip()))
    return found


def escaped(text: str) -> str:
    """Markdown of a description: options that it names are code."""
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    parts = text.split("`")
    parts[::2] = [re.sub(r"(?<!\S)(\(?)(--[a-z-]+)", r"\1`\2`", part) for part in parts[::2]]
    return "`".join(parts)


def value_of(text: str) -> str:
    """Type, range and default as CLI11 writes them: INT:INT from 1 to 32=8."""
    text = re.sub(r"\{false\}", "", text)
    kind, _, default = text.partition("=")
    bounds = re.search(r":\w+ (?:in \[(\S+) - (\S+)\]|from (\S+) to (\S+))", kind)
    name = kind.split(":")[0]
    if name.startswith("{"):
        name = ", ".join(f"`{choice}`" for choice in name.strip("{}").split(","))
    if bounds:
        low, high = (bound for bound in bounds.groups() if bound)
        name += f", {low} to {high.removesuffix(',...')}"
    return name + (f", default {default}" if default else "")


def option_row(entry: str, meaning: str) -> str:
    found = NAMES.match(entry)
    names = (found["names"] if found else entry).replace("{false}", "")
    value = value_of(found["value"]) if found and found["value"] else ""
    shown = ", ".join(f"`{name}`" for name in names.split(","))
    return f"| {shown} | {escaped(value)} | {escaped(meaning)} |"


def page(command: str) -> str:
    text = help_of(command)
    lines = [
        "# The ferry command",
        "",
        "`ferry SUBCOMMAND [OPTION...]`. Written by `scripts/command_reference.py` from the command's own `--help`.",
        "",
    ]
    for name, description in entries(text, "Subcommands"):
        guide = f" [The guide]({GUIDES[name]}) shows it." if name in GUIDES else ""
        lines += [f"## ferry {name}", "", f"{escaped(description)}.{guide}", ""]
        lines += ["| option | value | meaning |", "|---|---|---|"]
        lines += [option_row(*entry) for entry in entries(help_of(command, name), "Options")]
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    commands = [argument for argument in arguments if argument != "--check"]
    if len(commands) != 1:
        print("usage: scripts/command_reference.py COMMAND [--check]", file=sys.stderr)
        return 2
    text = page(commands[0])
    if "--check" not in arguments:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE.name} is out of date: run scripts/command_reference.py {commands[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
