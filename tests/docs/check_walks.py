#!/usr/bin/env python3
"""Checks docs/walks.md against the code: check_walks.py [root of the source tree]

A walk is a heading with numbered steps. A step names a file, the function entered there (or "called → entered" with an
inline function in between), and in brackets the headers through which the file before it sees that function:

    4. `src/cpu/row_copy.cpp` `copy_row` (`src/cpu/row_copy.hpp`): what happens there

For each step: the files exist; the file before it calls the function, or, where control has returned, the last of the
files above that calls it; a header declares it; this file defines the function entered; of each two neighbours in
(calling file, headers…, this file) one includes the other, directly or through other headers. A public header may end a
walk: it only declares the function.

Modules of Python include what they import. Python enters native code by the stub of the native module (`.pyi`) and the
file that binds the function, both in brackets: the stub declares the function, and the file names it in a `def` call.

Prints "page:line: problem" for each breach and exits 1 if there is one.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
import re
import sys
from dataclasses import dataclass

PAGE = "docs/walks.md"
MIN_WALKS = 3
MAX_FILES_IN_NODE = 4
MAX_FILES_TO_NETWORK = 7
MAX_FILES_FROM_PYTHON = 5
# A kernel ends in a ring whose words a thread of the host polls: no call leads there, so the rest is a walk of its own.
MAX_FILES_TO_RING = 5
NETWORK_FOLDER = "src/net/"
PYTHON_FOLDER = "python/"
PUBLIC_FOLDER = "include/"
INCLUDE_FOLDERS = ("src/", "include/", "python/src/")
PACKAGE_FOLDERS = ("python/", "python/deep_ep/")
STUB = ".pyi"
PYTHON = (".py", STUB)

STEP = re.compile(
    r"^(?P<number>\d+)\. `(?P<file>[^`]+)` `(?P<called>\w+)`(?: → `(?P<entered>\w+)`)? \((?P<headers>[^)]+)\):"
)
# Text between the parentheses of a definition and its body.
BODY = re.compile(r"\s*(?:const\b|noexcept\b|override\b|try\b|\s)*\{")
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
PYTHON_IMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+import\s+(\([^)]*\)|[^\n]+)|import\s+([\w., ]+))", re.MULTILINE)
PYTHON_COMMENT = re.compile(r'""".*?"""|#[^\n]*', re.DOTALL)


@dataclass
class Step:
    line: int
    number: int
    file: str
    called: str
    entered: str
    headers: list[str]


@dataclass
class Walk:
    line: int
    title: str
    steps: list[Step]

    @property
    def max_files(self) -> int:
        if any(step.file.startswith(PYTHON_FOLDER) for step in self.steps):
            return MAX_FILES_FROM_PYTHON
        if any(step.file.startswith(NETWORK_FOLDER) for step in self.steps):
            return MAX_FILES_TO_NETWORK
        ends_in_ring = pathlib.PurePath(self.steps[-1].file).stem.endswith("ring")
        return MAX_FILES_TO_RING if ends_in_ring else MAX_FILES_IN_NODE


def parse(text: str) -> list[Walk]:
    """Headings that have steps. A numbered item of another form becomes a walk of its own, whose step has no file."""
    walks: list[Walk] = []
    lines = text.splitlines()
    for idx, line in enumerate(lines):
        if line.startswith("## "):
            walks.append(Walk(idx + 1, line[3:], []))
        elif re.match(r"\d+\. ", line):
            end = idx + 1
            while end < len(lines) and lines[end].startswith("   "):
                end += 1
            item = " ".join(part.strip() for part in lines[idx:end])
            found = STEP.match(item)
            if not walks or not found:
                walks.append(Walk(idx + 1, "", [Step(idx + 1, 0, "", "", "", [])]))
                continue
            headers = re.findall(r"`([^`]+)`", found["headers"])
            entered = found["entered"] or found["called"]
            walks[-1].steps.append(
                Step(idx + 1, int(found["number"]), found["file"], found["called"], entered, headers)
            )
    return [walk for walk in walks if walk.steps]


class Tree:
    """Source files below `root`, by path relative to it. The only tree of a run, so its caches may keep it alive."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root

    @functools.cache  # noqa: B019
    def code(self, path: str) -> str:
        comment = PYTHON_COMMENT if path.endswith(PYTHON) else COMMENT
        return comment.sub("", (self.root / path).read_text(encoding="utf-8"))

    def exists(self, path: str) -> bool:
        return (self.root / path).is_file()

    @functools.cache  # noqa: B019
    def uses(self, path: str, function: str) -> tuple[bool, bool]:
        """Returns whether `path` defines the function, and whether it calls or declares it."""
        code = self.code(path)
        defines = calls = False
        if path.endswith(PYTHON):
            defines = re.search(rf"\bdef {function}\(", code) is not None
            calls = re.search(rf"(?<!def )\b{function}\(", code) is not None
            return defines, calls
        for found in re.finditer(rf"\b{function}(?:<[\w:, ]+>)?\(", code):
            depth = 1
            end = found.end()
            while depth > 0 and end < len(code):
                depth += {"(": 1, ")": -1}.get(code[end], 0)
                end += 1
            is_definition = BODY.match(code, end) is not None
            defines |= is_definition
            calls |= not is_definition
        return defines, calls

    def defines(self, path: str, function: str) -> bool:
        return self.uses(path, function)[0]

    def calls(self, path: str, function: str) -> bool:
        return self.uses(path, function)[1]

    @functools.cache  # noqa: B019
    def includes(self, path: str) -> frozenset[str]:
        """All files of the tree that `path` includes, directly or not, and `path` itself."""
        seen: set[str] = set()
        left = [path]
        while left:
            current = left.pop()
            if current in seen:
                continue
            seen.add(current)
            if current.endswith(PYTHON):
                left += self.imports(current)
                continue
            for header in INCLUDE.findall(self.code(current)):
                left += [folder + header for folder in INCLUDE_FOLDERS if self.exists(folder + header)]
        return frozenset(seen)

    def imports(self, path: str) -> list[str]:
        """Modules of the tree that a module of Python imports."""
        modules: list[str] = []
        for package, names, plain in PYTHON_IMPORT.findall(self.code(path)):
            if package:
                modules += [package, *(f"{package}.{name}" for name in re.findall(r"\w+", names))]
            modules += re.findall(r"[\w.]+", plain)
        paths = [folder + module.replace(".", "/") for folder in PACKAGE_FOLDERS for module in modules]
        return [path + end for path in paths for end in (*PYTHON, "/__init__.py") if self.exists(path + end)]

    def are_linked(self, one: str, other: str, function: str) -> bool:
        if one.endswith(STUB) and not other.endswith(PYTHON):
            return self.binds(other, function) and self.defines(one, function)
        return other in self.includes(one) or one in self.includes(other)

    def binds(self, path: str, function: str) -> bool:
        """Whether a native file makes the function known to Python."""
        return re.search(rf'\bdef\(\s*"{function}"', self.code(path)) is not None


def caller_of(tree: Tree, steps: list[Step], step: Step) -> Step | None:
    """The last of `steps`, those above `step`, whose file calls it; if none does, the last one."""
    for before in reversed(steps):
        if step.file and before.file and tree.exists(before.file) and tree.calls(before.file, step.called):
            return before
    return steps[-1] if steps else None


def check_step(tree: Tree, before: Step | None, step: Step) -> list[str]:
    if not step.file:
        return ["is not a step: expected `file` `function` (`header`, …): text"]
    missing = [path for path in (step.file, *step.headers) if not tree.exists(path)]
    if missing:
        return [f"{path} does not exist" for path in missing]
    if before is not None and not tree.exists(before.file):
        return []  # reported for the step before
    breaches = []
    if before is not None and not tree.calls(before.file, step.called):
        breaches.append(f"{before.file} does not call {step.called}")
    # The definition of an inline function declares it; the last step's function may be defined in a header itself.
    is_bound = any(path.endswith(STUB) for path in step.headers)
    declared = step.entered if is_bound else step.called
    if not any(True in tree.uses(path, declared) for path in (*step.headers, step.file)):
        breaches.append(f"no header in brackets declares {declared}")
    ends_here = step.file.startswith(PUBLIC_FOLDER) and tree.calls(step.file, step.entered)
    if not ends_here and not tree.defines(step.file, step.entered):
        breaches.append(f"{step.file} does not define {step.entered}")
    chain = [*([before.file] if before is not None else []), *step.headers, step.file]
    for one, other in itertools.pairwise(chain):
        if not tree.are_linked(one, other, step.entered):
            breaches.append(f"neither of {one} and {other} includes the other")
    return breaches


def check(root: pathlib.Path) -> list[str]:
    tree = Tree(root)
    walks = parse((root / PAGE).read_text(encoding="utf-8"))
    breaches = []
    if len(walks) < MIN_WALKS:
        breaches.append(f"{PAGE}:1: has {len(walks)} walks, expected at least {MIN_WALKS}")
    for walk in walks:
        num_files = len({step.file for step in walk.steps})
        if num_files > walk.max_files:
            breaches.append(f"{PAGE}:{walk.line}: {walk.title}: {num_files} files, expected at most {walk.max_files}")
        for position, step in enumerate(walk.steps):
            before = caller_of(tree, walk.steps[:position], step)
            found = check_step(tree, before, step)
            if step.file and step.number != position + 1:
                found.append(f"is number {step.number}, expected {position + 1}")
            breaches += [f"{PAGE}:{step.line}: {what}" for what in found]
    return breaches


def main() -> int:
    default_root = pathlib.Path(__file__).resolve().parents[2]
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default_root
    breaches = check(root)
    for breach in breaches:
        print(breach)
    if breaches:
        return 1
    print("the walks match the code")
    return 0


if __name__ == "__main__":
    sys.exit(main())
