#!/usr/bin/env python3
"""Checks that docs/variables.md lists the environment variables that are read: check_variables.py [root of the tree]

A string of the code is the name of a variable that is read if it is an argument of getenv, os.environ and the like, the
value of a constant whose name says "variable", or begins like the variables of Ferry, a launcher or a library. Prints
each variable that the page lacks, and each that it lists although no code reads it, and exits 1 if there is one.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = "docs/variables.md"
FOLDERS = ["src", "include", "tools", "python/src", "python/ferry", "python/deep_ep/deep_ep"]
SUFFIXES = {".cpp", ".hpp", ".h", ".cu", ".cuh", ".py"}
NAME = r"[A-Z][A-Z0-9_]*"
FAMILIES = "FERRY|DEEP_EP|EP|NVSHMEM|NCCL|UCX|CUDA|SLURM|OMPI|PMI|PMIX|MPI|MASTER|TORCHELASTIC|LOCAL|LC|TOPK"
DIRECT = re.compile(rf'(?:getenv|environ\.get|is_set|lookup)\(\s*"({NAME})"|environ\[\s*"({NAME})"')
CONSTANT = re.compile(rf'\b\w*variable\w*\s*=\s*\(?"({NAME})"', re.IGNORECASE)
OF_FAMILY = re.compile(rf'"((?:{FAMILIES})_[A-Z0-9_]*[A-Z0-9]|RANK|WORLD_SIZE|LANG)"')
COMMENT = re.compile(r"^\s*(//|#(?!\s*(include|define)))")
LISTED = re.compile(rf"`({NAME})`")


def variables_read(root: Path) -> dict[str, str]:
    """Returns the first place of each variable."""
    places: dict[str, str] = {}
    for folder in FOLDERS:
        for file in sorted(path for path in (root / folder).rglob("*") if path.suffix in SUFFIXES):
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                if COMMENT.match(line):
                    continue
                for match in (m for pattern in (DIRECT, CONSTANT, OF_FAMILY) for m in pattern.finditer(line)):
                    name = next(group for group in match.groups() if group)
                    places.setdefault(name, f"{file.relative_to(root)}:{number}")
    return places


def variables_listed(page: Path) -> Iterator[tuple[str, int]]:
    """Yields each name in the first column of a table, with its line."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("|"):
            for name in LISTED.findall(line.split("|")[1]):
                yield name, number


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2])
    read = variables_read(root)
    listed = dict(variables_listed(root / PAGE))
    missing = sorted(read.keys() - listed.keys())
    stale = sorted(listed.keys() - read.keys())
    problems = [f"{read[name]}: reads {name}, which {PAGE} does not list" for name in missing]
    problems += [f"{PAGE}:{listed[name]}: lists {name}, which no code reads" for name in stale]
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems" if problems else f"{PAGE} lists all {len(read)} variables")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
