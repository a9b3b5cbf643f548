"""The `ferry` command over two hosts that are network namespaces, with a good, a bad and a cut network.

    first host: ranks 0, 1                    second host: ranks 2, 3
      control  192.0.2.1    ── veth pair ──     192.0.2.2       bootstrap
      data     198.51.100.1 ── veth pair ──     198.51.100.2    tokens, over UCX
      tun      203.0.113.1  ── bad_link.py ──   203.0.113.2     tokens, in the cases tun-…

Tokens have their own link, so that it can be cut while the bootstrap still works. The ranks of `ferry bench` meet in
the bootstrap between two calls.
"""

import contextlib
import json
import os
import re
import shlex
import subprocess
import time
import unittest

from hosts import Impairment, Missing, last_line, poll_until
from rank_processes import RankProcesses

NUM_RANKS = 4
# Limit of runs in which nothing fails: far more than any case needs, so that only a hang exceeds it.
PATIENT_S = 60
# Limit of runs with a failure: each rank must have ended after twice the deadline and the slack, which covers starting
# processes and a busy machine.
DEADLINE_S, SLACK_S = 2, 5
START_TIMEOUT_S = 10
# `ferry bench` checks every row and every sum of this layer.
SMALL_LAYER = ["--tokens", 64, "--hidden", 512, "--topk", 4, "--experts", 16]
ANY_NETWORK_ERROR = ["kTransport", "kTimeout", "kPeerLost"]


class Cases(unittest.TestCase):
    """Each test appends its observations to `details`, and leaves the last output of failed ranks in `output`."""

    hosts = None  # TwoHosts with the links control and data
    ferry = None  # path of the command
    example = None  # path of a program that creates a group with default options
    longMessage = False

    def setUp(self):
        self.details = []
        self.output = ""

    # Good links.

    def test_demo(self):
        printed = self.check_exchange(["demo", "--text", __file__, "--tokens", 32, "--timeout", PATIENT_S])
        verified = re.search(r"^verified.*$", printed, re.MULTILINE)
        self.assertIsNotNone(verified, f"rank 0 did not print that results were verified:\n{printed}")
        self.details.append(verified[0])

    def test_bench(self):
        self.check_bench()

    def test_bench_fp8(self):
        self.check_bench("--dtype", "fp8", "--layout", "experts")

    def test_hosts_are_nodes(self):
        """A program that does not set nodes: the ranks of each host become a node."""
        if not self.example.is_file():
            self.skipTest(f"no program at {self.example}; configure with -DFERRY_EXAMPLES=ON")
        before = self.hosts.sent_bytes("data")
        with self.ranks([], program=self.example) as ranks:
            codes = ranks.wait(PATIENT_S)
            self.assertEqual(codes, [0] * NUM_RANKS, f"the ranks ended with {codes}")
            self.details.append(ranks.stdout(0).strip())
        moved_bytes = self.hosts.sent_bytes("data") - before
        self.assertGreater(moved_bytes, 10_000, f"only {moved_bytes} bytes went over the link")

    def test_hosts_that_no_variable_gives(self):
        """The launcher gives ranks and nothing of hosts: the command finds them, and does not call them emulated."""
        with self.ranks(["bench", *SMALL_LAYER, "--backend", "cpu"], environment={"LOCAL_WORLD_SIZE": ""}) as ranks:
            self.assertEqual(ranks.wait(PATIENT_S), [0] * NUM_RANKS)
            self.assertRegex(ranks.stdout(0), r"ranks started by torchrun on 2 hosts; each process is one rank")
            self.assertRegex(ranks.stdout(0), r"between 2 nodes of \d+ ranks ")
            self.assertNotIn("emulated", ranks.stdout(0))

    def test_four_nodes(self):
        self.check_bench("--nodes", NUM_RANKS)

    # Bad links.

    def test_delay_2ms(self):
        self.check_netem(Impairment(delay_ms=2))

    def test_delay_20ms(self):
        self.check_netem(Impairment(delay_ms=20))

    def test_loss_1_percent(self):
        self.check_netem(Impairment(loss=0.01))

    def test_reorder_25_percent(self):
        self.check_netem(Impairment(delay_ms=2, reorder=0.25))

    def test_slow_link(self):
        self.check_bench_over(self.hosts.rate_limit("data", rate_mbit=20, burst="32k", latency="400ms"))

    def test_tun_delay_2ms(self):
        self.check_tun(Impairment(delay_ms=2))

    def test_tun_delay_20ms(self):
        self.check_tun(Impairment(delay_ms=20))

    def test_tun_loss_1_percent(self):
        self.check_tun(Impairment(loss=0.01))

    def test_tun_reorder_25_percent(self):
        self.check_tun(Impairment(delay_ms=2, reorder=0.25))

    # The interface that ranks use, on which alone they listen.

    def test_network_of_rank_0(self):
        """By default tokens use the bootstrap's network."""
        self.check_listeners("control", {})

    def test_named_network(self):
        self.check_listeners("data", {"FERRY_NET_DEVICES": "data"})

    def test_named_network_of_ucx(self):
        """UCX's own variable takes precedence."""
        self.check_listeners("data", {"FERRY_NET_DEVICES": "control", "UCX_NET_DEVICES": "data"})

    def test_networks_of_four_nodes(self):
        """Two nodes on each host, which use only loopback between each other."""
        self.check_listeners("data", {"FERRY_NET_DEVICES": "data"}, "--nodes", NUM_RANKS)

    def test_missing_network(self):
        with self.ranks(["bench", *SMALL_LAYER], environment={"FERRY_NET_DEVICES": "data,eth7"}) as ranks:
            codes = ranks.wait(PATIENT_S)
            self.assertEqual(codes, [1] * NUM_RANKS)
            for rank in range(NUM_RANKS):
                expected = (
                    r'FERRY_NET_DEVICES is "data,eth7".*"eth7".*this host has .*control.*\(kInvalidArgument, rank 0'
                )
                self.assertRegex(last_line(ranks.stderr(rank)), expected)

    def test_one_node_of_two_hosts(self):
        """Ranks of one node need one network, which these hosts lack; in all else they are one machine."""
        environment = {"LOCAL_WORLD_SIZE": str(NUM_RANKS)}
        with self.ranks(["bench", *SMALL_LAYER, "--backend", "cpu"], environment=environment) as ranks:
            self.assertEqual(ranks.wait(PATIENT_S), [1] * NUM_RANKS)
            for rank in range(NUM_RANKS):
                expected = r"ranks 0 and 2 belong to one node but .* do not share a network.*\(kUnsupported, rank 2\)"
                self.assertRegex(last_line(ranks.stderr(rank)), expected)

    # Several nodes on one host with little shared memory.

    def test_small_shared_memory(self):
        self.check_shared_memory("size=4m")

    def test_read_only_shared_memory(self):
        self.check_shared_memory("size=1g,ro")

    # Failures.

    def test_killed_rank(self):
        with self.endless_loop() as ranks:
            broken_at = time.monotonic()
            ranks.kill(3)
            self.check_typed_errors(ranks, broken_at, ["kPeerLost", "kTimeout"], blamed=3, killed=3)

    def test_cut_data_link(self):
        self.check_cut(["data"])

    def test_cut_both_links(self):
        self.check_cut(["data", "control"])

    def test_no_way(self):
        """Interfaces that lead to no other host: each host's own loopback."""
        broken_at = time.monotonic()
        with self.ranks(["bench", *SMALL_LAYER, "--timeout", DEADLINE_S], interface="lo") as ranks:
            # Rank 0 finds first that there is no route to the other rank of its rail.
            self.check_typed_errors(ranks, broken_at, ANY_NETWORK_ERROR, blamed=2)

    # Shared helpers.

    @contextlib.contextmanager
    def ranks(self, arguments, interface="data", environment=None, program=None):
        """Starts ranks of the command or another program. Their tokens use `interface`, unless `environment` overrides
        it. They inherit nothing from this process's environment."""
        if environment is None:
            environment = {"UCX_NET_DEVICES": interface}
        environment = {"PATH": os.environ.get("PATH", os.defpath), "UCX_TLS": "tcp", **environment}
        with RankProcesses(self.hosts, NUM_RANKS, [program or self.ferry, *arguments], environment) as ranks:
            try:
                yield ranks
            except Exception:
                self.output = "\n".join(last_lines_of(ranks))
                raise

    def check_exchange(self, arguments, interface="data"):
        """Expects all ranks to succeed and to exchange their data over the link. Returns the output of rank 0."""
        before = self.hosts.sent_bytes(interface)
        with self.ranks(arguments, interface) as ranks:
            # Longer than the ranks' own deadline, whose error is more precise than a hang.
            codes = ranks.wait(2 * PATIENT_S)
            moved_bytes = self.hosts.sent_bytes(interface) - before
            self.details.append(f"exit codes {codes}, {moved_bytes // 1000} kB over the link")
            self.assertEqual(codes, [0] * NUM_RANKS, f"the ranks ended with {codes}, not with 0 (None: still running)")
            self.assertGreater(moved_bytes, 100_000, f"only {moved_bytes} bytes went over the link {interface}")
            return ranks.stdout(0)

    def check_bench(self, *options, interface="data"):
        arguments = ["bench", *SMALL_LAYER, "--warmup", 1, "--timeout", PATIENT_S, "--json", "-", *options]
        report = json.loads(self.check_exchange(arguments, interface))
        times_us = {result["op"]: result["time_us_p50"] for result in report["results"]}
        self.details.append(f"a pair takes {times_us['pair'] / 1e3:.3g} ms")

    def check_bench_over(self, bad_link, interface="data"):
        """Runs bench while `bad_link`, a context manager, impairs the interface; skips if this machine cannot."""
        with skipped_if_missing(), bad_link:
            self.check_bench("--iterations", 3, interface=interface)

    def check_netem(self, impairment):
        self.check_bench_over(self.hosts.netem("data", impairment))

    def check_tun(self, impairment):
        self.check_bench_over(self.hosts.tun_link(impairment), interface="tun")

    @contextlib.contextmanager
    def endless_loop(self, *options, interface="data", environment=None):
        """Ranks that exchange without end and have been observed to do so over the link."""
        arguments = ["bench", *SMALL_LAYER, "--warmup", 0, "--iterations", 1000000, "--timeout", DEADLINE_S, *options]
        with self.ranks(arguments, interface, environment) as ranks:
            started = poll_until(START_TIMEOUT_S, lambda: "iteration 1 of" in ranks.stderr(0))
            self.assertTrue(started, f"rank 0 did not report its first iteration in {START_TIMEOUT_S} s")
            enough_bytes = self.hosts.sent_bytes(interface) + 1_000_000
            moved = poll_until(START_TIMEOUT_S, lambda: self.hosts.sent_bytes(interface) >= enough_bytes)
            self.assertTrue(moved, f"the ranks did not move 1 MB over the link in {START_TIMEOUT_S} s")
            yield ranks

    def check_shared_memory(self, mount_options):
        """Eight ranks work with this /dev/shm, or report its problem."""
        bench = [self.ferry, "bench", "--launch", "fork", "--ranks", 8, "--nodes", 2, "--backend", "cpu", *SMALL_LAYER]
        command = f"mount -t tmpfs -o {mount_options} none /dev/shm && exec {shlex.join(map(str, bench))}"
        ended = subprocess.run(
            self.hosts.command(0, ["unshare", "--mount", "sh", "-c", command]),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENT_S,
        )
        self.details.append("the ranks work" if ended.returncode == 0 else "the ranks refuse")
        if ended.returncode != 0:
            self.assertRegex(last_line(ended.stderr), r"/dev/shm.*\(kSystem, rank \d\)")

    def check_listeners(self, interface, environment, *options):
        """Ranks exchange over the interface, and on each host only its address accepts connections."""
        with self.endless_loop(*options, interface=interface, environment=environment):
            for host_idx in range(2):
                addresses = self.hosts.listening_addresses(host_idx)
                self.details.append(f"host {host_idx} listens on {', '.join(sorted(addresses))}")
                self.assertEqual(addresses, {self.hosts.address(host_idx, interface)}, f"listening on {addresses}")

    def check_cut(self, links):
        with self.endless_loop() as ranks:
            broken_at = time.monotonic()
            try:
                self.hosts.cut(links)
                self.check_typed_errors(ranks, broken_at, ANY_NETWORK_ERROR)
            finally:
                self.hosts.raise_links()

    def check_typed_errors(self, ranks, broken_at, types, blamed=None, killed=None):
        """All ranks but the killed one end in time, each with an error that has one of the types and names a call and
        a rank; at least one error names the rank to blame, by default any."""
        # The call is at the front; the error type and the blamed rank are in brackets at the end.
        pattern = re.compile(
            r"ferry bench: (?:.*: )?(route|dispatch|combine|Group::create|all_gather)\b.* "
            rf"\(({'|'.join(types)}), rank (\d+)\)"
        )
        codes = ranks.wait(2 * DEADLINE_S + SLACK_S)
        self.details.append(f"ended after {1e3 * (time.monotonic() - broken_at):.0f} ms")
        survivors = [rank for rank in range(NUM_RANKS) if rank != killed]
        problems = []
        num_right = 0
        for rank in survivors:
            error = last_line(ranks.stderr(rank))
            match = pattern.fullmatch(error)
            if codes[rank] is None:
                problems.append(f"rank {rank} is still running")
            elif codes[rank] != 1:
                problems.append(f"rank {rank} ended with {codes[rank]}, not 1")
            elif match is None:
                problems.append(f"rank {rank} ended with another error: {error}")
            else:
                call, error_type, named = match[1], match[2], int(match[3])
                self.details.append(f"rank {rank}: {call}, {error_type} of {named}")
                if blamed in (None, named):
                    num_right += 1
                elif (call, named) != ("all_gather", 0):
                    # Between two calls the ranks meet in the bootstrap, which rank 0 leads: if rank 0 leaves because of
                    # the failure, a rank that waits there sees only that rank 0 has left.
                    problems.append(f"rank {rank} blames rank {named}, not {blamed}")
        if num_right == 0:
            problems.append("no rank names the rank to blame")
        self.assertEqual(problems, [], "\n".join(problems))


@contextlib.contextmanager
def skipped_if_missing():
    try:
        yield
    except Missing as missing:
        raise unittest.SkipTest(f"missing: {missing}") from missing


def last_lines_of(ranks):
    for rank in range(NUM_RANKS):
        for name, text in (("stdout", ranks.stdout(rank)), ("stderr", ranks.stderr(rank))):
            yield from (f"rank {rank} {name}: {line}" for line in text.splitlines()[-5:])
