#!/usr/bin/env -S python3 -B
"""Several nodes against the network alone: `ferry bench` and UCX's own `ucx_perftest` alternate in one run.

    benchmarks/nodes.py                    ranks of this host, over its loopback interface
    benchmarks/nodes.py --rate-mbit 1000   two network namespaces joined by a link of that rate each way (root)

A round is: ucx_perftest with one pair of processes, with one pair each way at once, and with as many pairs as there are
rails each way at once; then `ferry bench`, then the rings of dispatch alone (benchmarks/rail_stage.cpp): the time that
a call takes beyond that is spent in memory. Rates count all bytes of both directions together. All figures are medians
of the rounds, and ratios are those of the medians.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/netns"))

from hosts import Failure, Missing, ThisHost, TwoHosts
from nodes_report import Rounds, result_of, show, summarise
from nodes_runs import FERRY, RAIL_STAGE, TRANSPORTS, Puts, Ranks

ROOT = Path(__file__).resolve().parents[1]


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/release", help="default: build/release")
    parser.add_argument("--transport", choices=sorted(TRANSPORTS), action="append", help="default: tcp")
    parser.add_argument("--rate-mbit", type=int, help="two hosts as namespaces; tcp only")
    parser.add_argument(
        "--backend", choices=["cpu", "cuda"], default="cpu", help="of the calls; rings are as it has them"
    )
    parser.add_argument("--no-puts", action="store_true", help="leave ucx_perftest out, where it is not installed")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--dtype", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args()
    options.transport = options.transport or ["tcp"]
    if options.rate_mbit and (options.transport != ["tcp"] or options.nodes != 2):
        parser.error("--rate-mbit is for two nodes over tcp")
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


def measure(options, transport):
    """What was built, from the reports of `ferry bench`, and what was measured over the transport."""
    num_rails = options.ranks // options.nodes
    rounds = Rounds()
    with connected_hosts(options.rate_mbit) as (hosts, network, network_environment):
        environment = {**os.environ, **TRANSPORTS[transport], **network_environment}
        ranks = Ranks(options, hosts, environment)
        puts = None if options.no_puts else Puts(hosts, environment)
        if puts:
            puts.settle(num_rails)
        else:
            rounds.puts_gbps = {}
        for round_idx in range(options.rounds):
            print(f"{transport}: round {round_idx + 1} of {options.rounds}", file=sys.stderr)
            if puts:
                rounds.puts_gbps["one_pair_one_way"].append(puts.gbps(1, both_ways=False))
                rounds.puts_gbps["one_pair_each_way"].append(puts.gbps(1, both_ways=True))
                rounds.puts_gbps["all_rails_both_ways"].append(puts.gbps(num_rails, both_ways=True))
            bench = ranks.bench()
            rounds.benches.append(bench)
            rounds.stages.append(ranks.stage(result_of(bench, "dispatch")["network"]["formula_bytes"]))
    return {key: bench[key] for key in ("version", "commit", "host")}, summarise(transport, network, rounds)


def main():
    options = parse_options()
    # As an exception, so that namespaces and processes are removed.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    if not options.no_puts and shutil.which("ucx_perftest") is None:
        raise Missing("the command ucx_perftest: install UCX's tools (Debian: ucx-utils), or give --no-puts")
    for program in (options.build / FERRY, options.build / RAIL_STAGE):
        if not program.is_file():
            raise Failure(f"no program at {program}: build preset release, or give --build")
    measured = []
    for transport in options.transport:
        build, result = measure(options, transport)
        measured.append(result)
    for result in measured:
        show(result)
    if options.json:
        names = ["backend", "nodes", "ranks", "tokens", "hidden", "topk", "experts", "dtype", "iterations", "rounds"]
        shape = {name: getattr(options, name) for name in names}
        options.json.write_text(json.dumps({"command": "nodes", **build, "run": shape, "results": measured}, indent=2))


if __name__ == "__main__":
    try:
        main()
    except Missing as missing:
        print(f"nodes.py: this machine lacks {missing}", file=sys.stderr)
        sys.exit(1)
    except Failure as failure:
        print(f"nodes.py: {failure}", file=sys.stderr)
        sys.exit(1)
