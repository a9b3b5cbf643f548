#!/usr/bin/env -S python3 -B
"""Hangs or kills small groups in a random way, many times, and compares the diagnosis of their records with the truth.

Each trial draws a group, a fault, its rank and its moment from a seed. While the group hangs (or after it broke),
`ferry doctor --attach` is asked about one of the ranks that still run, drawn at random; later the errors of the
others are read. A diagnosis is right if it names the kind of the fault and the rank; for a held link also the rank at
its other end. Prints a table, or JSON (--json PATH; "-": standard output).

Faults: stop (SIGSTOP) and kill (SIGKILL) at a random moment; late (a rank does not make a call), other (a rank makes
another call), both in a random call of a random round; link (between two nodes of the loopback engine nothing more
arrives in one direction); with --backend cuda also busy (other work holds one rank's stream in front of a call).

Exit code: 1 if fewer than --least-right diagnoses are right.

  tests/fault/hang_trials.py --trials 120 --parallel 2 --json trials.json
"""

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from rank_process import RankProcess

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = ["route", "dispatch", "combine", "latency_dispatch", "latency_combine"]
KINDS = {
    "stop": "stopped",
    "kill": "ended",
    "late": "late",
    "other": "other_call",
    "busy": "busy_gpu",
    "link": "slow_link",
}
# What the error of a rank that gave up says about the rank at fault, from its record.
SENTENCES = {"stop": "is stopped", "kill": "; rank", "late": "has made no call since", "busy": "launched"}
START_LIMIT_S = 60
END_LIMIT_S = 30
# Time at which the doctor is asked, in deadlines after the fault.
EARLIEST_QUESTION = 0.3
LATEST_QUESTION = 0.7
LAST_ROUND = 20
FIRST_KNOWN_ROUND = 2
LONGEST_RUN_S = 0.3
NUM_DEADLINES = 4


class TrialError(Exception):
    """The trial did not get as far as its fault, or a rank did not end with an error."""


def read_event(line):
    name, rank, code, peer, message = line.split("\t", 4)
    return {"event": name, "rank": int(rank), "code": code, "peer": int(peer), "why": message}


class Program(RankProcess):
    """A running rank, or all ranks as threads."""

    def __init__(self, command, environment, descriptor):
        super().__init__(command, environment, (descriptor,), read_event)

    def await_event(self, name, until):
        """Next event, which must have this name."""
        event = self.next_event(until)
        if event is None or event["event"] != name:
            raise TrialError(f"expected {name}, saw {event}: {self.standard_error()[-2000:]}")
        return event

    def close(self):
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGCONT)
        self.end(END_LIMIT_S)
        super().close()


def draw(settings, seed):
    """The group and the fault of a trial."""
    chance = random.Random(f"{settings.backend}-{seed}")
    fault = chance.choice(settings.fault)
    if fault == "link":
        shape = chance.choice([(2, 1), (3, 1), (2, 2)])
        nodes = chance.sample(range(shape[0]), 2)
        return {"seed": seed, "fault": fault, "shape": shape, "from_node": nodes[0], "to_node": nodes[1]}, chance
    num_ranks = chance.choice(settings.ranks)
    plan = {"seed": seed, "fault": fault, "shape": (1, num_ranks), "victim": chance.randrange(num_ranks)}
    if fault in ("late", "other", "busy"):
        plan |= {"round": chance.randint(1, LAST_ROUND), "step": chance.randrange(len(STEPS))}
        # Each step has followed the one before it by then, which shows the odd one of two ranks.
        if fault == "other":
            plan["round"] = max(plan["round"], FIRST_KNOWN_ROUND)
    return plan, chance


def start(settings, plan, environment, listener):
    num_nodes, ranks_per_node = plan["shape"]
    num_ranks = num_nodes * ranks_per_node
    programs = []
    for rank in [-1] if plan["fault"] == "link" else range(num_ranks):
        fault = plan["fault"] if rank == plan.get("victim") and "step" in plan else "none"
        command = [settings.program, rank, num_ranks, ranks_per_node, settings.deadline_ms, listener.fileno()]
        command += [settings.backend, fault, plan.get("round", 0), plan.get("step", 0)]
        programs.append(Program(command, environment, listener.fileno()))
    return programs


def attach(settings, pid):
    """Diagnosis of the group of which the process has a rank."""
    answer = subprocess.run(
        [settings.doctor, "doctor", "--attach", str(pid), "--json", "-"], capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        raise TrialError(f"doctor: {answer.stderr}")
    report = json.loads(answer.stdout)
    groups = report["groups"]
    if len(groups) != 1:
        raise TrialError(f"doctor: {len(groups)} groups")
    return groups[0]["diagnosis"] | {"commit": report["commit"]}


def inject(plan, programs, chance, until):
    """Returns when the fault has occurred."""
    fault = plan["fault"]
    victim = programs[plan.get("victim", 0)]
    if fault in ("late", "other", "busy"):
        victim.await_event("fault", until)
        return
    time.sleep(chance.uniform(0, LONGEST_RUN_S))
    if fault == "link":
        victim.order(f"hold {plan['from_node']} {plan['to_node']}")
    else:
        victim.process.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        if fault == "kill":
            victim.process.wait()


def judge(plan, diagnosis, errors):
    """Whether the diagnosis, the errors' rank and the errors' sentence are right."""
    fault = plan["fault"]
    per_node = plan["shape"][1]
    right = diagnosis["kind"] == KINDS[fault]
    if fault == "link":
        link = (diagnosis["rank"] // per_node, diagnosis["peer"] // per_node)
        ends = (plan["from_node"], plan["to_node"])
        return right and link == ends, None, None
    right = right and diagnosis["rank"] == plan["victim"]
    if fault == "other":
        return right, None, None
    named = all(error["peer"] == plan["victim"] for error in errors)
    says = all(SENTENCES[fault] in error["why"] for error in errors)
    return right, named, says


def play(settings, seed):
    plan, chance = draw(settings, seed)
    environment = {**os.environ, "FERRY_SECRET": secrets.token_hex(16)}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        programs = start(settings, plan, environment, listener)
    num_ranks = plan["shape"][0] * plan["shape"][1]
    deadline_s = settings.deadline_ms / 1000
    try:
        until = time.monotonic() + START_LIMIT_S
        events = num_ranks if plan["fault"] == "link" else 1
        for program in programs:
            for _ in range(events):
                program.await_event("ready", until)
        inject(plan, programs, chance, until)
        time.sleep(chance.uniform(EARLIEST_QUESTION, LATEST_QUESTION) * deadline_s)
        others = [idx for idx in range(len(programs)) if idx != plan.get("victim")]
        plan["asked"] = chance.choice(others)
        plan["diagnosis"] = attach(settings, programs[plan["asked"]].process.pid)
        until = time.monotonic() + END_LIMIT_S + NUM_DEADLINES * deadline_s
        errors = [programs[idx].await_event("failed", until) for idx in others for _ in range(events)]
        plan["errors"] = sorted({f"{error['code']} {error['peer']}: {error['why']}" for error in errors})
        plan["right"], plan["named"], plan["says"] = judge(plan, plan["diagnosis"], errors)
    except TrialError as error:
        plan["problem"] = str(error)
    finally:
        for program in programs:
            program.close()
    return plan


def summarise(trials):
    table = {}
    for fault in sorted({trial["fault"] for trial in trials}):
        of_fault = [trial for trial in trials if trial["fault"] == fault]
        done = [trial for trial in of_fault if "problem" not in trial]
        asked = [trial for trial in done if trial["named"] is not None]
        table[fault] = {
            "trials": len(of_fault),
            "not_run": len(of_fault) - len(done),
            "right": sum(trial["right"] for trial in done),
            "kinds": dict(collections.Counter(trial["diagnosis"]["kind"] for trial in done)),
            "errors_read": len(asked),
            "errors_name_rank": sum(trial["named"] for trial in asked),
            "errors_say_why": sum(trial["says"] for trial in asked),
        }
    return table


def to_lines(report):
    """JSON with one member, fault or trial a line."""
    members = []
    for name, value in report.items():
        text = json.dumps(value)
        if name == "faults":
            text = "{\n" + ",\n".join(f"{json.dumps(fault)}: {json.dumps(row)}" for fault, row in value.items()) + "\n}"
        elif isinstance(value, list) and value:
            text = "[\n" + ",\n".join(json.dumps(trial) for trial in value) + "\n]"
        members.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(members) + "\n}\n"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=ROOT / "build/release/tests/fault/hang_rank")
    parser.add_argument("--doctor", type=Path, default=ROOT / "build/release/tools/ferry", help="the ferry command")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--fault", nargs="+", choices=list(KINDS), help="all that the backend has unless given")
    parser.add_argument("--ranks", nargs="+", type=int, help="numbers of ranks to draw from")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first trial; counts up")
    parser.add_argument("--deadline-ms", type=int, default=2000, help="GroupOptions::timeout_ns")
    parser.add_argument("--parallel", type=int, default=1, help="groups that run at the same time")
    parser.add_argument("--least-right", type=int, default=0, help="fail if fewer diagnoses are right")
    parser.add_argument("--json", metavar="PATH")
    settings = parser.parse_args()
    on_gpu = settings.backend == "cuda"
    settings.fault = settings.fault or ["stop", "kill", "late", "other", "busy" if on_gpu else "link"]
    settings.ranks = settings.ranks or ([2, 4] if on_gpu else [3, 4, 5])
    return settings


def main():
    settings = parse_arguments()
    seeds = range(settings.seed, settings.seed + settings.trials)
    with concurrent.futures.ThreadPoolExecutor(settings.parallel) as pool:
        trials = list(pool.map(lambda seed: play(settings, seed), seeds))
    report = {
        "program": "tests/fault/hang_trials.py",
        "commit": next((trial["diagnosis"]["commit"] for trial in trials if "diagnosis" in trial), None),
        "cores": os.cpu_count(),
        "parallel": settings.parallel,
        "backend": settings.backend,
        "deadline_s": settings.deadline_ms / 1000,
        "trials": len(trials),
        "right": sum(trial.get("right", False) for trial in trials),
        "faults": summarise(trials),
        "not_right": [trial for trial in trials if not trial.get("right", False)],
    }
    out = sys.stderr if settings.json == "-" else sys.stdout
    for fault, row in report["faults"].items():
        print(f"{fault:6} " + ", ".join(f"{name} {value}" for name, value in row.items()), file=out)
    print(f"{report['right']} of {report['trials']} diagnoses are right", file=out)
    for trial in report["not_right"]:
        print(json.dumps(trial), file=out)
    if settings.json:
        text = to_lines(report)
        if settings.json == "-":
            sys.stdout.write(text)
        else:
            Path(settings.json).write_text(text)
    return 1 if report["right"] < settings.least_right else 0


if __name__ == "__main__":
    sys.exit(main())
