#!/usr/bin/env -S python3 -B
"""Tests benchmarks/one_sided.py: its summaries, with a reference and without one. FERRY_BUILD: the build folder."""

import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/one_sided.py"
sys.path.insert(0, str(ROOT / "benchmarks"))

from one_sided import summarise  # noqa: E402

# Answers as ucx_perftest does: the server listens for one client, and the client prints one line of figures.
FAKE_PERFTEST = """#!/usr/bin/env python3
import socket, sys
arguments = sys.argv[1:]
port = int(arguments[arguments.index("-p") + 1])
if "-t" in arguments:
    address = ("127.0.0.1", port)
    socket.create_connection(address).close()
    assert ("-e" in arguments) == (not arguments[arguments.index("-t") + 1] in ("ucp_add", "ucp_fadd"))
    latency = 9.5 if arguments[arguments.index("-O") + 1] == "1" else 1.5
    print("[name]")
    print(f"100 {latency} 2.0 2.0 10.0 10.0 1000 250000")
else:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("", port))
    server.listen()
    server.accept()
"""


def report(latency_ns: int, window_ns: int) -> dict:
    entry = {"num_bytes": 64, "latency_p50_ns": latency_ns, "latency_p99_ns": 2 * latency_ns}
    return {"window": 32, "results": [{**entry, "window_p50_ns": window_ns}]}


class OneSided(unittest.TestCase):
    def run_script(self, path: str, *more: str) -> tuple[subprocess.CompletedProcess, dict]:
        with tempfile.TemporaryDirectory() as folder:
            written = pathlib.Path(folder) / "result.json"
            environment = {key: value for key, value in os.environ.items() if key != "FERRY_UCX_LIBRARY"}
            arguments = ["--iterations", "3", "--calls", "100", "--rounds", "1", "--op", "fadd", "--op", "signal"]
            command = [sys.executable, "-B", str(SCRIPT), "--build", os.environ["FERRY_BUILD"], *arguments, *more]
            end = subprocess.run(
                [*command, "--json", str(written)],
                env={**environment, "PATH": path},
                capture_output=True,
                text=True,
                check=False,
            )
            return end, json.loads(written.read_text()) if written.exists() else {}

    def test_compares_medians(self) -> None:
        reports = [report(10_000, 64_000), report(30_000, 32_000), report(12_000, 80_000)]
        references = [[(9.0, 400_000.0)], [(11.0, 1e6)], [(10.0, 500_000.0)]]
        row = summarise("put", reports, references)[0]
        self.assertEqual((row["op"], row["num_bytes"]), ("put", 64))
        self.assertEqual(row["ferry"]["latency_us"], 12)
        self.assertEqual(row["ferry"]["calls_per_s"], 500_000)
        self.assertEqual(row["ferry"]["gb_per_s"], 0.032)
        self.assertEqual(row["ucx_perftest"]["latency_us"], 10)
        self.assertEqual((row["latency_more_us"], row["rate_ratio"]), (2, 1))

    def test_of_words_bytes_do_not_count(self) -> None:
        row = summarise("fadd", [report(10_000, 64_000)], [])[0]
        self.assertNotIn("gb_per_s", row["ferry"])
        self.assertIsNone(row["ucx_perftest"])
        self.assertNotIn("rate_ratio", row)

    def test_measures_both_in_one_run(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            fake = pathlib.Path(folder) / "ucx_perftest"
            fake.write_text(FAKE_PERFTEST)
            fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
            end, found = self.run_script(os.pathsep.join([folder, os.environ["PATH"]]), "--need-reference")
        self.assertEqual(end.returncode, 0, end.stderr)
        self.assertEqual(found["reference"], {"program": str(fake), "why_none": None})
        self.assertEqual([row["op"] for row in found["results"]], ["fadd", "signal"])
        for row in found["results"]:
            self.assertEqual(row["ucx_perftest"]["latency_us"], 9.5)
            self.assertEqual(row["ucx_perftest"]["calls_per_s"], 250_000)
            self.assertGreater(row["ferry"]["latency_us"], 0)
            self.assertGreater(row["rate_ratio"], 0)
        self.assertIn("ratio", end.stdout)

    def test_without_ucx_perftest_it_says_so(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            end, found = self.run_script(folder)
            self.assertEqual(end.returncode, 0, end.stderr)
            self.assertIn("no reference: the command ucx_perftest is not installed", end.stdout)
            self.assertIn("not installed", found["reference"]["why_none"])
            self.assertTrue(all(row["ucx_perftest"] is None for row in found["results"]))
            refused, nothing = self.run_script(folder, "--need-reference")
        self.assertEqual(refused.returncode, 1)
        self.assertIn("ucx_perftest", refused.stderr)
        self.assertEqual(nothing, {})


if __name__ == "__main__":
    unittest.main()
