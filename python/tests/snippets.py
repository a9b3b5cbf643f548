"""Snippets of code in the documentation: found, and checked without running them."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import pathlib
import re
import shlex
import textwrap
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
# Pages for users; those for developers quote parts of the code.
FOR_DEVELOPERS = {"adding-a-backend", "design", "memory-model", "transport", "walks"}
FOR_DEVELOPERS_PREFIX = "inside-"
FENCE = re.compile(r"^ *```(?P<language>\S*)(?: .*)?$")
# In front of a snippet that cannot be checked: <!-- unchecked: reason -->
UNCHECKED = re.compile(r"<!-- unchecked: (.+) -->")


@dataclasses.dataclass(frozen=True)
class Snippet:
    page: str
    line: int
    language: str
    text: str
    unchecked: str
    """Reason for which it is not checked; empty: it is."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[pathlib.Path]:
    documents = [
        path
        for path in sorted((ROOT / "docs").glob("*.md"))
        if path.stem not in FOR_DEVELOPERS and not path.stem.startswith(FOR_DEVELOPERS_PREFIX)
    ]
    return [ROOT / "README.md", *documents, *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]


def snippets_of(text: str, page: str) -> Iterator[Snippet]:
    opened: re.Match[str] | None = None
    begin = 0
    before = ""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if opened is None:
            opened, begin = FENCE.match(line), number
            if opened is None and line.strip():
                before = line
        elif line.strip() == "```":
            body = textwrap.dedent("\n".join(lines[begin : number - 1])) + "\n"
            reason = UNCHECKED.search(before)
            yield Snippet(page, begin, opened["language"], body, reason[1] if reason else "")
            opened, before = None, ""


def snippets(*languages: str) -> list[Snippet]:
    found = []
    for path in pages():
        page = str(path.relative_to(ROOT))
        found += [it for it in snippets_of(path.read_text(encoding="utf-8"), page) if it.language in languages]
    return found


def unknown_names(tree: ast.Module) -> set[str]:
    """Names that a program reads and never sets."""
    known = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            known |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            known.add(node.name)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            known.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            known.add(node.id)
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return read - known


def wrong_calls(tree: ast.Module, objects: dict[str, object]) -> list[str]:
    """Attributes that objects of these names lack, and calls whose arguments their functions do not take."""
    wrong = []
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        path = path_of(node.func if isinstance(node, ast.Call) else node)
        if id(node) in called or not path or path[0] not in objects:
            continue
        target = objects[path[0]]
        for name in path[1:]:
            if not hasattr(target, name):
                wrong.append(f"{'.'.join(path)}: {path[0]} has no {name}")
                break
            target = getattr(target, name)
        else:
            if isinstance(node, ast.Call) and callable(target):
                wrong += wrong_arguments(".".join(path), target, node, inspect.isclass(objects[path[0]]))
    return wrong


def path_of(node: ast.AST) -> list[str]:
    """Names of a.b.c; empty for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def wrong_arguments(name: str, function: object, call: ast.Call, is_method: bool) -> list[str]:
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return []
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    try:
        inspect.signature(function).bind(*([None] * is_method), *call.args, **keywords)  # type: ignore[arg-type]
    except TypeError as error:
        return [f"{name}: {error}"]
    except ValueError:  # functions of torch in C++ have no signature
        pass
    return []


def options_of_command() -> dict[str, set[str]]:
    """Options of each subcommand of ferry, from the page that a test of the command keeps up to date."""
    options: dict[str, set[str]] = {}
    subcommand = ""
    for line in (ROOT / "docs" / "reference" / "command.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## ferry "):
            subcommand = line.removeprefix("## ferry ")
            options[subcommand] = set()
        elif line.startswith("| `-"):
            options[subcommand] |= set(re.findall(r"`(-[^`]+)`", line.split(" | ")[0]))
    return options


def wrong_words(text: str) -> list[str]:
    """Options that ferry does not have, targets that the Makefile lacks, and files that do not exist."""
    options = options_of_command()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    built = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("**/CMakeLists.txt"))
    wrong = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for idx, word in enumerate(words):
            if word == "make" and idx + 1 < len(words):
                target = words[idx + 1]
                if not re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE):
                    wrong.append(f"make {target}: no such target")
                given = [it.removeprefix("ARGS=") for it in words if it.startswith("ARGS=")]
                wrong += wrong_options(target, shlex.split(given[0]) if given else [], options)
            elif word == "ferry" and idx + 1 < len(words) and words[idx - 1] != "cd":
                wrong += wrong_options(words[idx + 1], words[idx + 2 :], options, must_exist=True)
            elif word.startswith("build/release/benchmarks/"):
                if not re.search(rf"\b{pathlib.PurePath(word).name}\b", built):
                    wrong.append(f"{word}: not built")
            elif re.match(r"(\./)?(benchmarks|examples|scripts|python|tests)/", word) and not (ROOT / word).exists():
                wrong.append(f"{word}: no such file")
    return wrong


def wrong_options(
    subcommand: str, words: list[str], options: dict[str, set[str]], must_exist: bool = False
) -> list[str]:
    if subcommand not in options:
        return [f"ferry {subcommand}: no such subcommand"] if must_exist else []
    given = [word.split("=")[0] for word in words if word.startswith("--")]
    return [f"ferry {subcommand} {word}: no such option" for word in given if word not in options[subcommand]]
