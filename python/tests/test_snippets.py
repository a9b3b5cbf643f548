"""Snippets on pages for users are right: Python is read, and run where it is a whole program; C and C++ are compiled;
commands name options, targets and files that exist.
"""

from __future__ import annotations

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest
import snippets
import torch

import deep_ep
import ferry
import ferry.nn
import ferry.ops

PRELUDES = pathlib.Path(__file__).parent / "preludes"
# Names in snippets, and the modules and classes that they stand for.
OBJECTS = {
    "torch": torch,
    "ferry": ferry,
    "deep_ep": deep_ep,
    "group": ferry.Group,
    "members": ferry.Membership,
    "window": ferry.LoadWindow,
    "buffer": deep_ep.Buffer,
}


def checked(*languages: str) -> list[snippets.Snippet]:
    return [snippet for snippet in snippets.snippets(*languages) if not snippet.unchecked]


@pytest.mark.parametrize("snippet", checked("python"), ids=str)
def test_python(snippet: snippets.Snippet, tmp_path: pathlib.Path) -> None:
    tree = ast.parse(snippet.text)
    assert snippets.wrong_calls(tree, OBJECTS) == []
    if snippets.unknown_names(tree):
        return  # a part of a program
    program = tmp_path / "program.py"
    program.write_text(snippet.text, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    end = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, env=environment)
    assert end.returncode == 0, end.stderr


def compile_all(found: list[snippets.Snippet], unit: str, tmp_path: pathlib.Path, *command: str) -> None:
    """Compiles one file for all snippets; #line directives let errors name the pages."""
    assert found
    headers = tmp_path / "ferry"
    headers.mkdir()
    version = (snippets.ROOT / "include" / "ferry" / "version.hpp.in").read_text(encoding="utf-8")
    (headers / "version.hpp").write_text(re.sub(r"@\w+@", "0", version), encoding="utf-8")
    path = tmp_path / "snippets"
    path.write_text(unit, encoding="utf-8")
    places = [f"-I{snippets.ROOT / 'include'}", f"-I{tmp_path}", f"-I{PRELUDES}"]
    end = subprocess.run(
        [*command, "-fsyntax-only", *places, str(path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert end.returncode == 0, end.stderr


def test_cpp(tmp_path: pathlib.Path) -> None:
    parts = ['#include "prelude.hpp"']
    found = checked("cpp")
    for idx, snippet in enumerate(found):
        page = pathlib.PurePath(snippet.page).stem.replace("-", "_")
        body = re.sub(r"^#include .*$", "", snippet.text, flags=re.MULTILINE)
        parts.append(
            f"namespace page_{page} {{\nusing namespace any_page;\nvoid snippet_{idx}() {{\n"
            f'#line {snippet.line + 1} "{snippet.page}"\n{body}}}\n}}\n'
        )
    compiler = os.environ.get("CXX", "g++")
    compile_all(found, "\n".join(parts), tmp_path, compiler, "-std=c++20", "-x", "c++")


def test_c(tmp_path: pathlib.Path) -> None:
    parts = ['#include "prelude.h"']
    found = checked("c")
    for idx, snippet in enumerate(found):
        place = f'#line {snippet.line + 1} "{snippet.page}"\n'
        is_function = snippet.text.startswith("static ")
        parts.append(place + snippet.text if is_function else f"void snippet_{idx}(void) {{\n{place}{snippet.text}}}\n")
    compile_all(found, "\n".join(parts), tmp_path, os.environ.get("CC", "gcc"), "-std=c99", "-x", "c")


@pytest.mark.parametrize("snippet", checked("sh"), ids=str)
def test_commands(snippet: snippets.Snippet) -> None:
    end = subprocess.run(["bash", "-n"], input=snippet.text, capture_output=True, text=True, check=False)
    assert end.returncode == 0, end.stderr
    assert snippets.wrong_words(snippet.text) == []


def test_wrong_snippets_are_found() -> None:
    wrong = "group.dispatch(routing, rows=x)\nferry.no_such_name(1)\nferry.Group(backend='cpu')\ngroup.wait()\n"
    assert len(snippets.wrong_calls(ast.parse(wrong), OBJECTS)) == 3
    commands = "make demo ARGS='--nodse 2'\nferry bench --op pair --no-such\nexamples/none.py\nmake demo\n"
    assert len(snippets.wrong_words(commands)) == 3
