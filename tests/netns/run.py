#!/usr/bin/env -S python3 -B
"""Tests of groups over two hosts that are two network namespaces.

Needs root, iproute2, util-linux and UCX. Prints a line for each case (outcome, name, seconds, observations), then a
summary. Exit code 1: a case failed; 77: this machine cannot run the tests, and the output says why. docs/transport.md
describes the cases.
"""

import argparse
import signal
import subprocess
import sys
import time
import traceback
import unittest
from pathlib import Path

from cases import PATIENT_S, Cases
from hosts import Failure, Missing, TwoHosts, last_line

ROOT = Path(__file__).resolve().parent.parent.parent
EXIT_SKIPPED = 77
# All cases take 20 s where netem is missing. The limit is below ctest's own, which would leave no time to clean up.
TIME_LIMIT_S = 540
CASES = [name.removeprefix("test_").replace("_", "-") for name in vars(Cases) if name.startswith("test_")]


class Stopped(KeyboardInterrupt):
    """A signal ended the run. Unittest lets no exception but KeyboardInterrupt pass through a test."""


class Report(unittest.TestResult):
    """Prints a line for each case when it ends."""

    num_passed = 0

    def startTest(self, test):  # noqa: N802
        super().startTest(test)
        self.began = time.monotonic()

    def addSuccess(self, test):  # noqa: N802
        super().addSuccess(test)
        self.num_passed += 1
        self.show("ok", test)

    def addSkip(self, test, reason):  # noqa: N802
        super().addSkip(test, reason)
        self.show("SKIPPED", test, reason)

    def addFailure(self, test, err):  # noqa: N802
        super().addFailure(test, err)
        self.show("FAILED", test, problem=str(err[1]))

    def addError(self, test, err):  # noqa: N802
        super().addError(test, err)
        expected = isinstance(err[1], Failure)
        self.show("FAILED", test, problem=str(err[1]) if expected else "".join(traceback.format_exception(*err)))

    def show(self, outcome, test, reason=None, problem=None):
        name = test.id().rpartition(".test_")[2].replace("_", "-")
        detail = "; ".join([*test.details, *([reason] if reason else [])])
        print(f"{outcome:7} {name:22} {time.monotonic() - self.began:5.1f} {detail}", flush=True)
        if problem:
            print("\n".join(f"        {line}" for line in f"{problem}\n{test.output}".splitlines()), flush=True)


def stop(signal_number, _frame):
    # Signals may not interrupt the clean-up.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    raise Stopped(signal_number)


def check_several_nodes_work(ferry):
    """Raises Missing if this machine has no network between nodes, not even between nodes of one host."""
    options = "--launch fork --ranks 2 --nodes 2 --transport ucx --tokens 1 --hidden 64 --topk 1 --experts 2"
    arguments = [str(ferry), "bench", *options.split(), "--iterations", "1", "--timeout", str(PATIENT_S)]
    try:
        ended = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=2 * PATIENT_S)
    except subprocess.TimeoutExpired as expired:
        raise Failure(f"{' '.join(arguments)}: still running after {2 * PATIENT_S} s") from expired
    if ended.returncode != 0:
        raise Missing(f"groups of several nodes over UCX: {last_line(ended.stderr)}")


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="only these; default: all")
    parser.add_argument("--ferry", type=Path, default=ROOT / "build/release/tools/ferry", metavar="FILE",
                        help="the command; default: build/release/tools/ferry")  # fmt: skip
    parser.add_argument("--example", type=Path, default=ROOT / "build/release/examples/02_moe_layer_processes",
                        metavar="FILE", help="a program that creates a group with default options")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    options = parser.parse_args()
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if not options.list and not options.ferry.is_file():
        parser.error(f"no command at {options.ferry}; build target ferry_command of preset release, or give --ferry")
    return options


def main():
    options = parse_options()
    if options.list:
        print("\n".join(CASES))
        return 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, stop)
    signal.alarm(TIME_LIMIT_S)
    began = time.monotonic()
    report = Report()
    try:
        Cases.ferry, Cases.example = options.ferry.resolve(), options.example.resolve()
        with TwoHosts(["control", "data"]) as Cases.hosts:
            check_several_nodes_work(Cases.ferry)
            for name in options.cases or CASES:
                Cases(f"test_{name.replace('-', '_')}").run(report)
    except Missing as missing:
        print(f"SKIPPED: this machine lacks {missing}")
        return EXIT_SKIPPED
    except Failure as failure:
        print(f"FAILED: {failure}")
        return 1
    except Stopped as stopped:
        number = signal.Signals(stopped.args[0])
        print(f"stopped: {f'not done after {TIME_LIMIT_S} s' if number == signal.SIGALRM else number.name}")
        return 128 + number
    num_failed = len(report.failures) + len(report.errors)
    print(
        f"{report.num_passed} passed, {num_failed} failed, {len(report.skipped)} skipped "
        f"in {time.monotonic() - began:.0f} s"
    )
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
