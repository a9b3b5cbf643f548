"""benchmarks/python/bench.py as a user sees it. Timings are not checked."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from network import skip_without_network

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks/python"
sys.path.insert(0, str(FOLDER))
import bench  # noqa: E402
import bench_kernels  # noqa: E402

SMALL = ["--ranks", "2", "--tokens", "8", "--hidden", "64", "--topk", "2", "--experts", "4", "--iterations", "2"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "bench.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


Measure = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def measure(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Measure:
    """The result of a small measurement with these arguments, and its printed output."""

    def fork(body: Any, arguments: tuple, num_ranks: int) -> None:
        """Ranks that need not load torch again."""
        mp.start_processes(body, arguments, num_ranks, start_method="fork")

    def measured(*arguments: str) -> tuple[dict[str, Any], str]:
        monkeypatch.setattr(bench.mp, "spawn", fork)
        path = tmp_path / "result.json"
        bench.main([*SMALL, *arguments, "--json", str(path)])
        return json.loads(path.read_text()), capfd.readouterr().out

    return measured


def test_compares_both_ways(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "result.json"
    end = run(*SMALL, "--json", str(path))
    assert end.returncode == 0, end.stderr
    assert "all_to_all" in end.stdout
    result = json.loads(path.read_text())
    assert [line["op"] for line in result["results"]] == ["dispatch", "combine"]
    for line in result["results"]:
        assert line["times_faster"] == line["all_to_all_ms"] / line["ferry_ms"]


@pytest.mark.parametrize("what", [["--layer"], ["--layer", "--api", "deep_ep"], ["--latency", "--api", "deep_ep"]])
def test_measures_over_nodes(what: list[str], measure: Measure) -> None:
    skip_without_network()
    result, _ = measure(*what, "--device", "cpu", "--ranks-per-node", "1")
    assert result["shape"]["ranks_per_node"] == 1


@pytest.mark.parametrize("api", ["ferry", "deep_ep"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_measures_layers(api: str, dtype: str, measure: Measure) -> None:
    layer = ["--layer", "--api", api, "--dtype", dtype, "--device", "cpu", "--tokens", "3,8", "--hidden", "128"]
    result, printed = measure(*layer)
    assert f"a layer through {api}, 8 tokens" in printed
    assert (result["api"], result["shape"]["dtype"]) == (api, dtype)
    assert [line["tokens"] for line in result["results"]] == [3, 8]
    assert all(line["layer_us"] > 0 for line in result["results"])
    first = "route" if api == "ferry" else "layout"
    for line in result["results"]:
        assert list(line["host_us"]) == [first, "dispatch", "combine", "cached dispatch"]
        assert all(us > 0 for us in line["host_us"].values())


@pytest.mark.parametrize("api", ["ferry", "deep_ep"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_measures_latency_mode(api: str, dtype: str, measure: Measure) -> None:
    latency = ["--latency", "--api", api, "--dtype", dtype, "--device", "cpu", "--tokens", "1,3", "--hidden", "128"]
    split = ["--split"] if dtype == "fp8" else []
    result, printed = measure(*latency, *split)
    assert f"latency mode through {api}, {'split' if split else 'whole'} calls" in printed
    assert (result["api"], result["shape"]["dtype"], result["split"]) == (api, dtype, bool(split))
    assert result["order"] == ("exact" if api == "ferry" else "rank_sums")
    assert [line["tokens"] for line in result["results"]] == [1, 3]
    for line in result["results"]:
        assert all(line[time] > 0 for time in ("dispatch_us", "combine_us", "pair_us"))
        assert line["graph_pair_us"] is None, "CPUs have no graphs"
        assert line["kernel_times"] is None
        assert all(us > 0 for us in line["host_us"].values())


def test_kernel_times_are_those_of_the_packages_kernels() -> None:
    whole = "void ferry::cuda::(anonymous namespace)::combine_kernel<true, false>(ferry::cuda::LatencyCombineParams)"
    part = "ferry::cuda::(anonymous namespace)::quantize_kernel(ferry::cuda::Params)"
    events = [(whole, us) for us in (10.0, 14.0, 11.0)] + [(part, us) for us in (1.0, 2.0, 3.0, 2.0, 2.0, 9.0)]
    events += [("ncclDevKernel_AllReduce(ncclDevKernelArgs)", 99.0), ("sm90_gemm<float>", 50.0)]
    found = bench_kernels.summarise(bench_kernels.by_kernel(events), num_calls=3)
    assert [(one["name"], one["launches_per_call"]) for one in found["kernels"]] == [
        ("combine_kernel", 1),
        ("quantize_kernel", 2),
    ]
    assert [one["us_p50"] for one in found["kernels"]] == [11, 2]
    assert found["call_us"] == 15
    assert bench_kernels.short_name("void deep_ep::internode_ll::dispatch<true, 7168>(void*, float*)") == "dispatch"


def test_measures_kernels_where_there_are_gpus(tmp_path: pathlib.Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    path = tmp_path / "result.json"
    end = run(*SMALL, "--latency", "--kernel-times", "--device", "cuda", "--hidden", "128", "--json", str(path))
    assert end.returncode == 0, end.stderr
    assert "kernels of a dispatch" in end.stdout
    for call, kernels in json.loads(path.read_text())["results"][0]["kernel_times"].items():
        assert kernels["call_us"] > 0
        assert [one["launches_per_call"] for one in kernels["kernels"]] == [1], call


def test_refuses_options_of_another_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, message in (
        (["--layer", "--latency"], "give one of them"),
        (["--latency", "--host-time"], "give one of them"),
        (["--split"], "are for --latency"),
        (["--order", "exact"], "are for --latency"),
        (["--latency", "--api", "deep_ep", "--order", "exact"], "rank_sums"),
        (["--api", "deep_ep"], "are for --layer, --latency and --host-time"),
        (["--kernel-times"], "is for --latency on GPUs"),
        (["--latency", "--kernel-times", "--device", "cpu"], "is for --latency on GPUs"),
    ):
        with pytest.raises(SystemExit, match="2"):
            bench.main([*SMALL, *wrong])
        assert message in capsys.readouterr().err


def test_refuses_shapes_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--experts", "3"], ["--hidden", "7"], ["--topk", "5"], ["--tokens", "0"], ["--tokens", "3,8"]):
        with pytest.raises(SystemExit, match="2"):
            bench.main([*SMALL, *wrong])
        assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize("api", ["ferry", "deep_ep"])
def test_measures_what_calls_take_of_the_host(api: str, measure: Measure) -> None:
    result, printed = measure("--host-time", "--api", api, "--tokens", "8,3", "--split", "--device", "cpu")
    assert [line["tokens"] for line in result["results"]] == [8, 3]
    for line in result["results"]:
        assert {"dispatch", "combine", "latency dispatch", "latency combine"} <= set(line["host_us"])
        assert all(us > 0 for us in line["host_us"].values())
    assert f"calls through {api}, 3 tokens" in printed
