"""The tutorials of the documentation: their programs print what the pages say."""

import pathlib

from test_examples import run

EXPECTED = pathlib.Path(__file__).with_name("first_exchange.txt")


def test_first_exchange_prints_what_the_tutorial_shows() -> None:
    printed = run("22_first_exchange.py", "cpu", num_ranks=2).splitlines()
    assert sorted(printed) == sorted(EXPECTED.read_text(encoding="utf-8").splitlines())
