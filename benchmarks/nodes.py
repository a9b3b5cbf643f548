#!/usr/bin/env -S python3 -B
"""Several nodes against the network alone: UCX's `ucx_perftest`, rings alone and `ferry bench` alternate in one run.

    benchmarks/nodes.py                      ranks of this host, over its loopback interface
    benchmarks/nodes.py --rate-mbit 1000     two network namespaces joined by a link of that rate each way (root)
    benchmarks/nodes.py --copy-mbit 10000    ranks as threads, the network a copy that takes the time of such a link
    benchmarks/nodes.py --backend cuda --ranks 2 --dtype bf16 --dtype fp8 --transport tcp --copy-mbit 10000
    benchmarks/nodes.py --latency 1,8,128    latency mode instead, against one node and the network's trips

GPU ranks that are processes want a GPU each: on one they take turns in time slices, and a round of latency mode is not
over after 100 seconds. Threads (--copy-mbit) do not.

A round is: ucx_perftest with one pair of processes, with one pair each way at once, and with as many pairs as there are
rails each way at once, in puts of 1 MB and again of a ring's chunk, as many outstanding as a ring has chunks; then
`ferry bench`, then for each call the rings alone (benchmarks/rail_stage.cpp) with as many bytes as the call sent: the
time that it takes beyond that is spent in memory. Rates count all bytes of both directions together. All figures are
medians of the rounds, and ratios are those of the medians.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/netns"))

from hosts import Failure, Missing, ThisHost, TwoHosts
from nodes_latency import measure_latency, show_latency, summarise_latency
from nodes_puts import Puts, perftest
from nodes_report import Rounds, show, summarise
from nodes_runs import FERRY, RAIL_STAGE, TRANSPORTS, Ranks, calls_of
from programs import run_script

ROOT = Path(__file__).resolve().parents[1]


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/release", help="default: build/release")
    parser.add_argument(
        "--transport", choices=sorted(TRANSPORTS), action="append", help="default: tcp, unless there is --copy-mbit"
    )
    parser.add_argument("--rate-mbit", type=int, help="two hosts as namespaces; tcp only")
    parser.add_argument("--copy-mbit", type=int, action="append", default=[], help="loopback engine held to this rate")
    parser.add_argument(
        "--backend", choices=["cpu", "cuda"], default="cpu", help="of the calls; rings are as it has them"
    )
    parser.add_argument(
        "--latency",
        type=lambda text: [int(part) for part in text.split(",")],
        metavar="TOKENS",
        help="latency mode for these numbers of tokens, fp8 out and sums of ranks back, and nothing else",
    )
    parser.add_argument("--no-puts", action="store_true", help="leave ucx_perftest out, where it is not installed")
    parser.add_argument("--put-seconds", type=float, default=3, help="of each run of ucx_perftest; TCP needs some")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument(
        "--dtype", choices=["bf16", "fp8"], action="append", help="of dispatch, default: bf16; combine is bf16"
    )
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args()
    if not options.transport:
        options.transport = [] if options.copy_mbit else ["tcp"]
    options.dtype = options.dtype or ["bf16"]
    if options.rate_mbit and (options.transport != ["tcp"] or options.nodes != 2):
        parser.error("--rate-mbit is for two nodes over tcp")
    if options.nodes < 2 or options.ranks % options.nodes != 0:
        parser.error("--ranks is a multiple of --nodes, which is at least 2")
    return options


@contextlib.contextmanager
def connected_hosts(rate_mbit):
    """The hosts, what their network is, and the environment that makes UCX use it."""
    if not rate_mbit:
        yield ThisHost(), "the loopback interface", {}
        return
    network = f"two network namespaces, a veth pair held to {rate_mbit} Mbit/s each way by tbf"
    with TwoHosts(["data"]) as hosts, hosts.rate_limit("data", rate_mbit, burst="256k", latency="20ms"):
        yield hosts, network, {"UCX_NET_DEVICES": "data"}


def measure(options, ranks, puts, name):
    """All rounds: what was built, from the reports of `ferry bench`, and what was measured."""
    num_rails = options.ranks // options.nodes
    rounds = Rounds()
    if puts:
        puts.use_chunks(*ranks.ring_shape())
        puts.settle(num_rails)
    for round_idx in range(options.rounds):
        print(f"{name}: round {round_idx + 1} of {options.rounds}", file=sys.stderr)
        if puts:
            rounds.add_puts(puts.measure(num_rails))
        for dtype in options.dtype:
            bench = ranks.bench(dtype, with_combine=dtype == options.dtype[0])
            for call in calls_of(bench):
                rounds.add_call(call, ranks.stage(call))
    return rounds, bench


def measure_transport(options, transport):
    with connected_hosts(options.rate_mbit) as (hosts, network, network_environment):
        environment = {**os.environ, **TRANSPORTS[transport], **network_environment}
        if options.latency:
            rounds, bench = measure_latency(options, Ranks(options, hosts, environment), transport)
            return bench, summarise_latency(transport, network, rounds, bench)
        puts = None if options.no_puts else Puts(hosts, environment, options.put_seconds)
        rounds, bench = measure(options, Ranks(options, hosts, environment), puts, transport)
    return bench, summarise(transport, network, rounds, bench)


def measure_copy(options, rate_mbit):
    """Ranks are threads, and the engine's copies take the time of a link of the rate to each rail peer."""
    environment = {**os.environ, "FERRY_LOOPBACK_RATE": str(rate_mbit * 125_000)}
    ranks = Ranks(options, ThisHost(), environment, threads=True)
    network = f"a copy between threads that takes the time of a link of {rate_mbit} Mbit/s"
    if options.latency:
        rounds, bench = measure_latency(options, ranks, "loopback")
        return bench, summarise_latency("loopback", network, rounds, bench)
    rounds, bench = measure(options, ranks, None, "loopback")
    rounds.link_gbps = rate_mbit / 8000 * options.ranks * (options.nodes - 1)
    return bench, summarise("loopback", network, rounds, bench)


def main():
    options = parse_options()
    # As an exception, so that namespaces and processes are removed.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    if options.transport and not (options.no_puts or options.latency) and perftest() is None:
        raise Missing("the command ucx_perftest: install UCX's tools (Debian: ucx-utils), or give --no-puts")
    for program in (options.build / FERRY, *([] if options.latency else [options.build / RAIL_STAGE])):
        if not program.is_file():
            raise Failure(f"no program at {program}: build preset release, or give --build")
    measured = [measure_transport(options, transport) for transport in options.transport]
    measured += [measure_copy(options, rate_mbit) for rate_mbit in options.copy_mbit]
    for _, result in measured:
        (show_latency if options.latency else show)(result)
    if options.json:
        names = ["backend", "nodes", "ranks", "tokens", "hidden", "topk", "experts", "dtype", "iterations", "rounds"]
        shape = {name: getattr(options, name) for name in names}
        if options.latency:
            shape |= {"tokens": options.latency, "dtype": "fp8", "order": "rank_sums"}
        bench = measured[0][0]
        build = {key: bench[key] for key in ("version", "commit", "host", "gpu") if key in bench}
        results = [result for _, result in measured]
        options.json.write_text(json.dumps({"command": "nodes", **build, "run": shape, "results": results}, indent=2))


if __name__ == "__main__":
    run_script(main)
