"""The check of links in documents finds files and headings that do not exist, and nothing else."""

import pathlib
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).parents[2] / "scripts" / "check_links.py"


def check(document: pathlib.Path) -> tuple[int, list[str]]:
    command = [sys.executable, str(PROGRAM), document.name]
    end = subprocess.run(command, cwd=document.parent, capture_output=True, text=True, timeout=60, check=False)
    return end.returncode, end.stdout.splitlines()


def test_links_that_lead_somewhere(tmp_path: pathlib.Path) -> None:
    (tmp_path / "other.md").write_text("# Its `name`, and [more](page.md)\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n\n[a](other.md) [b](other.md#its-name-and-more) [c](other.md#twice-1) [d](#top) [e](https://a.b/c.md#d)\n\n"
        "```\n[not a link](absent.md)\n```\n"
    )
    assert check(page) == (0, [])


def test_links_that_lead_nowhere(tmp_path: pathlib.Path) -> None:
    (tmp_path / "other.md").write_text("# Other\n\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text("[a](absent.md)\n\n[b](other.md#no-heading) [c](#top)\n")
    code, lines = check(page)
    assert code == 1
    assert [line.split(":")[1] for line in lines] == ["1", "3", "3"]
    assert "absent.md, which does not exist" in lines[0] and "other.md has no such heading" in lines[1]
