#!/usr/bin/env -S python3 -B
"""Tests benchmarks/nodes.py --latency: its summary of measurements, and a real run. FERRY_BUILD: the build folder."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from nodes_latency import LatencyRounds, summarise_latency, times_of, trips_of  # noqa: E402


def bench(dispatch_us: float, combine_us: float) -> dict:
    times = {"latency-dispatch": dispatch_us, "latency-combine": combine_us, "latency-pair": dispatch_us + combine_us}
    results = [{"op": op, "tokens": 8, "time_us_p50": us} for op, us in times.items()]
    results.append({"op": "route+dispatch+combine", "tokens": 8, "time_us_p50": 1000.0})
    return {"run": {"network_route": "tcp"}, "results": results}


def puts(short_us: float, long_us: float) -> dict:
    sizes = {8: short_us, 1 << 20: long_us}
    return {"results": [{"num_bytes": b, "latency_p50_ns": us * 1e3} for b, us in sizes.items()]}


class NodesLatency(unittest.TestCase):
    def test_compares_medians_with_one_node_and_three_trips(self) -> None:
        rounds = LatencyRounds(
            one_node=[times_of(bench(10, 20)), times_of(bench(12, 22)), times_of(bench(99, 99))],
            nodes=[times_of(bench(60, 100)), times_of(bench(50, 90)), times_of(bench(55, 95))],
            trips=[trips_of(puts(5, 300)), trips_of(puts(7, 320)), trips_of(puts(6, 310))],
        )
        result = summarise_latency("tcp", "a wire", rounds, bench(0, 0))
        self.assertEqual(result["trips_us"], {"8": 6, "1048576": 310})
        dispatch, combine, pair = result["calls"]
        self.assertEqual((dispatch["one_node_us"], dispatch["nodes_us"]), (12, 55))
        self.assertEqual((dispatch["num_trips"], pair["num_trips"]), (3, 6))
        self.assertEqual(dispatch["with_short_trips_us"], 12 + 3 * 6)
        self.assertEqual(dispatch["allowed_us"], 12 + 3 * 310)
        self.assertEqual(dispatch["ratio_to_allowed"], 55 / (12 + 3 * 310))
        self.assertEqual(combine["allowed_us"], 22 + 3 * 310)
        self.assertEqual((pair["op"], pair["allowed_us"]), ("latency-pair", 34 + 6 * 310))

    def test_measures_in_one_run(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "result.json"
            arguments = "--latency 1,3 --copy-mbit 100000 --ranks 4 --hidden 128 --experts 8 --topk 2 --iterations 2"
            command = [sys.executable, "-B", str(ROOT / "benchmarks/nodes.py"), *arguments.split(), "--rounds", "1"]
            end = subprocess.run(
                [*command, "--build", os.environ["FERRY_BUILD"], "--json", str(path)],
                capture_output=True,
                text=True,
                check=False,
            )
            self.assertEqual(end.returncode, 0, end.stderr)
            report = json.loads(path.read_text())
        self.assertEqual(report["run"]["tokens"], [1, 3])
        (result,) = report["results"]
        calls = ["latency-dispatch", "latency-combine", "latency-pair"]
        self.assertEqual([(c["op"], c["tokens"]) for c in result["calls"]], [(op, n) for n in (1, 3) for op in calls])
        for call in result["calls"]:
            trips_us = call["num_trips"] * result["trips_us"]["1048576"]
            self.assertAlmostEqual(call["allowed_us"], call["one_node_us"] + trips_us)
            self.assertGreater(call["one_node_us"], 0)
        self.assertIn("latency-combine", end.stdout)


if __name__ == "__main__":
    unittest.main()
