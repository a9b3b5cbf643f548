"""Tables of recorded results in the documents: stale ones fail the check, and are written anew from the records."""

import pathlib
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).parents[2] / "benchmarks" / "tables.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_table_is_written_and_a_changed_figure_is_found(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- table: gpu-calls -->\n<!-- end -->\n\nafter\n")
    assert run("--check", str(page)).returncode == 1
    assert run(str(page)).returncode == 0
    written = page.read_text()
    assert written.startswith("before\n") and written.endswith("<!-- end -->\n\nafter\n")
    assert "| 4 H200 | T = 4096 | 261, 0.93 | 485, 0.95 | 500, 0.92 |" in written
    assert run("--check", str(page)).returncode == 0
    page.write_text(written.replace("485, 0.95", "475, 0.95"))
    stale = run("--check", str(page))
    assert stale.returncode == 1 and "differs from its records" in stale.stderr
    assert "475" in page.read_text()


def test_marks_that_are_wrong_are_named(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table: gpu-cals -->\n<!-- end -->\n")
    unknown = run("--check", str(page))
    assert unknown.returncode == 1 and 'no table "gpu-cals"' in unknown.stderr and "gpu-calls" in unknown.stderr
    page.write_text("<!-- table: gpu-calls -->\n\ntext\n")
    assert run(str(page)).returncode == 1
    assert page.read_text() == "<!-- table: gpu-calls -->\n\ntext\n"
    assert run("--check", str(tmp_path / "absent.md")).returncode == 1
