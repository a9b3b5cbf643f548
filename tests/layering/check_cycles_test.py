#!/usr/bin/env python3
"""check_cycles.py finds each kind of cycle, names its includes or imports, and accepts a tree without one."""

import subprocess
import sys
import tempfile
from pathlib import Path

CHECK = Path(__file__).with_name("check_cycles.py")
GOOD = {
    "src/a/one.hpp": "",
    "src/a/one.cpp": '#include "a/one.hpp"\n#include "b/two.hpp"\n',
    "src/a/three.hpp": '#include "a/one.hpp"\n',
    "src/b/two.hpp": '#include "b/two.hpp"\n#include <vector>\n',
    "python/ferry/__init__.py": "from ferry._one import One\n",
    "python/ferry/_one.py": "from ferry import _native\nfrom ferry._two import Two\n",
    "python/ferry/_two.py": "",
}


def check(extra: dict[str, str]) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as tree:
        for name, text in {**GOOD, **extra}.items():
            file = Path(tree, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        result = subprocess.run([sys.executable, CHECK, tree], capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


def expect(what: str, extra: dict[str, str], status: int, *texts: str) -> None:
    found, output = check(extra)
    if found != status or not all(text in output for text in texts):
        sys.exit(f"{what}: expected status {status} and {texts}, got {found} and:\n{output}")


expect("a good tree", {}, 0, "no cycles")
expect(
    "a pair of files",
    {"src/a/one.hpp": '\n#include "a/three.hpp"\n'},
    1,
    "cycle of files: src/a/one -> src/a/three -> src/a/one",
    'src/a/one.hpp:2: includes "a/three.hpp"',
    'src/a/three.hpp:1: includes "a/one.hpp"',
)
expect(
    "a cycle through a source file",
    {"src/a/three.cpp": '#include "a/four.hpp"\n', "src/a/four.hpp": '#include "a/three.hpp"\n'},
    1,
    "cycle of files: src/a/four -> src/a/three -> src/a/four",
)
expect(
    "folders",
    {"src/b/four.hpp": '#include "a/three.hpp"\n'},
    1,
    "cycle of folders: src/a -> src/b -> src/a",
    'src/b/four.hpp:1: includes "a/three.hpp"',
)
expect(
    "a folder and the one above it",
    {"src/a/in/five.hpp": '#include "a/one.hpp"\n', "src/a/six.cpp": '#include "a/in/five.hpp"\n'},
    1,
    "cycle of folders: src/a -> src/a/in -> src/a",
)
expect(
    "three folders",
    {"src/b/four.hpp": '#include "c/seven.hpp"\n', "src/c/seven.hpp": '#include "a/three.hpp"\n'},
    1,
    "cycle of folders: src/a -> src/b -> src/c -> src/a",
)
for line in ("from ferry._one import One", "from ._one import One", "from . import _one", "import ferry._one"):
    text = f"def use():\n    {line}\n"
    expect(
        f"modules, by {line}",
        {"python/ferry/_two.py": text},
        1,
        "cycle of modules: ferry._one -> ferry._two -> ferry._one",
        "python/ferry/_two.py:2: imports ferry._one",
    )
print("the check finds every kind of cycle")
