#!/usr/bin/env -S python3 -B
"""Stops or kills a random rank of a small group at a random moment, many times, and counts how it ends.

A group of NODES x RANKS (ranks of each node) rank processes of this host exchanges batches. One of them gets SIGSTOP
(or SIGKILL); each survivor should return a typed error that names it within about the deadline. A stopped rank gets
SIGCONT later: when the survivors have returned ("early"), when they have formed a new group and used it ("late"), or at
a random moment ("random"); it should end with a typed error, too. No process may abort, no call may return wrong rows,
and nothing may stay in /dev/shm.

Prints a table, or JSON (--json PATH; "-": standard output). Exit code 1: a process aborted, hung, or ended without an
error, or something stayed in /dev/shm; 3, with --strict: a survivor named another rank, or rows were wrong.

  tests/fault/stop_rounds.py --shape 2x2 --shape 2x4 --shape 4x2 --rounds 200 --parallel 4 --json rounds.json
"""

import argparse
import collections
import concurrent.futures
import json
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from rank_process import RankProcess

ROOT = Path(__file__).resolve().parent.parent.parent
SHARED_MEMORY = Path("/dev/shm")
# Time that a round may take besides the group's deadlines: starting, forming groups, a busy machine.
START_LIMIT_S = 60
END_LIMIT_S = 30
MAX_ATTEMPTS = 3
# Several deadlines may pass for a rank that waits for another waiting rank.
NUM_DEADLINES = 8
# Time, in deadlines, at which a rank is continued at random: after the survivors have given up (some wait for one and a
# half) or while they leave.
EARLIEST_CONTINUED = 1.6
LATEST_CONTINUED = 3.0
EXIT_FAILED = 1
EXIT_STRICT = 3


def read_event(line):
    name, time_ns, code, peer, message = line.split("\t", 4)
    return {"event": name, "at": int(time_ns) / 1e9, "code": code, "peer": int(peer), "why": message}


def listening_socket():
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    return listener


def play_round(settings, shape, seed):
    """Runs try_round again, up to MAX_ATTEMPTS, if the group did not form in time: the machine may be too busy."""
    for attempt in range(MAX_ATTEMPTS):
        seen = try_round(settings, shape, seed)
        seen["attempts"] = attempt + 1
        if {problem["kind"] for problem in seen["problems"]} != {"not_ready"}:
            break
    return seen


def try_round(settings, shape, seed):
    """Runs one group with one stopped or killed rank. Returns its outcome; "problems" is empty if all went well."""
    chance = random.Random(f"{shape}-{seed}")
    num_nodes, ranks_per_node = shape
    num_ranks = num_nodes * ranks_per_node
    deadline_s = settings.deadline_ms / 1000
    victim = chance.randrange(num_ranks)
    continued = chance.choice(settings.continued)
    seen = {"seed": seed, "victim": victim, "continued": continued, "problems": [], "survivors": {}}
    environment = {**os.environ, "FERRY_SECRET": secrets.token_hex(16)}
    with listening_socket() as first, listening_socket() as second:
        descriptors = (first.fileno(), second.fileno())
        ranks = [
            RankProcess(
                (settings.program, rank, num_ranks, ranks_per_node, settings.deadline_ms, *descriptors),
                environment,
                descriptors,
                read_event,
            )
            for rank in range(num_ranks)
        ]
    try:
        run_group(settings, chance, ranks, victim, continued, deadline_s, seen)
        for rank, process in enumerate(ranks):
            process.order("exit")
            code = process.end(END_LIMIT_S + NUM_DEADLINES * deadline_s)
            expected = -signal.SIGKILL if settings.fault == "kill" and rank == victim else 0
            if code is None:
                seen["problems"].append({"kind": "hung", "rank": rank})
            elif code != expected and (code < 0 or not seen["problems"]):  # ranks without a group exit with 1
                kind = "aborted" if code < 0 else "failed"
                errors = process.standard_error()[-4000:]
                seen["problems"].append({"kind": kind, "rank": rank, "exit_code": code, "stderr": errors})
    finally:
        for process in ranks:
            process.close()
    return seen


def run_group(settings, chance, ranks, victim, continued, deadline_s, seen):
    problems = seen["problems"]
    until = time.monotonic() + START_LIMIT_S
    for rank, process in enumerate(ranks):
        event = process.next_event(until)
        if event is None or event["event"] != "ready":
            problems.append({"kind": "not_ready", "rank": rank, "event": event})
            return
    time.sleep(chance.uniform(0, settings.longest_run_ms / 1000))
    survivors = [rank for rank in range(len(ranks)) if rank != victim]
    stopped_at = time.monotonic()
    ranks[victim].process.send_signal(signal.SIGKILL if settings.fault == "kill" else signal.SIGSTOP)
    timer = None
    if settings.fault == "stop" and continued == "random":
        pause_s = chance.uniform(EARLIEST_CONTINUED, LATEST_CONTINUED) * deadline_s
        timer = threading.Timer(pause_s, ranks[victim].process.send_signal, (signal.SIGCONT,))
        timer.start()
    until = time.monotonic() + END_LIMIT_S + NUM_DEADLINES * deadline_s
    for rank in survivors:
        event = ranks[rank].next_event(until)
        left = ranks[rank].next_event(until) if event is not None else None
        if event is None or event["event"] != "failed" or left is None:
            problems.append({"kind": "no_error", "rank": rank, "event": event})
            continue
        event["returned_s"] = round(event.pop("at") - stopped_at, 4)
        event["left_s"] = round(left["at"] - stopped_at, 4)
        seen["survivors"][rank] = event
    if timer is not None:
        timer.join()
    elif settings.fault == "stop" and continued == "early":
        ranks[victim].process.send_signal(signal.SIGCONT)
    if not problems and settings.regroup:
        regroup(ranks, survivors, until, problems)
    if settings.fault == "kill":
        return
    if continued == "late":
        ranks[victim].process.send_signal(signal.SIGCONT)
    event = ranks[victim].next_event(time.monotonic() + END_LIMIT_S + NUM_DEADLINES * deadline_s)
    if event is None or event["event"] != "failed":
        problems.append({"kind": "no_error", "rank": victim, "event": event})
    else:
        seen["victim_error"] = {key: event[key] for key in ("code", "peer", "why")}


def regroup(ranks, survivors, until, problems):
    """Lets the survivors form a group with one rank per node, exchange in it, and leave it."""
    for new_rank, rank in enumerate(survivors):
        ranks[rank].order(f"regroup {new_rank} {len(survivors)} 1")
    until += START_LIMIT_S
    for rank in survivors:
        for expected in ("regrouped", "left"):
            event = ranks[rank].next_event(until)
            if event is None or event["event"] != expected:
                problems.append({"kind": "no_new_group", "rank": rank, "event": event})
                break


def shared_memory_files():
    return {entry.name for entry in SHARED_MEMORY.iterdir()}


def left_behind(before):
    """Files that are new in /dev/shm and mapped by no process."""
    left = []
    for name in sorted(shared_memory_files() - before):
        used = any(f"{SHARED_MEMORY}/{name}" in text for text in all_mappings())
        if not used:
            left.append(name)
    return left


def all_mappings():
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            yield maps.read_text()
        except OSError:
            continue  # the process has ended


def summarise_calls(rounds):
    """Number of errors and longest time to one, by the call that survivors were in."""
    calls = {}
    for seen in rounds:
        for event in seen["survivors"].values():
            name = event["why"].partition(" ")[0]
            of_call = calls.setdefault(name, {"errors": 0, "worst_return_s": 0.0})
            of_call["errors"] += 1
            of_call["worst_return_s"] = max(of_call["worst_return_s"], event["returned_s"])
    return calls


def summarise(shape, rounds, victim_of):
    codes = collections.Counter()
    kinds = collections.Counter()
    wrong = []
    differing = []
    for seen in rounds:
        kinds.update({problem["kind"] for problem in seen["problems"]})
        blamed = {event["peer"] for event in seen["survivors"].values()}
        codes.update(event["code"] for event in seen["survivors"].values())
        if blamed - {victim_of(seen)}:
            wrong.append(seen)
        if len(blamed) > 1:
            differing.append(seen)
    # Ranks compare the rows they receive, and report a difference as kInternal.
    ends = [
        [*seen["survivors"].values(), *([seen["victim_error"]] if "victim_error" in seen else [])] for seen in rounds
    ]
    wrong_rows = sum(any(end["code"] == "kInternal" for end in of_round) for of_round in ends)
    returned = [event["returned_s"] for seen in rounds for event in seen["survivors"].values()]
    left = [event["left_s"] for seen in rounds for event in seen["survivors"].values()]
    return {
        "shape": "x".join(map(str, shape)),
        "rounds": len(rounds),
        "aborted": kinds["aborted"],
        "hung": kinds["hung"],
        "without_error": kinds["no_error"],
        "without_new_group": kinds["no_new_group"],
        "not_started": kinds["not_ready"],
        "failed": kinds["failed"],
        "wrong_rows": wrong_rows,
        "wrong_rank": len(wrong),
        "ranks_differ": len(differing),
        "worst_return_s": max(returned, default=None),
        "worst_leave_s": max(left, default=None),
        "calls": summarise_calls(rounds),
        "survivor_codes": dict(codes),
        "victim_codes": dict(
            collections.Counter(seen["victim_error"]["code"] for seen in rounds if "victim_error" in seen)
        ),
    }


COLUMNS = [
    "shape",
    "rounds",
    "aborted",
    "hung",
    "without_error",
    "without_new_group",
    "not_started",
    "failed",
    "wrong_rows",
    "wrong_rank",
    "ranks_differ",
    "worst_return_s",
    "worst_leave_s",
]


def print_table(report, out):
    rows = [COLUMNS, *([str(summary[column]) for column in COLUMNS] for summary in report["shapes"])]
    widths = [max(len(row[idx]) for row in rows) for idx in range(len(COLUMNS))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)), file=out)
    for summary in report["shapes"]:
        codes = f"survivors {summary['survivor_codes']}, victims {summary['victim_codes']}"
        print(f"{summary['shape']}: {codes}", file=out)
        calls = (
            f"{name} {of_call['errors']} errors within {of_call['worst_return_s']} s"
            for name, of_call in sorted(summary["calls"].items())
        )
        print(f"{summary['shape']}: {', '.join(calls)}", file=out)
    print(f"left in {SHARED_MEMORY}: {', '.join(report['left_in_shared_memory']) or 'nothing'}", file=out)


def parse_shape(text):
    nodes, _, ranks = text.partition("x")
    return int(nodes), int(ranks)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=ROOT / "build/release/tests/fault/exchange_rank")
    parser.add_argument("--shape", action="append", type=parse_shape, help="NODESxRANKS_PER_NODE; may be repeated")
    parser.add_argument("--rounds", type=int, default=20, help="for each shape")
    parser.add_argument("--deadline-ms", type=int, default=1000, help="GroupOptions::timeout_ns")
    parser.add_argument("--longest-run-ms", type=int, default=200, help="the fault occurs at a random time up to this")
    parser.add_argument("--fault", choices=["stop", "kill"], default="stop")
    parser.add_argument("--continued", nargs="+", choices=["early", "late", "random"], help="all unless given")
    parser.add_argument("--no-regroup", dest="regroup", action="store_false", help="survivors form no new group")
    parser.add_argument("--parallel", type=int, default=1, help="groups that run at the same time")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; counts up")
    parser.add_argument("--strict", action="store_true", help="fail also for wrong_rank and wrong_rows")
    parser.add_argument("--json", metavar="PATH")
    settings = parser.parse_args()
    settings.shape = settings.shape or [(2, 2)]
    settings.continued = settings.continued or ["early", "late", "random"]
    return settings


def main():
    settings = parse_arguments()
    before = shared_memory_files()
    seeds = range(settings.seed, settings.seed + settings.rounds)
    rounds = {shape: [] for shape in settings.shape}
    with concurrent.futures.ThreadPoolExecutor(settings.parallel) as pool:
        futures = {pool.submit(play_round, settings, shape, seed): shape for shape in rounds for seed in seeds}
        for future in concurrent.futures.as_completed(futures):
            shape = futures[future]
            seen = future.result()
            rounds[shape].append(seen)
            for problem in seen["problems"]:
                print(f"{shape} seed {seen['seed']}: {problem}", file=sys.stderr, flush=True)
    report = {
        "deadline_s": settings.deadline_ms / 1000,
        "fault": settings.fault,
        "shapes": [summarise(shape, seen, lambda one: one["victim"]) for shape, seen in rounds.items()],
        "left_in_shared_memory": left_behind(before),
        "rounds": {
            "x".join(map(str, shape)): sorted(seen, key=lambda one: one["seed"]) for shape, seen in rounds.items()
        },
    }
    if settings.json == "-":
        print(json.dumps(report, indent=1))
    else:
        print_table(report, sys.stdout)
        if settings.json:
            Path(settings.json).write_text(json.dumps(report, indent=1))
    if report["left_in_shared_memory"] or any(seen["problems"] for all_of in rounds.values() for seen in all_of):
        return EXIT_FAILED
    if settings.strict and any(summary["wrong_rank"] or summary["wrong_rows"] for summary in report["shapes"]):
        return EXIT_STRICT
    return 0


if __name__ == "__main__":
    sys.exit(main())
