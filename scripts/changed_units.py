#!/usr/bin/env python3
"""Compilation units that show the names of changed code: scripts/changed_units.py COMPILE_COMMANDS [BASE]

Prints, one a line, the C++ files of COMPILE_COMMANDS that clang-tidy has to read so that it sees every file of the
working tree whose code differs from commit BASE; all of them without BASE, or when the rules of naming differ. Changes
of comments alone do not count. A changed header is seen through one unit that includes it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

RULES = {".clang-tidy"}
FOLDERS = ("include", "src", "tools", "tests", "benchmarks")
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)
COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")', re.DOTALL)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def code(text: str) -> str:
    """The text without comments and without what separates its words."""
    return " ".join(COMMENT.sub(lambda match: match.group(1) or " ", text).split())


def changed_files(base: str) -> set[str]:
    names = set(git("diff", "--name-only", "--no-renames", base).split("\n"))
    names |= set(git("ls-files", "--others", "--exclude-standard").split("\n"))
    changed = set()
    for name in names:
        path = Path(name)
        if not path.is_file() or (path.suffix not in (".cpp", ".hpp", ".h", ".cuh") and name not in RULES):
            continue
        before = subprocess.run(["git", "show", f"{base}:{name}"], capture_output=True, text=True)
        if before.returncode != 0 or code(before.stdout) != code(path.read_text()):
            changed.add(name)
    return changed


def units_of(commands: Path) -> dict[str, list[str]]:
    """The files of the project that each unit consists of: one, or the members of a group that is compiled together."""
    root = Path.cwd()
    units: dict[str, list[str]] = {}
    tracked = set(git("ls-files", "--cached", "--others", "--exclude-standard", "*.cpp").split("\n"))
    for command in json.loads(commands.read_text()):
        path = Path(command["file"])
        if not path.is_relative_to(root):
            continue
        name = str(path.relative_to(root))
        if "/Unity/" in name and path.is_file():
            members = [Path(member) for member in INCLUDE.findall(path.read_text())]
            units[name] = [str(member.relative_to(root)) for member in members if member.is_relative_to(root)]
        elif name in tracked:
            units[name] = [name]
    return units


def reached(name: str, known: dict[str, list[str]]) -> set[str]:
    """Files of the project that `name` includes, itself among them."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        if file not in known:
            known[file] = []
            folders = [str(Path(file).parent), *FOLDERS]
            for include in INCLUDE.findall(Path(file).read_text()):
                paths = (os.path.normpath(f"{folder}/{include}") for folder in folders)
                known[file] += [path for path in paths if Path(path).is_file()][:1]
        waiting += known[file]
    return seen


def main() -> None:
    units = units_of(Path(sys.argv[1]))
    changed = changed_files(sys.argv[2]) if len(sys.argv) > 2 else RULES
    if changed & RULES:
        print("\n".join(units))
        return
    chosen = {unit for unit, members in units.items() if changed & set(members)}
    known: dict[str, list[str]] = {}
    sees = {unit: set().union(*(reached(member, known) for member in members)) for unit, members in units.items()}
    unseen = changed - set().union(*(sees[unit] for unit in chosen))
    while unseen:
        best = max(sees, key=lambda unit: len(unseen & sees[unit]))
        if not unseen & sees[best]:
            break  # headers of kernels alone, which clang-tidy does not read
        chosen.add(best)
        unseen -= sees[best]
    print("".join(f"{unit}\n" for unit in sorted(chosen)), end="")


if __name__ == "__main__":
    main()
