"""What benchmarks/nodes.py measures: runs of ucx_perftest, of `ferry bench` and of rail_stage over given hosts."""

import contextlib
import json
import statistics
import subprocess
import time
from pathlib import Path

from hosts import Failure, last_line, run, tool
from rank_processes import RankProcesses

# In the build folder.
FERRY = "tools/ferry"
RAIL_STAGE = "benchmarks/rail_stage"

# As src/net/ucx sets them unless the caller does, so that both use the network in the same way.
SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "256K", "UCX_TCP_RX_SEG_SIZE": "256K"}
SHARED_MEMORY = {"UCX_TLS": "posix,sysv", "UCX_POSIX_ERROR_HANDLING": "y", "UCX_SYSV_ERROR_HANDLING": "y"}
TRANSPORTS = {"tcp": {"UCX_TLS": "tcp", **SEGMENTS}, "shm": SHARED_MEMORY}

PUT_BYTES = 1 << 20
# Long enough for TCP to reach its rate.
PUT_SECONDS = 3
MIN_PUTS = 200
WARMUP_PUTS = 20
LISTEN_TIMEOUT_S = 10
CALL_TIMEOUT_S = 600


class Puts:
    """ucx_perftest -t ucp_put_bw, with the error handling that a group of ranks needs too."""

    def __init__(self, hosts, environment):
        self.hosts = hosts
        self.environment = environment
        self.num_puts = MIN_PUTS

    def settle(self, num_pairs):
        """Choose the number of puts so that all pairs together take PUT_SECONDS at the rate of a first, short run."""
        bytes_per_s = 1e9 * self.gbps(num_pairs, both_ways=True)
        self.num_puts = max(MIN_PUTS, round(PUT_SECONDS * bytes_per_s / PUT_BYTES / (2 * num_pairs)))

    def gbps(self, num_pairs, both_ways):
        """GB/s of all pairs together until the slowest has finished, which is what a call of ranks waits for too."""
        sources = [0, 1] if both_ways else [0]
        with contextlib.ExitStack() as running:
            pairs = [self._start_pair(running, source) for source in sources for _ in range(num_pairs)]
            return len(pairs) * min([rate_of(client, server) for client, server in pairs])

    def _start_pair(self, running, source):
        """A client that puts from the source, and its server at the other end."""
        target = 1 - source
        port = self.hosts.free_port()
        program = ["ucx_perftest", "-p", str(port)]
        server = self._start(running, target, program)
        self._wait_for_listener(target, port, server)
        test = ["-t", "ucp_put_bw", "-s", str(PUT_BYTES), "-n", str(self.num_puts), "-w", str(WARMUP_PUTS), "-e", "-f"]
        return self._start(running, source, [*program, self.hosts.address(target), *test]), server

    def _start(self, running, host_idx, arguments):
        process = subprocess.Popen(
            self.hosts.command(host_idx, arguments),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.enter_context(process)
        running.callback(process.kill)
        return process

    def _wait_for_listener(self, host_idx, port, server):
        deadline = time.monotonic() + LISTEN_TIMEOUT_S
        while f":{port} " not in run(self.hosts.command(host_idx, [tool("ss"), "-Hltn"])):
            if server.poll() is not None or time.monotonic() > deadline:
                server.kill()
                raise Failure(f"ucx_perftest does not listen on port {port}: {last_line(server.communicate()[1])}")
            time.sleep(0.02)


def rate_of(client, server):
    """GB/s of one pair, from the last line that its client prints."""
    try:
        out, err = client.communicate(timeout=CALL_TIMEOUT_S)
        server.communicate(timeout=CALL_TIMEOUT_S)
    except subprocess.TimeoutExpired as expired:
        raise Failure(f"ucx_perftest: still running after {CALL_TIMEOUT_S} s") from expired
    # Iterations, latency (percentile, average, overall), MB/s (average, overall), messages/s (average, overall).
    for line in out.splitlines():
        fields = line.split()
        if client.returncode == 0 and len(fields) >= 8 and fields[0].isdigit():
            return float(fields[5]) * (1 << 20) / 1e9
    raise Failure(f"ucx_perftest failed: {err.strip() or out.strip()}")


class Ranks:
    """A group of ranks, half of them at each end; `options` are those of nodes.py."""

    def __init__(self, options, hosts, environment):
        self.options = options
        self.hosts = hosts
        self.environment = environment

    def bench(self):
        """The report of `ferry bench`."""
        o = self.options
        return self._run([
            o.build / FERRY, "bench", "--backend", o.backend, "--nodes", o.nodes, "--tokens", o.tokens, "--hidden",
            o.hidden, "--topk", o.topk, "--experts", o.experts, "--dtype", o.dtype, "--iterations", o.iterations,
            "--warmup", 1, "--timeout", CALL_TIMEOUT_S, "--transport", "ucx", "--json", "-",
        ])  # fmt: skip

    def stage(self, num_bytes):
        """The rings alone, with so many bytes of all ranks: microseconds and GB/s."""
        o = self.options
        item_bytes = 2 * o.hidden
        num_items = max(1, round(num_bytes / (o.ranks * (o.nodes - 1)) / item_bytes))
        report = self._run([
            o.build / RAIL_STAGE, "--nodes", o.nodes, "--items", num_items, "--item-bytes", item_bytes,
            "--iterations", o.iterations, "--timeout", CALL_TIMEOUT_S,
            *(["--kernel-rings"] if o.backend == "cuda" else []),
        ])  # fmt: skip
        time_us = statistics.median(report["times_ns"]) / 1e3
        return time_us, report["sent_bytes"] / time_us / 1e3

    def _run(self, arguments):
        """The JSON that rank 0 prints."""
        program = Path(arguments[0]).name
        # Each call has its own deadline; this one is for ranks that ignore it.
        timeout_s = (self.options.iterations + 2) * CALL_TIMEOUT_S
        with RankProcesses(self.hosts, self.options.ranks, arguments, self.environment) as ranks:
            codes = ranks.wait(timeout_s, until_failure=True)
            for rank, code in enumerate(codes):
                if code not in (None, 0):
                    raise Failure(f"{program}: rank {rank} failed: {ranks.stderr(rank).strip() or code}")
            if None in codes:
                raise Failure(f"{program}: rank {codes.index(None)} is still running after {timeout_s} s")
            return json.loads(ranks.stdout(0))
