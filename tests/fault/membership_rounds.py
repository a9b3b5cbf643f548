#!/usr/bin/env -S python3 -B
"""Loses members of a set of processes at random moments, lets others take their place, and checks who agrees on what.

NODES x RANKS processes of this host make steps (membership_rank.cpp, decode_rank.cpp). In each round one of them, or
two, get SIGKILL or SIGSTOP at a random moment. The others must agree: all print the same next view, without the lost
ones, and go on from the step that all have completed; every result is compared by the process that has it. A new
process takes each lost one's number, and the view must be whole again. Before or after that a stopped process gets
SIGCONT, and must learn that it was left out.

Prints a table, or JSON (--json PATH; "-": standard output). Exit code 1: anything that must not be.

  tests/fault/membership_rounds.py --shape 1x8 --shape 2x4 --rounds 100 --json rounds.json
"""

import argparse
import contextlib
import json
import os
import platform
import queue
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# Deadlines of a group's waits. Over nodes, the end of a group that has a stopped rank takes a second, and the first
# call of the next group must wait for a member that is late by that.
DEADLINE_MS = 1000
NODES_DEADLINE_MS = 2500
# Limit of one step of a round on a busy machine. Times are reported, not judged.
LIMIT_S = 60


class Problem(Exception):
    """Something that must not be."""


def deadline_of(settings, has_nodes):
    return settings.deadline_ms or (NODES_DEADLINE_MS if has_nodes else DEADLINE_MS)


def patience_of(settings, has_nodes):
    """How long members wait for one that lives and does not come: longer than what keeps it from next_view, a deadline
    of its group and the end of the group before."""
    return settings.patience_ms or 2 * deadline_of(settings, has_nodes) + 2000


class Member:
    """A process; its events arrive in the order in which it printed them."""

    def __init__(self, settings, num_first_ranks, ranks_per_node, arguments):
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            [
                str(settings.program),
                *map(str, arguments),
                *("--first-ranks", str(num_first_ranks)),
                *("--deadline-ms", str(deadline_of(settings, ranks_per_node > 0))),
                *("--patience-ms", str(patience_of(settings, ranks_per_node > 0))),
                *("--ranks-per-node", str(ranks_per_node)),
                *("--backend", settings.backend),
                *("--look-every", str(settings.look_every)),
                *(["--unmasked"] if settings.unmasked else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.view = None
        self.failed_s = 0.0  # of the latest call that failed
        self.asked_s = 0.0  # of the latest call of next_view after that
        self._events = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def next_event(self, name):
        """The next event of this name. Events of failed calls before it are passed over."""
        until = time.monotonic() + LIMIT_S
        while True:
            try:
                event = self._events.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise Problem(f"no event {name} in {LIMIT_S} s") from None
            if event is None:
                raise Problem(f"ended with {self.process.wait()} instead of {name}")
            if event["event"] == name:
                return event
            if event["event"] == "failed":
                self.failed_s = event["at_ns"] / 1e9
            if event["event"] == "asked":
                self.asked_s = event["at_ns"] / 1e9
            if event["event"] not in ("failed", "asked", "step", "start", "view"):
                raise Problem(f"event {event} instead of {name}")

    def next_view(self, ids):
        """The view with these ids, and the time of the first one after a loss."""
        first_s = None
        while True:
            self.view = self.next_event("view")
            first_s = first_s or self.view["at_ns"] / 1e9
            if self.view["ids"] == ids:
                return first_s

    def first_step_s(self):
        return self.next_event("step")["at_ns"] / 1e9

    def end(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self):
        if self.process.stdout.closed:
            return
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        self.process.stdout.close()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class World:
    """The members of one shape."""

    def __init__(self, settings, shape, seed):
        self.settings = settings
        self.num_nodes, self.ranks_per_node = shape
        self.num_ranks = self.num_nodes * self.ranks_per_node
        self.chance = random.Random(f"{shape}-{seed}")
        self.node_size = self.ranks_per_node if self.num_nodes > 1 else 0
        self.members = {}
        self.gone = []
        self.num_steps = 0
        self.times = {"noticed_s": [], "asked_s": [], "agreed_s": [], "stepped_s": [], "rejoined_s": []}
        port = free_port()
        for rank in range(self.num_ranks):
            self.members[rank] = self.start(["--create", rank, self.num_ranks, port])
        self.expect_view(sorted(self.members))
        for member in self.members.values():
            member.first_step_s()

    def start(self, arguments):
        return Member(self.settings, self.num_ranks, self.node_size, arguments)

    def expect_view(self, ids):
        """All members of `ids` have the same view. Returns the latest time at which one had the first view."""
        latest_s = max(self.members[member].next_view(ids) for member in ids)
        views = {
            json.dumps({key: self.members[member].view[key] for key in ("epoch", "ids", "steps")}) for member in ids
        }
        if len(views) != 1:
            raise Problem(f"views differ: {sorted(views)}")
        return latest_s

    def play(self, fault, num_lost):
        time.sleep(self.chance.uniform(0, self.settings.longest_run_ms / 1000))
        lost = self.chance.sample(sorted(self.members), num_lost)
        left = [member for member in sorted(self.members) if member not in lost]
        begin_s = time.monotonic()
        for member in lost:
            self.members[member].process.send_signal(fault)
        self.times["agreed_s"].append(self.expect_view(left) - begin_s)
        self.times["noticed_s"].append(max(self.members[member].failed_s for member in left) - begin_s)
        self.times["asked_s"].append(max(self.members[member].asked_s for member in left) - begin_s)
        self.times["stepped_s"].append(max(self.members[member].first_step_s() for member in left) - begin_s)
        gone = [self.members.pop(member) for member in lost]
        self.gone = gone
        # What a stopped process writes when it goes on must reach none of the others, nor one that has its place.
        wakes_late = self.chance.random() < 0.5
        if not wakes_late:
            self.end_lost(gone, fault)
        self.rejoin(left, lost)
        if wakes_late:
            self.end_lost(gone, fault)

    @staticmethod
    def end_lost(members, fault):
        for gone in members:
            if fault == signal.SIGSTOP:
                gone.process.send_signal(signal.SIGCONT)
                gone.next_event("left_out")
            gone.close()

    def rejoin(self, left, lost):
        chosen = self.chance.sample(left, min(2, len(left)))
        contacts = ",".join(self.members[member].view["address"] for member in chosen)
        for member in lost:
            self.members[member] = self.start(["--join", member, contacts])
        whole = list(range(self.num_ranks))
        # Each may be let in by another change of the view.
        for member in whole:
            self.members[member].next_view(whole)
        epochs = {self.members[member].view["epoch"] for member in whole}
        if len(epochs) != 1:
            raise Problem(f"epochs differ: {sorted(epochs)}")
        stepped_s = max(self.members[member].first_step_s() for member in whole)
        self.times["rejoined_s"].append(stepped_s - min(self.members[member].started_s for member in lost))

    def end(self):
        for member in self.members.values():
            member.end()
        for member in self.members.values():
            self.num_steps = member.next_event("ended").get("steps", 0)
            if member.process.wait(LIMIT_S) != 0:
                raise Problem(f"exit code {member.process.returncode}")

    def close(self):
        for member in [*self.members.values(), *self.gone]:
            member.close()


def spread(values):
    ordered = sorted(values)
    if not ordered:
        return None
    return {
        "median_ms": round(1e3 * ordered[len(ordered) // 2], 1),
        "p95_ms": round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)], 1),
        "worst_ms": round(1e3 * ordered[-1], 1),
    }


def run_shape(settings, shape, fault):
    name = {signal.SIGKILL: "killed", signal.SIGSTOP: "stopped"}[fault]
    outcome = {
        "program": settings.program.name,
        "backend": settings.backend,
        "shape": "x".join(map(str, shape)),
        "fault": name,
        "deadline_ms": deadline_of(settings, shape[0] > 1),
        "patience_ms": patience_of(settings, shape[0] > 1),
        "look_every": settings.look_every,
        "rounds": 0,
        "problem": "",
    }
    world = None
    try:
        world = World(settings, shape, f"{settings.seed}-{name}")
        for number in range(settings.rounds):
            # Stopped ones may live: those that go on must be more than half.
            many = world.num_ranks > (3 if fault == signal.SIGKILL else 4) and number % 4 == 3
            world.play(fault, 2 if many else 1)
            outcome["rounds"] += 1
        world.end()
        outcome["steps"] = world.num_steps
    except Problem as problem:
        outcome["problem"] = str(problem)
    finally:
        if world is not None:
            world.close()
            outcome.update({key: spread(values) for key, values in world.times.items()})
    return outcome


def shape_of(text):
    nodes, ranks = text.split("x")
    return int(nodes), int(ranks)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=ROOT / "build/release/tests/fault/membership_rank")
    parser.add_argument("--backend", default="cpu", help="of a program that takes another one, such as decode_rank")
    parser.add_argument("--unmasked", action="store_true", help="groups of decode_rank do not mask lost ranks")
    parser.add_argument("--shape", type=shape_of, action="append", help="NODESxRANKS; may be repeated (1x4)")
    parser.add_argument("--fault", choices=("kill", "stop"), action="append", help="may be repeated (both)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--deadline-ms", type=int, help="of a group's waits (1000, over nodes 2500)")
    parser.add_argument("--patience-ms", type=int, help="of members for one another (twice the deadline and 2000)")
    parser.add_argument("--longest-run-ms", type=int, default=50, help="longest time between two losses")
    parser.add_argument("--look-every", type=int, default=20, help="steps after which members look for others (20)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="PATH")
    settings = parser.parse_args()
    os.environ["FERRY_SECRET"] = secrets.token_hex(16)
    outcomes = []
    for shape in settings.shape or [(1, 4)]:
        for fault in settings.fault or ["kill", "stop"]:
            outcomes.append(run_shape(settings, shape, signal.SIGKILL if fault == "kill" else signal.SIGSTOP))
            print(json.dumps(outcomes[-1]), file=sys.stderr)
    if settings.json:
        record = {
            "machine": {"cores": os.cpu_count(), "system": platform.platform()},
            "outcomes": outcomes,
        }
        text = json.dumps(record, indent=2) + "\n"
        if settings.json == "-":
            sys.stdout.write(text)
        else:
            Path(settings.json).write_text(text)
    sys.exit(1 if any(outcome["problem"] for outcome in outcomes) else 0)


if __name__ == "__main__":
    main()
