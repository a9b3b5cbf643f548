"""python benchmarks/python/bench.py: dispatch and combine compared with all_to_all_single, on the same tensors.

The baseline is ``torch.distributed.all_to_all_single`` over the process group: gather each rank's rows, exchange, and
for combine add them up again. Both know the counts beforehand; times are of the slowest rank, median of the iterations.
On GPUs the process group is nccl and times are between events on the stream.

With ``--layer`` the wall time of whole layers instead, called from Python with nothing cached: see ``bench_layer``.
With ``--latency`` that of the calls of latency mode: see ``bench_latency``.
With ``--host-time`` what calls of either mode take of the host: see ``bench_host``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_host import measure_host_time
from bench_latency import measure_latency
from bench_layer import APIS, DTYPES, measure_layers
from collectives import AllToAll
from exchanges import Rows
from latency_exchanges import ORDERS

import ferry

_WARM_UP = 3
_HOST_ITERATIONS = 200
_MS_PER_S = 1e3
_US_PER_MS = 1e3


def host_ms(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * _MS_PER_S


def stream_ms(call: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def slowest_ms(call: Callable[[], Any], iterations: int, device: torch.device) -> float:
    """Median over the iterations of the slowest rank's time. The first ones are warm-up and do not count."""
    time_once = stream_ms if device.type == "cuda" else host_ms
    times = []
    for _ in range(iterations + _WARM_UP):
        dist.barrier()
        elapsed = torch.tensor([time_once(call)], device=device)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        times.append(elapsed.item())
    return statistics.median(times[_WARM_UP:])


def call_us(call: Callable[[], Any]) -> float:
    """Host time of a call, with the GPU idle when it begins: median of many."""
    times = []
    for _ in range(_HOST_ITERATIONS):
        torch.cuda.synchronize()
        times.append(host_ms(call) * _US_PER_MS)
    return statistics.median(times)


def host_costs(group: ferry.Group, routing: ferry.Routing, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    """Host time of each call: the native part alone, the whole call, and the whole call with outputs given."""
    native = group._calls
    out, sums = group.empty(*y.shape, dtype=y.dtype), torch.empty_like(x)
    sent = (group, routing, x, None, None, out, None, None, False, False, 0, None)
    returned = (group, routing, y, None, None, False, None, sums, 0)
    return {
        "dispatch": {
            "native_us": call_us(lambda: native.dispatch(*sent)),
            "outputs_given_us": call_us(lambda: group.dispatch(routing, x, out=out, tables=False)),
            "whole_us": call_us(lambda: group.dispatch(routing, x, tables=False)),
        },
        "combine": {
            "native_us": call_us(lambda: native.combine(*returned)),
            "outputs_given_us": call_us(lambda: group.combine(routing, y, out=sums)),
            "whole_us": call_us(lambda: group.combine(routing, y)),
        },
    }


def describe(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Machine, software and shape of a result."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "command": "python benchmarks/python/bench.py",
        "commit": ferry.__commit__,
        "torch": torch.__version__,
        "host": {"name": socket.gethostname(), "cpu": cpu_name(), "num_cpus": os.cpu_count(), "gpu": gpu},
        "process_group": dist.get_backend(),
        "shape": {
            "ranks": dist.get_world_size(),
            "ranks_per_node": options.ranks_per_node,
            "tokens": options.tokens if options.layer or options.latency or options.host_time else options.tokens[0],
            "hidden": options.hidden,
            "topk": options.topk,
            "experts": options.experts,
            "dtype": options.dtype,
        },
        "iterations": options.iterations,
    }


def cpu_name() -> str | None:
    """Name that the kernel reports, or None."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return None


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    num_tokens = options.tokens[0]
    scores = torch.rand(num_tokens, options.experts, generator=generator)
    topk_idx = scores.topk(options.topk, dim=1).indices.to(device)
    x = torch.randn(num_tokens, options.hidden, generator=generator).to(device, torch.bfloat16)

    group = ferry.Group(dist.group.WORLD, device=device, ranks_per_node=options.ranks_per_node)
    routing = group.route(topk_idx, num_experts=options.experts)
    other = AllToAll(options, device)
    other.route(topk_idx)
    received = group.dispatch(routing, x, tables=False).x
    if not torch.equal(received, other.again(Rows(x)).rows.x):
        raise RuntimeError("dispatch: Ferry and all_to_all_single give different results; please report this bug")
    y = group.empty(len(received), options.hidden).copy_(received)
    torch.testing.assert_close(group.combine(routing, y).x, other.combine(y))

    out = torch.empty_like(x)
    times = {
        "dispatch": (
            slowest_ms(lambda: group.dispatch(routing, x, out=received, tables=False), options.iterations, device),
            slowest_ms(lambda: other.again(Rows(x)).rows.x, options.iterations, device),
        ),
        "combine": (
            slowest_ms(lambda: group.combine(routing, y, out=out), options.iterations, device),
            slowest_ms(lambda: other.combine(y), options.iterations, device),
        ),
    }
    costs = host_costs(group, routing, x, y) if device.type == "cuda" else None
    group.destroy()
    return {
        **describe(options, device),
        "results": [
            {"op": op, "ferry_ms": mine, "all_to_all_ms": theirs, "times_faster": theirs / mine}
            for op, (mine, theirs) in times.items()
        ],
        "host_costs": costs,
    }


def report(result: dict[str, Any], path: str | None) -> None:
    shape = ", ".join(f"{name} {value}" for name, value in result["shape"].items())
    print(
        f"Ferry {ferry.__version__} ({result['commit']}), torch {result['torch']}, {result['process_group']}: {shape}"
    )
    if "host_time" in result:
        report_host_time(result)
    elif "order" in result:
        report_latency(result)
    elif "api" in result:
        for line in result["results"]:
            calls = ", ".join(f"{call} {us:.1f}" for call, us in line["host_us"].items())
            print(
                f"a layer through {result['api']}, {line['tokens']} tokens: {line['layer_us']:.0f} us; on the host, in "
                f"us: {calls}"
            )
    else:
        report_comparison(result)
    if path is not None:
        with open(path, "w") as file:
            json.dump(result, file, indent=2)
            file.write("\n")


def report_host_time(result: dict[str, Any]) -> None:
    for line in result["results"]:
        print(f"on the host, calls through {result['api']}, {line['tokens']} tokens, in us")
        for call, us in line["host_us"].items():
            print(f"  {call:34} {us:6.1f}")


def report_latency(result: dict[str, Any]) -> None:
    how = f"{result['api']}, {'split' if result['split'] else 'whole'} calls, sums {result['order']}"
    for line in result["results"]:
        in_graph = "" if line["graph_pair_us"] is None else f" ({line['graph_pair_us']:.1f} in a graph)"
        print(
            f"latency mode through {how}, {line['tokens']} tokens, in us: dispatch {line['dispatch_us']:.1f}, combine "
            f"{line['combine_us']:.1f}, pair {line['pair_us']:.1f}{in_graph}; on the host: dispatch "
            f"{line['host_us']['dispatch']:.1f}, combine {line['host_us']['combine']:.1f}"
        )
        for call, kernels in (line["kernel_times"] or {}).items():
            names = ", ".join(f"{one['name']} {one['us_p50']:.1f}" for one in kernels["kernels"])
            print(f"  kernels of a {call}: {kernels['call_us']:.1f} ({names})")


def report_comparison(result: dict[str, Any]) -> None:
    print(f"{'':10}{'ferry':>12}{'all_to_all':>14}{'ratio':>8}")
    for line in result["results"]:
        mine, theirs = line["ferry_ms"], line["all_to_all_ms"]
        print(f"{line['op']:10}{mine:9.3f} ms{theirs:11.3f} ms{line['times_faster']:7.1f}x")
    for op, costs in (result["host_costs"] or {}).items():
        print(
            f"{op} on the host: {costs['native_us']:.1f} us native, {costs['outputs_given_us']:.1f} us with outputs "
            f"given, {costs['whole_us']:.1f} us with new ones"
        )


def run_rank(rank: int, options: argparse.Namespace, port: int) -> None:
    """``port``: where ranks of one host meet; 0: as given by a launcher's variables."""
    device = torch.device("cpu")
    backend = "gloo"
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
        backend = "nccl"
    if port:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=options.ranks)
    else:
        dist.init_process_group(backend)
    if options.layer:
        result = {**describe(options, device), "api": options.api, "results": measure_layers(options, device)}
    elif options.host_time:
        result = {**describe(options, device), "api": options.api, "host_time": True}
        result["results"] = measure_host_time(options, device)
    elif options.latency:
        how = {"api": options.api, "order": options.order, "split": options.split}
        result = {**describe(options, device), **how, "results": measure_latency(options, device)}
    else:
        result = measure(options, device)
    if dist.get_rank() == 0:
        report(result, options.json)
    dist.destroy_process_group()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/python/bench.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=8, help="rank processes to start (ignored under torchrun)")
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        default=0,
        help="ranks that share memory; fewer than a host has emulate nodes on it",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if each rank has one"
    )
    parser.add_argument(
        "--tokens",
        type=numbers,
        default=[1024],
        help="tokens of each rank; with --layer, --latency and --host-time also several",
    )
    parser.add_argument("--hidden", type=int, default=7168, help="channels of a token")
    parser.add_argument("--topk", type=int, default=8, help="experts of a token")
    parser.add_argument("--experts", type=int, default=256, help="experts of all ranks")
    parser.add_argument(
        "--iterations", type=int, help="timed ones (default 10, with --layer and --latency 40, with --host-time 200)"
    )
    parser.add_argument("--json", help="write the result to this file, too")
    parser.add_argument("--layer", action="store_true", help="wall time of layers with a new route each")
    parser.add_argument("--latency", action="store_true", help="wall time of the calls of latency mode")
    parser.add_argument("--host-time", action="store_true", help="what calls of kept routes take of the host")
    parser.add_argument(
        "--api", choices=APIS, default=APIS[0], help="with --layer, --latency, --host-time: through which package"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="of the rows; fp8 only with --layer (given), --latency and --host-time (in latency mode, made on the way)",
    )
    parser.add_argument("--order", choices=ORDERS, help="of sums in latency mode (deep_ep has rank_sums only)")
    parser.add_argument("--split", action="store_true", help="calls of latency mode as their two halves")
    parser.add_argument(
        "--kernel-times", action="store_true", help="with --latency on GPUs: also of the kernels alone, by the profiler"
    )
    options = parser.parse_args(arguments)
    if options.iterations is None:
        options.iterations = 200 if options.host_time else 40 if options.layer or options.latency else 10
    for name in ("ranks", "hidden", "topk", "experts", "iterations"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, expected at least 1")
    if options.ranks_per_node < 0:
        parser.error(f"--ranks-per-node is {options.ranks_per_node}, expected at least 0")
    if min(options.tokens) < 1:
        parser.error(f"--tokens: {min(options.tokens)}, expected at least 1")
    if options.layer + options.latency + options.host_time > 1:
        parser.error("--layer, --latency and --host-time measure different things; give one of them")
    measures_calls = options.layer or options.latency or options.host_time
    if not measures_calls and (len(options.tokens) > 1 or options.dtype != DTYPES[0] or options.api != APIS[0]):
        parser.error("several --tokens, --dtype fp8 and --api deep_ep are for --layer, --latency and --host-time")
    if not (options.latency or options.host_time) and (options.order is not None or options.split):
        parser.error("--order and --split are for --latency and --host-time")
    if options.api == "deep_ep" and options.order == "exact":
        parser.error("--order exact: deep_ep combines in the order rank_sums")
    if options.order is None:
        options.order = "rank_sums" if options.api == "deep_ep" else "exact"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        options.ranks = int(os.environ["WORLD_SIZE"])
    num_gpus = torch.cuda.device_count()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", options.ranks))
    if options.device == "auto":
        options.device = "cuda" if num_gpus >= local_ranks else "cpu"
    if options.kernel_times and not (options.latency and options.device == "cuda"):
        parser.error("--kernel-times is for --latency on GPUs")
    if options.device == "cuda" and num_gpus < local_ranks:
        parser.error(f"--device cuda: torch finds {num_gpus} GPUs for {local_ranks} ranks; nccl needs one for each")
    if options.experts % options.ranks or options.topk > options.experts:
        parser.error(f"--experts {options.experts} must be a multiple of the {options.ranks} ranks and at least --topk")
    if options.hidden % 8 or (options.dtype == "fp8" and options.hidden % 128):
        parser.error(
            f"--hidden {options.hidden}: expected a multiple of 8 (bf16: rows of 16 bytes) or 128 (fp8: blocks)"
        )
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        run_rank(int(os.environ["RANK"]), options, 0)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_rank, (options, port), options.ranks)


if __name__ == "__main__":
    main()
