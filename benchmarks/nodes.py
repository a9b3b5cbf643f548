#!/usr/bin/env python3
"""Several nodes against the network alone: `ferry bench` and UCX's own `ucx_perftest` in turn, in one run.

    benchmarks/nodes.py                    ranks of this host, over its loopback interface
    benchmarks/nodes.py --rate-mbit 1000   two network namespaces joined by a link of that rate each way (root)

A round is: ucx_perftest with one pair of processes, with one pair each way at once, and with as many pairs as there are
rails each way at once; then `ferry bench`, then the rings of dispatch alone (benchmarks/rail_stage.cpp): what a call
takes longer, it spends on memory. Rates count all bytes of both directions together. All figures are medians of the
rounds, and ratios are those of the medians.
"""

import argparse
import json
import os
import random
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PUT_BYTES = 1 << 20
# Long enough for TCP to find its pace: this many seconds of the rate that a first, short run has shown.
PUT_SECONDS = 3
WARMUP_PUTS = 20
PATIENT_S = 600
# As src/net/ucx sets where the caller sets nothing, so that both use the network in the same way.
SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "256K", "UCX_TCP_RX_SEG_SIZE": "256K"}
SHARED_MEMORY = {"UCX_TLS": "posix,sysv", "UCX_POSIX_ERROR_HANDLING": "y", "UCX_SYSV_ERROR_HANDLING": "y"}
TRANSPORTS = {"tcp": {"UCX_TLS": "tcp", **SEGMENTS}, "shm": SHARED_MEMORY}


class Failure(Exception):
    """What the user has to hear."""


class ThisHost:
    """Both ends on this host."""

    description = "the loopback interface"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def command(self, _end, arguments):
        return arguments

    def address(self, _end):
        return "127.0.0.1"

    def __init__(self):
        self.environment = {}


class TwoHosts:
    """Two network namespaces and a link between them that carries so much each way and no more."""

    def __init__(self, rate_mbit):
        self.environment = {"UCX_NET_DEVICES": "data"}
        self.rate_mbit = rate_mbit
        self.names = [f"ferry-bench-{os.getpid()}-{end}" for end in "ab"]
        self.description = f"two network namespaces, a veth pair held to {rate_mbit} Mbit/s each way by tbf"

    def __enter__(self):
        if os.geteuid() != 0:
            raise Failure("network namespaces are root's to make: run as root, or without --rate-mbit")
        try:
            for name in self.names:
                ip("netns", "add", name)
            ip("link", "add", "name", "data", "netns", self.names[0], "type", "veth", "peer", "name", "data", "netns",
               self.names[1])  # fmt: skip
            for end, name in enumerate(self.names):
                ip("-n", name, "address", "add", f"{self.address(end)}/24", "dev", "data")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "data", "up")
                run(["tc", "-n", name, "qdisc", "add", "dev", "data", "root", "tbf", "rate", f"{self.rate_mbit}mbit",
                     "burst", "256k", "latency", "20ms"])  # fmt: skip
            self.wait_until_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def wait_until_up(self):
        deadline = time.monotonic() + 5
        while any("state UP" not in ip("-n", name, "link", "show", "dev", "data") for name in self.names):
            if time.monotonic() > deadline:
                raise Failure("the link between the namespaces did not come up in 5 s")
            time.sleep(0.05)

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def command(self, end, arguments):
        return ["ip", "netns", "exec", self.names[end], *arguments]

    def address(self, end):
        return f"198.51.100.{end + 1}"


def run(arguments):
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise Failure(f"{' '.join(arguments)}: {ended.stderr.strip() or ended.returncode}")
    return ended.stdout


def ip(*arguments):
    return run(["ip", *arguments])


class Puts:
    """ucx_perftest -t ucp_put_bw, with the error handling that a group of ranks needs too."""

    def __init__(self, hosts, environment):
        self.hosts = hosts
        self.environment = environment
        self.port = 20000 + os.getpid() % 10000
        self.num_puts = 200

    def gbps(self, num_pairs, both_ways):
        """GB/s of all pairs together, until the slowest has finished: a call of ranks lasts as long too."""
        ways = [0, 1] if both_ways else [0]
        pairs = [self.start(source) for source in ways for _ in range(num_pairs)]
        return len(pairs) * min([rate_of(client, server) for client, server in pairs])

    def start(self, source):
        self.port += 1
        arguments = ["ucx_perftest", "-p", str(self.port)]
        server = self.popen(1 - source, arguments)
        self.wait_for_listener(1 - source, server)
        test = ["-t", "ucp_put_bw", "-s", str(PUT_BYTES), "-n", str(self.num_puts), "-w", str(WARMUP_PUTS), "-e", "-f"]
        return self.popen(source, [*arguments, self.hosts.address(1 - source), *test]), server

    def wait_for_listener(self, end, server):
        wanted = f":{self.port} "
        deadline = time.monotonic() + 10
        while wanted not in run(self.hosts.command(end, ["ss", "-Hltn"])):
            if server.poll() is not None or time.monotonic() > deadline:
                raise Failure(f"ucx_perftest did not listen: {server.communicate()[1]}")
            time.sleep(0.02)

    def popen(self, end, arguments):
        return subprocess.Popen(
            self.hosts.command(end, arguments),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def settle(self, num_pairs):
        """Choose a number of puts that takes long enough with all pairs at once."""
        self.num_puts = max(200, round(PUT_SECONDS * self.gbps(num_pairs, True) * 1e9 / PUT_BYTES / (2 * num_pairs)))


def rate_of(client, server):
    out, err = client.communicate(timeout=PATIENT_S)
    server.communicate(timeout=PATIENT_S)
    # Final: iterations, latency (percentile, average, overall), MB/s (average, overall), messages/s (average, overall)
    for line in out.splitlines():
        fields = line.split()
        if client.returncode == 0 and len(fields) >= 8 and fields[0].isdigit():
            return float(fields[5]) * (1 << 20) / 1e9
    raise Failure(f"ucx_perftest failed: {err.strip() or out.strip()}")


class Ranks:
    """The ranks of a group, half of them at each end, started as torchrun does it."""

    def __init__(self, options, hosts, environment):
        self.hosts = hosts
        self.environment = environment
        self.options = options

    def run(self, arguments):
        """What rank 0 prints."""
        per_end = self.options.ranks // 2
        # Nodes of one host are emulated by --nodes; as a launcher has it, all ranks are on it.
        num_local = self.options.ranks if isinstance(self.hosts, ThisHost) else per_end
        common = {
            "MASTER_ADDR": self.hosts.address(0),
            "MASTER_PORT": str(free_port()),
            "FERRY_SECRET": secrets.token_hex(32),
            "WORLD_SIZE": str(self.options.ranks),
            "LOCAL_WORLD_SIZE": str(num_local),
        }
        ranks = [
            subprocess.Popen(
                self.hosts.command(rank // per_end, arguments),
                env={**self.environment, **common, "RANK": str(rank), "LOCAL_RANK": str(rank % num_local)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(self.options.ranks)
        ]
        failures = []

        def finish(rank_idx):
            printed, words = ranks[rank_idx].communicate()
            if ranks[rank_idx].returncode != 0:
                failures.append(f"{Path(arguments[0]).name}: rank {rank_idx} failed: {words.strip()}")
                # The others would wait for it until their deadline.
                for rank in ranks:
                    rank.kill()
            return printed

        with ThreadPoolExecutor(len(ranks)) as pool:
            printed = list(pool.map(finish, range(len(ranks))))
        if failures:
            raise Failure(failures[0])
        return printed[0]

    def bench(self):
        """The report of `ferry bench` and its results by operation."""
        o = self.options
        report = json.loads(self.run([
            str(o.build / "tools/ferry"), "bench", "--backend", "cpu", "--nodes", str(o.nodes), "--tokens",
            str(o.tokens), "--hidden", str(o.hidden), "--topk", str(o.topk), "--experts", str(o.experts), "--dtype",
            o.dtype, "--iterations", str(o.iterations), "--warmup", "1", "--timeout", str(PATIENT_S), "--transport",
            "ucx", "--json", "-",
        ]))  # fmt: skip
        return report, {result["op"]: result for result in report["results"]}

    def stage(self, num_bytes):
        """Microseconds that so many bytes of all ranks take through the rings alone."""
        o = self.options
        item_bytes = 2 * o.hidden
        num_items = max(1, round(num_bytes / (o.ranks * (o.nodes - 1)) / item_bytes))
        report = json.loads(self.run([
            str(o.build / "benchmarks/rail_stage"), "--nodes", str(o.nodes), "--items", str(num_items), "--item-bytes",
            str(item_bytes), "--iterations", str(o.iterations), "--timeout", str(PATIENT_S),
        ]))  # fmt: skip
        time_us = statistics.median(report["times_ns"]) / 1e3
        return time_us, report["sent_bytes"] / time_us / 1e3


def free_port():
    """Not one that the kernel hands out: connections of the round before may still have that, in TIME_WAIT."""
    while True:
        port = random.randrange(15000, 30000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def measure(options, transport):
    environment = {**os.environ, **TRANSPORTS[transport]}
    num_rails = options.ranks // options.nodes
    puts_gbps = {"one_pair_one_way": [], "one_pair_each_way": [], "all_rails_both_ways": []}
    stages, times, sent = [], {"dispatch": [], "combine": []}, {}
    with TwoHosts(options.rate_mbit) if options.rate_mbit else ThisHost() as hosts:
        environment.update(hosts.environment)
        puts = Puts(hosts, environment)
        puts.settle(num_rails)
        ranks = Ranks(options, hosts, environment)
        for round_idx in range(options.rounds):
            print(f"{transport}: round {round_idx + 1} of {options.rounds}", file=sys.stderr)
            puts_gbps["one_pair_one_way"].append(puts.gbps(1, both_ways=False))
            puts_gbps["one_pair_each_way"].append(puts.gbps(1, both_ways=True))
            puts_gbps["all_rails_both_ways"].append(puts.gbps(num_rails, both_ways=True))
            report, results = ranks.bench()
            for op, all_us in times.items():
                all_us.append(results[op]["time_us_p50"])
                sent[op] = results[op]["network"]
            stages.append(ranks.stage(sent["dispatch"]["formula_bytes"]))
        description = hosts.description
    medians = {name: statistics.median(column) for name, column in puts_gbps.items()}
    stage_us, stage_gbps = (statistics.median(column) for column in zip(*stages, strict=True))
    measured = {
        "transport": transport,
        "network": description,
        "route": report["run"]["network_route"],
        "puts": {name: {"gbps": medians[name], "gbps_all": column} for name, column in puts_gbps.items()},
        "network_stage": {
            "time_us": stage_us,
            "gbps": stage_gbps,
            "gbps_all": [gbps for _, gbps in stages],
            "ratios_to_puts": {name: stage_gbps / gbps for name, gbps in medians.items()},
        },
        "calls": {},
    }
    for op, all_us in times.items():
        time_us = statistics.median(all_us)
        gbps = sent[op]["sent_bytes"] / time_us / 1e3
        measured["calls"][op] = {
            "time_us_p50": time_us,
            "time_us_p50_all": all_us,
            "sent_bytes": sent[op]["sent_bytes"],
            "formula_bytes": sent[op]["formula_bytes"],
            "gbps": gbps,
            "ratios_to_puts": {name: gbps / put for name, put in medians.items()},
            "time_over_network_stage": time_us / stage_us,
        }
    return {key: report[key] for key in ("version", "commit", "host")}, measured


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/release", help="default: build/release")
    parser.add_argument("--transport", choices=sorted(TRANSPORTS), action="append", help="default: tcp")
    parser.add_argument("--rate-mbit", type=int, help="two hosts as namespaces; tcp only")
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


def show(result):
    print(f"{result['transport']}: {result['network']} ({result['route']})")
    for name, puts in result["puts"].items():
        print(f"  ucx_perftest, {name.replace('_', ' '):20} {puts['gbps']:7.3f} GB/s")
    stage = result["network_stage"]
    print(f"  network stage alone {stage['time_us'] / 1e3:8.1f} ms     {stage['gbps']:7.3f} GB/s = {ratios(stage)}")
    for op, call in result["calls"].items():
        print(
            f"  {op:19} {call['time_us_p50'] / 1e3:8.1f} ms     {call['gbps']:7.3f} GB/s = {ratios(call)}; "
            f"{call['sent_bytes'] / 1e6:.1f} MB, {call['time_over_network_stage']:.2f} of the stage's time"
        )


def ratios(measured):
    return " / ".join(f"{ratio:.2f}" for ratio in measured["ratios_to_puts"].values()) + " of those"


def main():
    options = parse_options()
    if shutil.which("ucx_perftest") is None:
        raise Failure("there is no ucx_perftest; install UCX's tools (Debian: ucx-utils)")
    measured = []
    for transport in options.transport:
        build, result = measure(options, transport)
        measured.append(result)
    for result in measured:
        show(result)
    if options.json:
        names = ["nodes", "ranks", "tokens", "hidden", "topk", "experts", "dtype", "iterations", "rounds"]
        shape = {name: getattr(options, name) for name in names}
        options.json.write_text(json.dumps({"command": "nodes", **build, "run": shape, "results": measured}, indent=2))


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        print(f"nodes.py: {failure}", file=sys.stderr)
        sys.exit(1)
