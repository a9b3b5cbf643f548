"""benchmarks/beside.py as a user sees it. Times are not checked."""

import json
import pathlib
import shutil
import sys
import xml.dom.minidom
from typing import Any

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))
import beside  # noqa: E402
import beside_report  # noqa: E402
import beside_ways  # noqa: E402

SHAPE = ["--device", "cpu", "--ranks", "2", "--hidden", "128", "--topk", "2", "--experts", "4"]
SMALL = [*SHAPE, "--layer-tokens", "5,8", "--latency-tokens", "1,3", "--iterations", "3", "--warm-up", "1"]


def run(path: pathlib.Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of a small comparison."""
    status = beside.main([*SMALL, *arguments, "--json", str(path / "out.json"), "--picture", str(path / "out.svg")])
    return status, json.loads((path / "out.json").read_text())


def original_from(path: pathlib.Path, code: str = "") -> str:
    """Folder with a package deep_ep that passes for the original: Ferry's with its version, and then ``code``."""
    import deep_ep

    package = path / "original/deep_ep"
    shutil.copytree(pathlib.Path(deep_ep.__file__).parent, package)
    (package / "_version.py").write_text('__version__ = "2.1.0"\n')
    with (package / "__init__.py").open("a") as file:
        file.write(code)
    return str(package.parent)


def test_every_way_gives_the_reference(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, result = run(tmp_path, "--original", original_from(tmp_path), "--layer-tokens", "5", "--rounds", "2")
    assert status == 0, capfd.readouterr()
    assert set(result["versions"]) == set(beside_ways.TITLES)
    assert result["versions"]["original"]["deep_ep"] == "2.1.0"
    assert "+ferry" in result["versions"]["deep_ep"]["deep_ep"]
    measured = {(line["measure"], line["dtype"], line["split"], line["tokens"]) for line in result["results"]}
    assert measured == {
        *(("latency", "fp8", split, tokens) for split in (False, True) for tokens in (1, 3)),
        *((measure, dtype, False, 5) for measure in ("layer", "pair") for dtype in ("bf16", "fp8")),
    }
    for line in result["results"]:
        assert set(line["ways"]) == set(beside_ways.TITLES)
        for way, column in line["ways"].items():
            if line["split"] and way.startswith("all_"):
                assert column == {"absent": "a collective has no halves"}
                continue
            assert len(column["us_all"]) == 2
            assert column["us"] == min(column["us_all"]) <= column["us_p50"]
            assert column["wire_bytes"] > 0
    assert "Ferry's deep_ep" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "_c = Buffer.combine\nBuffer.combine = lambda *a, **k: (2 * (r := _c(*a, **k))[0], *r[1:])\n",
            "a layer on rank",
        ),
        ("raise OSError('no symbol ncclX')\n", "OSError: no symbol ncclX"),
        ("import os\nos._exit(7)\n", "ended"),
    ],
)
def test_a_way_that_fails_says_why(tmp_path: pathlib.Path, code: str, reason: str) -> None:
    original = original_from(tmp_path, code)
    only = ("--ways", "original", "--measures", "layer", "--layer-tokens", "5,6", "--rounds", "2")
    status, result = run(tmp_path, "--original", original, *only)
    assert status == 1
    for line in result["results"]:
        assert reason in line["ways"]["original"]["failed"]


# Answers as a rank does, without torch: {way} decides how.
RANK = """
import json, os, sys
from multiprocessing.connection import Connection
options = json.loads(sys.argv[1])
way, rank, pipe = options["way"], options["rank"], Connection(options["pipe"])
with open(__file__ + way, "a") as starts:
    starts.write("started ")
pipe.send({"absent": "not installed"} if way == "original" else {"ready": {"pid": os.getpid()}})
while True:
    try:
        case = pipe.recv()
    except EOFError:
        break
    if way == "deep_ep":
        print("out of luck", flush=True)
        os._exit(1)
    if way == "all_to_all" and (case["dtype"], case["tokens"], rank) == ("bf16", 5, 1):
        continue
    bytes_of = {"logical_bytes": 8, "wire_bytes": 4 + 2 * rank}
    pipe.send({"us": (10.0 if way == "ferry" else 5.0) + rank, **bytes_of})
"""


@pytest.fixture
def scripted_ranks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs RANK in place of the program of a rank."""
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    monkeypatch.setattr(beside_ways, "RANK", rank)


@pytest.mark.usefixtures("scripted_ranks")
def test_the_others_go_on(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, result = run(tmp_path, "--measures", "layer", "--rounds", "2", "--limit-s", "2")
    assert status == 1
    first, second = (line for line in result["results"] if line["dtype"] == "bf16")
    assert first["tokens"] == 5
    assert first["ways"]["ferry"]["us_all"] == [11.0, 11.0], "the slowest rank's time"
    assert first["ways"]["ferry"]["wire_bytes"] == 5, "the mean of the ranks"
    assert first["ways"]["original"] == {"absent": "not installed"}
    assert first["ways"]["deep_ep"]["failed"].endswith("out of luck")
    assert first["ways"]["all_to_all"]["failed"].startswith("no answer of rank 1 within 2.0 s")
    for way in ("ferry", "all_to_all", "all_gather"):
        assert len(second["ways"][way]["us_all"]) == 2, "a way measures what it can"
    assert second["ways"]["deep_ep"]["failed"].endswith("out of luck")
    starts = {way: (tmp_path / f"rank.py{way}").read_text().split() for way in beside_ways.TITLES}
    assert {way: len(ranks) / 2 for way, ranks in starts.items()} == {
        "ferry": 1,
        "deep_ep": 2,
        "original": 1,
        "all_to_all": 2,
        "all_gather": 1,
    }
    said = capfd.readouterr().out
    assert "DeepEP, absent: not installed" in said
    xml.dom.minidom.parseString((tmp_path / "out.svg").read_text())


@pytest.mark.usefixtures("scripted_ranks")
def test_says_where_all_gather_wins(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, result = run(tmp_path, "--measures", "layer", "--ways", "ferry,all_gather", "--rounds", "1")
    wins = result["all_gather_wins"]
    assert [(win["what"], win["tokens"]) for win in wins] == [
        (f"layer, nothing cached, {dtype}", tokens) for dtype in ("bf16", "fp8") for tokens in (5, 8)
    ]
    assert wins[0]["times_faster"] == 11 / 6
    assert "8 tokens: 1.83 times as fast" in capfd.readouterr().out
    lines = [{"measure": "pair", "dtype": "fp8", "tokens": 1, "ways": {"ferry": {"us": 1}, "all_gather": {"us": 2}}}]
    assert beside_report.all_gather_wins(lines) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ways", "ferry,nccl"], "--ways: 'nccl', expected one of ferry, deep_ep"),
        (["--hidden", "64"], "--hidden is 64, expected a multiple of 128"),
        (["--experts", "3"], "must be a multiple of the 2 ranks"),
    ],
)
def test_refuses_wrong_options(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        beside.main([*SMALL, *arguments])
    assert message in capfd.readouterr().err
