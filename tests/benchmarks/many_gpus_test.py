#!/usr/bin/env -S python3 -B
"""Tests benchmarks/many_gpus.sh with stubs in place of the programs that need GPUs."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Logs its arguments, and writes a result for each number of tokens.
BENCH = """#!/bin/bash
if [[ $1 == --version ]]; then exit; fi
echo "$*" >>"$STUB_LOG"
tokens=4096
while (($# > 0)); do
  case $1 in
    --json) file=$2 ;;
    --tokens | --sweep-tokens) tokens=$2 ;;
  esac
  shift
done
if [[ $file == *"/$STUB_FAILS.json" ]]; then
  echo 'no such GPU' >&2
  exit 1
fi
echo '{"results": [' >"$file"
for one in ${tokens//,/ }; do
  echo "{\\"op\\": \\"dispatch\\", \\"tokens\\": $one, \\"time_us_p50\\": 1.5, \\"num_sms\\": 22}," >>"$file"
done
echo '{"op": "last", "tokens": 0, "time_us_p50": 1.0, "graph_time_us_p50": 2.0, "ratio_to_limit": 0.5}]}' >>"$file"
"""
# Stands for a suite without tests.
SUITE = """#!/bin/bash
echo "suite $*" >>"$STUB_LOG"
"""
# Replaces only the benchmarks of the Python packages.
PYTHON = """#!/bin/bash
if [[ $1 != */bench.py && $1 != */beside.py ]]; then exec {python} "$@"; fi
echo "python $*" >>"$STUB_LOG"
file=${{*: -1}}
if [[ $1 == */beside.py ]]; then
  echo '{{"results": [{{"measure": "layer", "dtype": "fp8", "split": false, "graph": false, "tokens": 64,' >"$file"
  echo '"ways": {{"ferry": {{"us": 80.0}}, "original": {{"absent": "not installed"}}}}}}]}}' >>"$file"
  exit
fi
if [[ $* == *--kernel-times* ]]; then
  echo '{{"results": [{{"tokens": 1, "kernel_times": {{"dispatch": {{"call_us": 9.5}}}}}}]}}' >"$file"
else
  echo '{{"results": [{{"tokens": 64, "layer_us": 81.0}}]}}' >"$file"
fi
"""


class ManyGpus(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.out, self.log = self.folder / "out", self.folder / "log"
        self.log.touch()
        smi = '#!/bin/bash\nif [[ $1 == --list-gpus ]]; then printf "GPU 0\\nGPU 1\\n"; fi\n'
        programs = {"ferry": BENCH, "python3": PYTHON.format(python=sys.executable), "nvidia-smi": smi}
        tests = ("litmus_test", "conformance_gpu_test", "gpu_test", "ucx_card_cuda_test")
        programs |= dict.fromkeys(tests, SUITE)
        for name, text in programs.items():
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)

    def run_script(self, *arguments: str, fails: str = "") -> subprocess.CompletedProcess:
        paths = {"PATH": f"{self.folder}:{os.environ['PATH']}", "STUB_LOG": str(self.log), "STUB_FAILS": fails}
        command = [str(ROOT / "benchmarks/many_gpus.sh"), str(self.out), "--built", str(self.folder), *arguments]
        return subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, check=False)

    def test_measures_everything_before_the_suite(self) -> None:
        end = self.run_script()
        self.assertEqual(end.returncode, 0, end.stdout + end.stderr)
        lines = self.log.read_text().splitlines()
        self.assertIn("--op pair --tokens 4096", lines[0])
        first_of_suite = next(number for number, line in enumerate(lines) if line.startswith("suite"))
        self.assertTrue(all(line.startswith("suite") for line in lines[first_of_suite:]))

        calls = [line for line in lines if line.startswith("bench")]
        one_node = [line for line in calls if "--nodes" not in line]
        for memory in ("", "--memory plain "):
            for op in ("--op pair ", "--op dispatch --dtype fp8 "):
                for shape in ("8192", "--hidden 2048", "--hidden 4096", "--routing zipf"):
                    wanted = [*op.split(), *memory.split(), *shape.split()]
                    found = [
                        line
                        for line in one_node
                        if all(part in line.replace(",", " ").split() for part in wanted)
                        and (memory or "--memory" not in line)
                    ]
                    self.assertTrue(found, f"nothing measures {op}{memory}{shape}")
        over_nodes = [line for line in calls if "--nodes 2" in line]
        for part in ("--dtype fp8", "latency-pair", "--transport ucx", "4096"):
            self.assertTrue(any(part in line for line in over_nodes), part)
        of_python = [line for line in lines if line.startswith("python")]
        for api in ("ferry", "deep_ep"):
            for what in ("--layer", "--kernel-times"):
                self.assertTrue(any(what in line and f"--api {api}" in line for line in of_python), f"{api} {what}")

        for path in self.out.glob("*.json"):
            json.loads(path.read_text())
            self.assertRegex(end.stdout, rf"(?m)^{path.stem} ")
        self.assertRegex(end.stdout, r"latency_kernels_ferry +T=1 +kernels: dispatch 9.5 us")
        self.assertTrue(any("beside.py" in line for line in of_python))
        self.assertRegex(end.stdout, r"beside +layer fp8 T=64 +us: ferry 80.0\n")
        self.assertRegex(end.stdout, r"pair_bf16 +dispatch +T=4096 +1.5 us +22 SMs")

    def test_goes_on_after_a_failure_and_tells(self) -> None:
        end = self.run_script("--no-python", fails="pair_bf16")
        self.assertEqual(end.returncode, 1)
        self.assertRegex(end.stdout, "pair_bf16: FAILED .*no such GPU")
        self.assertIn("1 failed", end.stdout)
        self.assertFalse((self.out / "pair_bf16.json").exists())
        self.assertTrue((self.out / "dispatch_fp8.json").exists())
        self.assertFalse(list(self.out.glob("layer*")))

    def test_says_what_had_no_time(self) -> None:
        end = self.run_script("--limit", "3")
        self.assertEqual(end.returncode, 0, end.stderr)
        for what in ("pair_bf16", "latency_kernels_deep_ep", "nodes_bf16", "suite_threads"):
            self.assertIn(f"{what}: no time left", end.stdout)
        self.assertFalse(list(self.out.glob("*.json")))


if __name__ == "__main__":
    unittest.main()
