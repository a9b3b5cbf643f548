"""What the network does without Ferry: ucx_perftest over given hosts, with given settings of UCX."""

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

from hosts import Failure, last_line, run

PERFTEST = "ucx_perftest"
# Endpoints with the error handling that a group of ranks needs too.
HANDLES_ERRORS = "-e"
LARGE_PUT_BYTES = 1 << 20
MIN_PUTS = 200
WARMUP_PUTS = 20
LISTEN_TIMEOUT_S = 10
RUN_TIMEOUT_S = 600

# State column of a listening socket in /proc/net/tcp.
LISTENING = "0A"


def perftest():
    """The path of ucx_perftest: of the UCX that ranks use where that has one beside it, or None."""
    library = os.environ.get("FERRY_UCX_LIBRARY")
    beside = Path(library).resolve().parent / "bin" / PERFTEST if library else None
    return str(beside) if beside and beside.is_file() else shutil.which(PERFTEST)


class Pairs:
    """Pairs of ucx_perftest."""

    def __init__(self, hosts, environment):
        self.hosts = hosts
        self.environment = with_library(environment)

    def start(self, running, source, test):
        """A client at the source, with the arguments of the test, and its server at the other end."""
        target = 1 - source
        port = self.hosts.free_port()
        program = [perftest(), "-p", str(port)]
        server = self._start(running, target, program)
        self._wait_for_listener(target, port, server)
        return self._start(running, source, [*program, self.hosts.address(target), *test, "-f"]), server

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
        while not self._listens(host_idx, port):
            if server.poll() is not None or time.monotonic() > deadline:
                server.kill()
                raise Failure(f"ucx_perftest does not listen on port {port}: {last_line(server.communicate()[1])}")
            time.sleep(0.02)

    def _listens(self, host_idx, port):
        """Read from the kernel's table, since a machine of few programs has no ss."""
        sockets = [line.split() for line in run(self.hosts.command(host_idx, ["cat", "/proc/net/tcp"])).splitlines()]
        return any(fields[3] == LISTENING and int(fields[1].split(":")[1], 16) == port for fields in sockets[1:])


class Puts(Pairs):
    """How fast puts are, by several pairs at once."""

    def __init__(self, hosts, environment, seconds):
        super().__init__(hosts, environment)
        self.seconds = seconds
        # Bytes, and how many may be outstanding: 0 is what ucx_perftest does by itself.
        self.shapes = {"": (LARGE_PUT_BYTES, 0)}
        self.num_puts = dict.fromkeys(self.shapes, MIN_PUTS)

    def use_chunks(self, num_chunks, chunk_bytes):
        """Measure puts as rings make them, too."""
        self.shapes["chunks_"] = (chunk_bytes, num_chunks)
        self.num_puts["chunks_"] = MIN_PUTS

    def settle(self, num_pairs):
        """Choose numbers of puts so that all pairs together take the time asked for, at the rate of a short run."""
        for kind, (num_bytes, _) in self.shapes.items():
            bytes_per_s = 1e9 * self.gbps(kind, num_pairs, both_ways=True)
            self.num_puts[kind] = max(MIN_PUTS, round(self.seconds * bytes_per_s / num_bytes / (2 * num_pairs)))

    def measure(self, num_rails):
        """GB/s by name."""
        gbps = {}
        for kind in self.shapes:
            gbps[f"{kind}one_pair_one_way"] = self.gbps(kind, 1, both_ways=False)
            gbps[f"{kind}one_pair_each_way"] = self.gbps(kind, 1, both_ways=True)
            if num_rails > 1:
                gbps[f"{kind}all_rails_both_ways"] = self.gbps(kind, num_rails, both_ways=True)
        return gbps

    def gbps(self, kind, num_pairs, both_ways):
        """GB/s of all pairs together until the slowest has finished, which is what a call of ranks waits for too."""
        sources = [0, 1] if both_ways else [0]
        with contextlib.ExitStack() as running:
            pairs = [self._start_pair(running, kind, source) for source in sources for _ in range(num_pairs)]
            return len(pairs) * min([rate_of(client, server) for client, server in pairs])

    def _start_pair(self, running, kind, source):
        num_bytes, num_outstanding = self.shapes[kind]
        test = ["-t", "ucp_put_bw", "-s", str(num_bytes), "-n", str(self.num_puts[kind]), "-w", str(WARMUP_PUTS)]
        window = ["-O", str(num_outstanding)] if num_outstanding else []
        return self.start(running, source, [*test, *window, HANDLES_ERRORS])


def with_library(environment):
    """The environment in which ucx_perftest loads the UCX that ranks load."""
    library = environment.get("FERRY_UCX_LIBRARY")
    if not library:
        return environment
    folder = Path(library) if Path(library).is_dir() else Path(library).parent
    paths = [str(folder), *filter(None, [environment.get("LD_LIBRARY_PATH")])]
    return {**environment, "LD_LIBRARY_PATH": os.pathsep.join(paths)}


def figures_of(client, server):
    """Last line that the client prints: median us of one call, and bytes/s and calls/s of the run."""
    try:
        out, err = client.communicate(timeout=RUN_TIMEOUT_S)
        server.communicate(timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired as expired:
        raise Failure(f"ucx_perftest: still running after {RUN_TIMEOUT_S} s") from expired
    # Iterations, latency (percentile, average, overall), MB/s (average, overall), messages/s (average, overall).
    for line in out.splitlines():
        fields = line.split()
        if client.returncode == 0 and len(fields) >= 8 and fields[0].isdigit():
            return float(fields[1]), float(fields[5]) * (1 << 20), float(fields[7])
    raise Failure(f"ucx_perftest failed: {err.strip() or out.strip()}")


def rate_of(client, server):
    """GB/s of one pair."""
    return figures_of(client, server)[1] / 1e9
