#!/usr/bin/env -S python3 -B
"""One-sided calls between two CPU ranks against `ucx_perftest`: both alternate in one run, and one JSON has both.

    benchmarks/one_sided.py                              put, get, signal and fadd over TCP and the loopback interface
    benchmarks/one_sided.py --transport shm --op put     over UCX's shared memory
    benchmarks/one_sided.py --json one_sided.json

A round is `ferry bench --op OP --nodes 2 --transport ucx`, then for each size `ucx_perftest` twice, for latency and for
the rate, with the same settings of UCX and as many calls under way. Figures are medians of the rounds. Where there is
no `ucx_perftest` the report says so and has the calls alone; --need-reference makes that an error.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/netns"))

from hosts import Failure, Missing, ThisHost
from nodes_puts import HANDLES_ERRORS, Pairs, figures_of, perftest
from nodes_runs import FERRY, TRANSPORTS
from programs import run_for_json, run_script

ROOT = Path(__file__).resolve().parents[1]
RUN_TIMEOUT_S = 600
WARMUP_CALLS = 50
# By the operation of `ferry bench`: the tests of ucx_perftest that time one call, and many at once.
REFERENCES = {
    "put": ("ucp_put_lat", "ucp_put_bw"),
    "get": ("ucp_get", "ucp_get"),
    "signal": ("ucp_put_lat", "ucp_add"),
    "fadd": ("ucp_fadd", "ucp_add"),
}
ATOMICS = {"ucp_add", "ucp_fadd"}


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/release", help="default: build/release")
    parser.add_argument("--op", choices=list(REFERENCES), action="append", help="default: all")
    parser.add_argument("--transport", choices=sorted(TRANSPORTS), default="tcp")
    parser.add_argument("--iterations", type=int, default=500, help="samples of `ferry bench`")
    parser.add_argument("--calls", type=int, default=5000, help="of each run of ucx_perftest")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--need-reference", action="store_true", help="fail where ucx_perftest is not installed")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args()
    options.op = options.op or list(REFERENCES)
    if min(options.iterations, options.calls, options.rounds) < 1:
        parser.error("--iterations, --calls and --rounds are at least 1")
    return options


def bench(options, op, environment):
    """The report of `ferry bench`."""
    command = [
        options.build / FERRY, "bench", "--op", op, "--backend", "cpu", "--ranks", 2, "--nodes", 2, "--transport",
        "ucx", "--iterations", options.iterations, "--warmup", WARMUP_CALLS, "--json", "-",
    ]  # fmt: skip
    return run_for_json(f"ferry bench --op {op}", command, environment, RUN_TIMEOUT_S)


def reference(options, pairs, op, num_bytes, window):
    """Microseconds of one call, and calls per second with a window of them under way."""
    latency_test, rate_test = REFERENCES[op]

    def measure(test, num_outstanding):
        count = ["-n", options.calls, "-w", WARMUP_CALLS, "-O", num_outstanding]
        # Over TCP and shared memory UCX has no atomics on endpoints that handle errors.
        if test not in ATOMICS:
            count.append(HANDLES_ERRORS)
        with contextlib.ExitStack() as running:
            arguments = ["-t", test, "-s", num_bytes, *count]
            return figures_of(*pairs.start(running, 0, [str(part) for part in arguments]))

    return measure(latency_test, 1)[0], measure(rate_test, window)[2]


def figures(latency_us, calls_per_s, num_bytes, op):
    """Figures of one side, for the report; words have no bytes to count."""
    found = {"latency_us": latency_us, "calls_per_s": calls_per_s}
    return found | ({"gb_per_s": calls_per_s * num_bytes / 1e9} if op in ("put", "get") else {})


def summarise(op, reports, references):
    """One row for each size: the medians of the rounds, ours and, where there are some, those of ucx_perftest."""
    rows = []
    for idx, first in enumerate(reports[0]["results"]):
        num_bytes = first["num_bytes"]
        entries = [report["results"][idx] for report in reports]
        latency_us = statistics.median(entry["latency_p50_ns"] for entry in entries) / 1e3
        window_ns = statistics.median(entry["window_p50_ns"] for entry in entries)
        ours = figures(latency_us, reports[0]["window"] / window_ns * 1e9, num_bytes, op)
        ours["latency_p99_us"] = statistics.median(entry["latency_p99_ns"] for entry in entries) / 1e3
        row = {"op": op, "num_bytes": num_bytes, "ferry": ours, "ucx_perftest": None}
        if references:
            times, rates = zip(*(round_references[idx] for round_references in references), strict=True)
            theirs = figures(statistics.median(times), statistics.median(rates), num_bytes, op)
            theirs["tests"] = list(REFERENCES[op])
            row["ucx_perftest"] = theirs
            row["latency_more_us"] = ours["latency_us"] - theirs["latency_us"]
            row["rate_ratio"] = ours["calls_per_s"] / theirs["calls_per_s"]
        rows.append(row)
    return rows


def measure(options, op, environment, pairs):
    """The last report of `ferry bench`, and the rows of the operation."""
    reports, references = [], []
    for round_idx in range(options.rounds):
        print(f"{op}: round {round_idx + 1} of {options.rounds}", file=sys.stderr)
        reports.append(bench(options, op, environment))
        if pairs:
            sizes = [result["num_bytes"] for result in reports[-1]["results"]]
            references.append([reference(options, pairs, op, size, reports[-1]["window"]) for size in sizes])
    return reports[-1], summarise(op, reports, references)


def show(rows, why_alone):
    print(f"{'op':8}{'bytes':>9}{'latency us':>12}{'ucx':>9}{'more':>8}{'M calls/s':>11}{'ucx':>9}{'ratio':>8}")
    for row in rows:
        ours, theirs = row["ferry"], row["ucx_perftest"]
        text = f"{row['op']:8}{row['num_bytes']:9}{ours['latency_us']:12.2f}"
        rate = f"{ours['calls_per_s'] / 1e6:11.4f}"
        if theirs is None:
            print(f"{text}{'-':>9}{'-':>8}{rate}{'-':>9}{'-':>8}")
            continue
        text += f"{theirs['latency_us']:9.2f}{row['latency_more_us']:8.2f}"
        print(f"{text}{rate}{theirs['calls_per_s'] / 1e6:9.4f}{row['rate_ratio']:8.3f}")
    if why_alone:
        print(f"no reference: {why_alone}")


def main():
    options = parse_options()
    program = options.build / FERRY
    if not program.is_file():
        raise Failure(f"no program at {program}: build preset release, or give --build")
    why_alone = None
    if perftest() is None:
        why_alone = "the command ucx_perftest is not installed (Debian: ucx-utils)"
        if options.need_reference:
            raise Missing(why_alone)
    environment = {**os.environ, **TRANSPORTS[options.transport]}
    pairs = None if why_alone else Pairs(ThisHost(), environment)
    measured = [measure(options, op, environment, pairs) for op in options.op]
    rows = [row for _, op_rows in measured for row in op_rows]
    show(rows, why_alone)
    if options.json:
        first = measured[0][0]
        report = {
            "command": "one_sided",
            **{key: first[key] for key in ("version", "commit", "host")},
            "run": {name: getattr(options, name) for name in ("transport", "iterations", "calls", "rounds")},
            "reference": {"program": perftest(), "why_none": why_alone},
            "results": rows,
        }
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    run_script(main)
