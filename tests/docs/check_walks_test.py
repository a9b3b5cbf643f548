#!/usr/bin/env -S python3 -B
"""check_walks.py accepts a good page and reports each kind of breach with the line of the page."""

import contextlib
import pathlib
import tempfile
import unittest

from check_walks import PAGE, check

CODE = {
    "include/ferry/api.hpp": "Status send(int row);\n",
    "src/core/entry.hpp": '#include "ferry/api.hpp"\nstruct Backend {\n  virtual Status move(int row) = 0;\n};\n',
    "src/core/entry.cpp": '#include "core/entry.hpp"\nStatus send(int row) {\n  return backend->move(row);\n}\n',
    "src/cpu/mover.hpp": (
        '#include "core/entry.hpp"\nstruct Mover : Backend {\n  Status move(int row) override;\n};\n'
    ),
    "src/cpu/mover.cpp": (
        '#include "cpu/mover.hpp"\n#include "cpu/tools.hpp"\nStatus Mover::move(int row) try {\n  ring(row);\n}\n'
    ),
    "src/cpu/tools.hpp": '#include "cpu/store.hpp"\n',
    "src/cpu/store.hpp": "inline void ring(int row) { store(row); }\nvoid store(int row);\n// pack(row)\n",
    "src/cpu/store.cpp": '#include "cpu/store.hpp"\nvoid store(int row) {}\n',
    "src/cpu/stranger.cpp": "void store(int row) {}\n",
    "python/deep_ep/deep_ep/front.py": (
        "from deep_ep.middle import (\n    run,\n)\ndef send(row):\n    return run(row)\n"
    ),
    "python/deep_ep/deep_ep/middle.py": (
        "import os\nfrom ferry import native\ndef run(row):\n    call(row)  # other(row)\n"
    ),
    "python/deep_ep/deep_ep/__init__.py": "",
    "python/ferry/__init__.py": "",
    "python/ferry/native.pyi": "def enter(row: int) -> None: ...\n",
    "python/src/bind.hpp": '#include "ferry/api.hpp"\nvoid enter(int row);\n',
    "python/src/bind.cpp": '#include "bind.hpp"\nvoid bind() {\n  module.def(\n      "enter", &enter);\n}\n',
    "python/src/enter.cpp": '#include "bind.hpp"\nvoid enter(int row) {\n  send(row);\n}\n',
}
GOOD = """# Page

## One

1. `src/core/entry.cpp` `send` (`include/ferry/api.hpp`): checks
   and more.
2. `src/cpu/mover.cpp` `move` (`src/core/entry.hpp`, `src/cpu/mover.hpp`): moves
3. `src/cpu/store.cpp` `ring` → `store` (`src/cpu/store.hpp`): stores

## Two

1. `src/core/entry.cpp` `send` (`include/ferry/api.hpp`): checks

## Three

1. `src/core/entry.cpp` `send` (`include/ferry/api.hpp`): checks

## Four

1. `python/deep_ep/deep_ep/front.py` `send` (`python/deep_ep/deep_ep/front.py`): from Python
2. `python/deep_ep/deep_ep/middle.py` `run` (`python/deep_ep/deep_ep/middle.py`): more Python
3. `python/src/enter.cpp` `call` → `enter` (`python/ferry/native.pyi`, `python/src/bind.cpp`, `python/src/bind.hpp`):
   native
4. `include/ferry/api.hpp` `send` (`include/ferry/api.hpp`): ends
"""
STORE = "3. `src/cpu/store.cpp` `ring` → `store` (`src/cpu/store.hpp`): stores"


class CheckWalks(unittest.TestCase):
    def setUp(self) -> None:
        with contextlib.ExitStack() as stack:
            self.root = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self.addCleanup(stack.pop_all().close)
        for path, text in (CODE | {PAGE: GOOD}).items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(text, encoding="utf-8")

    def expect(self, old: str, new: str, breach: str, line: int) -> None:
        self.assertIn(old, GOOD)
        (self.root / PAGE).write_text(GOOD.replace(old, new), encoding="utf-8")
        self.assertIn(f"{PAGE}:{line}: {breach}", check(self.root))

    def test_good_page(self) -> None:
        self.assertEqual(check(self.root), [])

    def test_missing_file(self) -> None:
        self.expect("src/cpu/store.cpp", "src/cpu/shop.cpp", "src/cpu/shop.cpp does not exist", 8)

    def test_missing_header(self) -> None:
        self.expect("`src/cpu/mover.hpp`", "`src/cpu/m.hpp`", "src/cpu/m.hpp does not exist", 7)

    def test_function_that_is_not_called(self) -> None:
        self.expect("`ring` → `store`", "`store`", "src/cpu/mover.cpp does not call store", 8)

    def test_function_that_is_only_in_a_comment(self) -> None:
        self.expect("`ring` → `store`", "`pack` → `store`", "no header in brackets declares pack", 8)

    def test_function_that_is_not_defined(self) -> None:
        self.expect("`ring` → `store`", "`ring`", "src/cpu/store.cpp does not define ring", 8)

    def test_step_after_control_has_returned(self) -> None:
        back = "4. `src/cpu/mover.cpp` `move` (`src/core/entry.hpp`, `src/cpu/mover.hpp`): again"
        (self.root / PAGE).write_text(GOOD.replace(STORE, f"{STORE}\n{back}"), encoding="utf-8")
        self.assertEqual([], check(self.root))

    def test_file_without_connection(self) -> None:
        what = "neither of src/cpu/store.hpp and src/cpu/stranger.cpp includes the other"
        self.expect("src/cpu/store.cpp", "src/cpu/stranger.cpp", what, 8)

    def test_left_out_file(self) -> None:
        self.expect("2. `src/cpu/mover.cpp` `move` (`src/core/entry.hpp`, `src/cpu/mover.hpp`): moves\n3. ", "2. ",
                    "src/core/entry.cpp does not call ring", 7)  # fmt: skip

    def test_wrong_number(self) -> None:
        self.expect(STORE, STORE.replace("3.", "4."), "is number 4, expected 3", 8)

    def test_item_of_another_form(self) -> None:
        what = "is not a step: expected `file` `function` (`header`, …): text"
        self.expect(STORE, "3. Then it is stored.", what, 8)

    def test_too_many_files(self) -> None:
        steps = [f"{i}. `src/cpu/f{i}.cpp` `f` (`src/cpu/f.hpp`): text" for i in range(4, 6)]
        self.expect(STORE, "\n".join([STORE, *steps]), "One: 5 files, expected at most 4", 3)

    def test_too_few_walks(self) -> None:
        (self.root / PAGE).write_text(GOOD.replace("## Three", "").replace("## Four", ""), encoding="utf-8")
        self.assertIn(f"{PAGE}:1: has 2 walks, expected at least 3", check(self.root))

    def test_function_of_python_that_is_not_called(self) -> None:
        what = "python/deep_ep/deep_ep/middle.py does not call other"
        self.expect("`call` → `enter`", "`other` → `enter`", what, 22)

    def test_function_that_is_not_bound(self) -> None:
        (self.root / "python/src/bind.cpp").write_text('#include "bind.hpp"\n', encoding="utf-8")
        what = "neither of python/ferry/native.pyi and python/src/bind.cpp includes the other"
        self.expect("native\n", "native code\n", what, 22)

    def test_module_that_is_not_imported(self) -> None:
        (self.root / "python/deep_ep/deep_ep/front.py").write_text(
            "def send(row):\n    return run(row)\n", encoding="utf-8"
        )
        what = "neither of python/deep_ep/deep_ep/front.py and python/deep_ep/deep_ep/middle.py includes the other"
        self.expect("more Python", "even more Python", what, 21)

    def test_too_many_files_from_python(self) -> None:
        steps = [f"{i}. `src/cpu/f{i}.cpp` `f` (`src/cpu/f.hpp`): text" for i in range(5, 7)]
        last = "4. `include/ferry/api.hpp` `send` (`include/ferry/api.hpp`): ends"
        self.expect(last, "\n".join([last, *steps]), "Four: 6 files, expected at most 5", 18)


if __name__ == "__main__":
    unittest.main()
