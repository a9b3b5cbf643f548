#!/usr/bin/env python3
"""Writes the tables of recorded results into the documents: each between the lines ``<!-- table: NAME -->`` and
``<!-- end -->``. With --check it changes nothing, and fails where a table differs from its records.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys

from recorded_tables import TABLES, TableError

ROOT = pathlib.Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^<!-- table: (\S+) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
OPENING = re.compile(r"^<!-- table: ", re.MULTILINE)


def rewritten(text: str) -> str:
    """The text of a document with its tables as the records have them."""
    if len(OPENING.findall(text)) != len(BLOCK.findall(text)):
        raise TableError('a "<!-- table: NAME -->" without its "<!-- end -->", or with spaces in its name')

    def block(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in TABLES:
            raise TableError(f'no table "{name}": {", ".join(TABLES)}')
        return f"<!-- table: {name} -->\n{TABLES[name]()}<!-- end -->"

    return BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a table is out of date")
    parser.add_argument(
        "documents", nargs="*", type=pathlib.Path, help="Markdown files; by default README.md and those of docs/"
    )
    options = parser.parse_args()
    failed = False
    for path in options.documents or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        try:
            old = path.read_text()
            new = rewritten(old)
        except (TableError, OSError, KeyError) as error:
            print(
                f"{path}: {error if not isinstance(error, KeyError) else f'a record has no {error}'}", file=sys.stderr
            )
            failed = True
            continue
        if old == new:
            continue
        if options.check:
            print(f"{path}: a table differs from its records; benchmarks/tables.py writes it anew", file=sys.stderr)
            failed = True
        else:
            path.write_text(new)
            print(f"{path}: tables written")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
