#!/usr/bin/env python3
"""Checks that includes and imports have no cycles: check_cycles.py [root of the source tree]

C++ under src: no cycle between files (a header and the source files of its name count as one) or between folders.
Python packages: no cycle between modules. Prints each cycle, with one include or import for each of its arrows, and
exits 1 if there is one.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

CODE_SUFFIXES = {".hpp", ".cpp", ".h", ".c", ".cuh", ".cu"}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')
PYTHON_PACKAGES = ["python/ferry", "python/deep_ep/deep_ep"]
# For each node, the nodes it uses, each with the place of the include or import.
Graph = dict[str, dict[str, str]]


def add_arrow(graph: Graph, user: str, used: str, place: str) -> None:
    graph.setdefault(user, {})
    graph.setdefault(used, {})
    if user != used:
        graph[user].setdefault(used, place)


def includes(source: Path) -> Iterator[tuple[Path, Path, int]]:
    """Yields (file, included file, line) for each include of a file under `source`."""
    for file in sorted(path for path in source.rglob("*") if path.suffix in CODE_SUFFIXES):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            match = INCLUDE.match(line)
            if match and (source / match[1]).is_file():
                yield file, source / match[1], number


def include_graphs(root: Path) -> tuple[Graph, Graph]:
    """Returns the graphs of the files of src and of its folders."""
    files: Graph = {}
    folders: Graph = {}
    for user, used, line in includes(root / "src"):
        place = f'{user.relative_to(root)}:{line}: includes "{used.relative_to(root / "src")}"'
        stems = [str(file.relative_to(root).with_suffix("")) for file in (user, used)]
        add_arrow(files, *stems, place)
        add_arrow(folders, *(str(Path(stem).parent) for stem in stems), place)
    return files, folders


def module_name(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(node: ast.AST, module: str, is_package: bool) -> list[str]:
    """Every name by which the statement may import a module; the longest that names a module counts."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level > 0:
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
        base = ".".join([*parts, base] if base else parts)
    return [f"{base}.{alias.name}" for alias in node.names]


def import_graph(root: Path, package: Path) -> Graph:
    files = {module_name(file, package): file for file in sorted(package.rglob("*.py"))}
    graph: Graph = {}
    for module, file in files.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
            for name in imported_names(node, module, file.name == "__init__.py"):
                used = name if name in files else name.rpartition(".")[0]
                # A package's own modules may import the package: it is complete when they use it.
                if used in files and not module.startswith(f"{used}."):
                    add_arrow(graph, module, used, f"{file.relative_to(root)}:{node.lineno}: imports {used}")
    return graph


def find_cycles(graph: Graph) -> list[list[str]]:
    """Returns one shortest cycle of each group of nodes that reach each other."""
    cycles = []
    done: set[str] = set()
    for start in sorted(graph):
        if start in done:
            continue
        before: dict[str, str] = {}
        queue = [start]
        for node in queue:
            for used in graph[node]:
                if used not in before:
                    before[used] = node
                    queue.append(used)
        if start not in before:
            continue
        cycle = [start]
        while before[cycle[-1]] != start:
            cycle.append(before[cycle[-1]])
        cycle.reverse()
        cycles.append([cycle[-1], *cycle[:-1]])
        done.update(cycle)
    return cycles


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2])
    files, folders = include_graphs(root)
    graphs = [("files", files), ("folders", folders)]
    graphs += [("modules", import_graph(root, root / package)) for package in PYTHON_PACKAGES]
    num_cycles = 0
    for what, graph in graphs:
        for cycle in find_cycles(graph):
            num_cycles += 1
            print(f"cycle of {what}: {' -> '.join([*cycle, cycle[0]])}")
            for user, used in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
                print(f"  {graph[user][used]}")
    print(f"{num_cycles} cycles" if num_cycles > 0 else "no cycles")
    return 1 if num_cycles > 0 else 0


if __name__ == "__main__":
    sys.exit(main())
