#!/usr/bin/env -S python3 -B
"""Ferry beside DeepEP and collectives, on the same tokens in one run: benchmarks/beside.py

Ways to exchange a layer's tokens, each in rank processes of its own, which take turns so that one way runs at a time:
  ferry       the package ferry
  deep_ep     Ferry's package deep_ep
  original    DeepEP's deep_ep with the class Buffer (--original)
  all_to_all  all_to_all_single, NCCL or gloo, with the permutations before and after it
  all_gather  all-gather of all tokens, reduce-scatter of the outputs
A way that is missing or fails is listed with the reason; the others still run. One that has failed twice in
a measure is not started again for it.

Each measures chains: dispatch, combine, and the next dispatch on the combined tokens. The sums are compared with a
reference in torch after each chain, and before it those of experts that change the rows.
  layer    nothing cached: a new route or layout in each step. bf16, and fp8 with scales
  pair     the same with the routing of the first step
  latency  latency mode, fp8 out and bf16 back; whole calls or halves (hooks), eager or in a CUDA graph. Collectives
           send bf16 both ways and have the numbers of rows beforehand
A round measures each shape through each way in turn, beginning with another way each round. Times are wall time of a
step on the slowest rank, in us: the least of all rounds, and the median in brackets. Bytes are of rows and scales, out
and back, mean of all ranks, counted from the ids: logical ones with a row for each (token, rank with an expert of it),
those on the wire with all rows that the way sends to other ranks.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
from pathlib import Path

from beside_picture import picture_of
from beside_report import all_gather_wins, show, titles_of
from beside_ways import TITLES, Absent, Failed, Way

_CPU_RANKS = 2
_NUM_BLOCK = 128  # channels that share a scale


def numbers(text):
    return [int(part) for part in text.split(",") if part]


def parse_options(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(TITLES), help="default: all")
    parser.add_argument(
        "--measures",
        type=lambda text: text.split(","),
        default=["latency", "layer", "pair"],
        help="default: latency,layer,pair",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there are GPUs")
    parser.add_argument("--ranks", type=int, help=f"default: one for each GPU, or {_CPU_RANKS} on CPUs")
    parser.add_argument("--layer-tokens", type=numbers, help="default: 64,128,512,1024,2048,4096")
    parser.add_argument("--latency-tokens", type=numbers, help="default: 1,8,32,64,128")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--order", choices=["exact", "rank_sums"], default="rank_sums", help="of ferry's latency mode")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=40, help="steps of a chain that is not in a graph")
    parser.add_argument("--warm-up", type=int, default=20, help="steps before it")
    parser.add_argument("--quick", action="store_true", help="the least and the most tokens only, in one round")
    parser.add_argument(
        "--original",
        type=Path,
        metavar="FOLDER",
        help="folder that holds DeepEP's package deep_ep, for example an unpacked wheel; put first in PYTHONPATH "
        "of that way",
    )
    parser.add_argument(
        "--nccl-differs",
        action="store_true",
        help="if the original was built with another NCCL than torch loads: sets EP_SUPPRESS_NCCL_CHECK=1 for it, and "
        "imports it with lazy binding of symbols",
    )
    parser.add_argument("--original-sms", type=int, default=24, help="multiprocessors of DeepEP's layers; default 24")
    parser.add_argument("--limit-s", type=float, default=90, help="most seconds of one measurement of one way")
    parser.add_argument("--json", type=Path, help="write the result to this file, anew after each round")
    parser.add_argument("--picture", type=Path, help="draw it into this file, as SVG")
    options = parser.parse_args(arguments)
    for name, known in (("ways", list(TITLES)), ("measures", ["latency", "layer", "pair"])):
        unknown = [one for one in getattr(options, name) if one not in known]
        if unknown:
            parser.error(f"--{name}: {unknown[0]!r}, expected one of {', '.join(known)}")
    num_gpus = count_gpus()
    options.device = options.device or ("cuda" if num_gpus > 1 else "cpu")
    options.ranks = options.ranks or (num_gpus if options.device == "cuda" else _CPU_RANKS)
    if options.device == "cuda" and num_gpus < options.ranks:
        parser.error(f"--device cuda: nvidia-smi lists {num_gpus} GPUs for {options.ranks} ranks; each needs its own")
    if options.quick:
        options.rounds = 1
    options.layer_tokens = options.layer_tokens or ([64, 4096] if options.quick else [64, 128, 512, 1024, 2048, 4096])
    options.latency_tokens = options.latency_tokens or ([1, 128] if options.quick else [1, 8, 32, 64, 128])
    for name in ("ranks", "topk", "rounds", "iterations", "limit_s"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, expected at least 1")
    if min(options.layer_tokens + options.latency_tokens) < 1:
        parser.error("--layer-tokens and --latency-tokens: expected numbers of at least 1")
    if options.hidden < 1 or options.hidden % _NUM_BLOCK:
        parser.error(f"--hidden is {options.hidden}, expected a multiple of {_NUM_BLOCK}, the channels of a scale")
    if options.experts % options.ranks or options.topk > options.experts:
        parser.error(f"--experts {options.experts} must be a multiple of the {options.ranks} ranks and at least --topk")
    return options


def count_gpus():
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU") for line in listed.stdout.splitlines())


def driver_version():
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0] or None


def cases_of(options):
    """Shapes to measure, in this order."""
    cases = []
    if "latency" in options.measures:
        for graph in (False, True) if options.device == "cuda" else (False,):
            for split in (False, True):
                cases += [
                    {"measure": "latency", "dtype": "fp8", "split": split, "graph": graph, "tokens": tokens}
                    for tokens in options.latency_tokens
                ]
    for measure in ("layer", "pair"):
        if measure in options.measures:
            for dtype in ("bf16", "fp8"):
                cases += [
                    {"measure": measure, "dtype": dtype, "split": False, "graph": False, "tokens": tokens}
                    for tokens in options.layer_tokens
                ]
    return cases


class Results:
    """Times of all rounds, by case and way."""

    def __init__(self, cases):
        self.lines = [{**case, "ways": {}} for case in cases]

    def add(self, line, way, answers):
        column = line["ways"].setdefault(way, {})
        column.setdefault("us_all", []).append(round(max(answer["us"] for answer in answers), 3))
        column["us"] = min(column["us_all"])
        column["us_p50"] = statistics.median(column["us_all"])
        for name in ("logical_bytes", "wire_bytes"):
            column[name] = statistics.mean(answer[name] for answer in answers)

    def refuse(self, line, way, kind, reason):
        line["ways"].setdefault(way, {})[kind] = reason

    def is_open(self, line, way):
        """Whether the way has not failed in this yet."""
        column = line["ways"].get(way, {})
        return "absent" not in column and "failed" not in column


def measure_round(number, ways, results):
    first = number % len(ways)
    for line in results.lines:
        case = {name: line[name] for name in ("measure", "dtype", "split", "graph", "tokens")}
        for way in ways[first:] + ways[:first]:
            if not results.is_open(line, way.name):
                continue
            try:
                results.add(line, way.name, way.measure(case))
            except Absent as absent:
                results.refuse(line, way.name, "absent", str(absent))
            except Failed as failed:
                results.refuse(line, way.name, "failed", str(failed))
                print(f"{way.name}, {titles_of(line)}, {line['tokens']} tokens: {failed}", file=sys.stderr)


def result_of(options, ways, results, num_rounds):
    versions = {way.name: way.versions for way in ways if way.versions is not None}
    some = next(iter(versions.values()), {})
    return {
        "command": "benchmarks/beside.py",
        "commit": next((one["commit"] for one in versions.values() if "commit" in one), None),
        "device": options.device,
        "gpu": some.get("gpu"),
        "driver": driver_version() if options.device == "cuda" else None,
        "host": {"name": socket.gethostname(), "num_cpus": os.cpu_count()},
        "versions": versions,
        "shape": {name: getattr(options, name) for name in ("ranks", "hidden", "topk", "experts")},
        "order": options.order,
        "iterations": options.iterations,
        "rounds": num_rounds,
        "all_gather_wins": all_gather_wins(results.lines),
        "results": results.lines,
    }


def write_json(path, result):
    """One result a line."""
    head = json.dumps({name: value for name, value in result.items() if name != "results"}, indent=1)
    lines = ",\n  ".join(json.dumps(line) for line in result["results"])
    path.write_text(f'{head[:-2]},\n "results": [\n  {lines}\n ]\n}}\n')


def main(arguments=None):
    options = parse_options(arguments)
    results = Results(cases_of(options))
    ways = [Way(name, options) for name in options.ways]
    try:
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
            measure_round(number, ways, results)
            result = result_of(options, ways, results, number + 1)
            if options.json:
                write_json(options.json, result)
    finally:
        for way in ways:
            way.close()
    show(result)
    if options.picture:
        options.picture.write_text(picture_of(result), encoding="utf-8")
    return int(any("failed" in column for line in results.lines for column in line["ways"].values()))


if __name__ == "__main__":
    # As an exception, so that ranks end too, also those that hang.
    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, lambda number, _frame: sys.exit(128 + number))
    sys.exit(main())
