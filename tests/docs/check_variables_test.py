#!/usr/bin/env -S python3 -B
"""check_variables.py accepts a page that lists all variables, and reports those that are missing or not read."""

import contextlib
import io
import pathlib
import tempfile
import unittest
from unittest import mock

import check_variables

CODE = {
    "src/core/options.cpp": 'const char* kSizeVariable = "SIZE_OF_RING";\nconst char* v = std::getenv("PLAIN");\n',
    "src/net/launcher.cpp": '{.rank = "OMPI_COMM_WORLD_RANK"},\n// "UCX_COMMENTED"\nrefuse("FERRY_TEXT is wrong");\n',
    "tools/run/options.cpp": 'app.add_option("--size")->type_name("SIZE");\n',
    "python/ferry/front.py": 'os.environ["INDEXED"]\nos.environ.get("GOT", "0")\n',
}
GOOD = """| variable | values |
|---|---|
| `SIZE_OF_RING`, `PLAIN` | `NOT_A_NAME` |
| `OMPI_COMM_WORLD_RANK` | a number |
| `INDEXED` | |
| `GOT` | |

`OUTSIDE_OF_THE_TABLE` is not read.
"""


class Page(unittest.TestCase):
    def check(self, page: str) -> tuple[int, str]:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in {**CODE, check_variables.PAGE: page}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, encoding="utf-8")
            output = io.StringIO()
            with contextlib.redirect_stdout(output), mock.patch("sys.argv", ["check_variables.py", folder]):
                return check_variables.main(), output.getvalue()

    def test_a_complete_page_is_good(self) -> None:
        self.assertEqual(self.check(GOOD), (0, "docs/variables.md lists all 5 variables\n"))

    def test_each_variable_is_needed(self) -> None:
        for name in ("SIZE_OF_RING", "PLAIN", "OMPI_COMM_WORLD_RANK", "INDEXED", "GOT"):
            code, output = self.check(GOOD.replace(name, "X"))
            self.assertEqual(code, 1)
            self.assertRegex(output, rf":\d+: reads {name}, which docs/variables.md does not list\n")

    def test_a_variable_that_is_not_read_is_reported(self) -> None:
        code, output = self.check(GOOD.replace("`GOT`", "`GOT`, `FERRY_GONE`"))
        self.assertEqual(code, 1)
        self.assertEqual(output, "docs/variables.md:6: lists FERRY_GONE, which no code reads\n1 problems\n")


if __name__ == "__main__":
    unittest.main()
