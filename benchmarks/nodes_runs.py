"""What benchmarks/nodes.py measures of Ferry: runs of `ferry bench` and of rail_stage over given hosts."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from hosts import Failure
from programs import run_for_json
from rank_processes import RankProcesses

# In the build folder.
FERRY = "tools/ferry"
RAIL_STAGE = "benchmarks/rail_stage"

# As src/net/ucx sets them unless the caller does, so that both use the network in the same way.
SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "256K", "UCX_TCP_RX_SEG_SIZE": "256K"}
SHARED_MEMORY = {"UCX_TLS": "posix,sysv", "UCX_POSIX_ERROR_HANDLING": "y", "UCX_SYSV_ERROR_HANDLING": "y"}
TRANSPORTS = {"tcp": {"UCX_TLS": "tcp", **SEGMENTS}, "shm": SHARED_MEMORY}

CALL_TIMEOUT_S = 600
NUM_ENDS = 2
PUT_ITERATIONS = 50  # of ten calls each
FP8_CHANNELS_PER_SCALE = 128
ITEM_ALIGNMENT = 16


@dataclass(frozen=True)
class Call:
    """One call of a report of `ferry bench`."""

    name: str
    time_us: float
    sent_bytes: int
    formula_bytes: int
    item_bytes: int  # of a token on the way


@dataclass(frozen=True)
class Stage:
    """The rings alone."""

    time_us: float
    gbps: float


def calls_of(bench):
    """The calls of the report that send rows."""
    calls = []
    for result in bench["results"]:
        op, dtype = result["op"], result["dtype"]
        if op not in ("dispatch", "combine"):
            continue
        item_bytes = result["hidden"] * (1 if dtype == "fp8" else 2)
        if dtype == "fp8":
            item_bytes += 4 * (result["hidden"] // FP8_CHANNELS_PER_SCALE)
        if op == "dispatch":
            item_bytes += 8 * result["topk"]  # ids and weights
        item_bytes = -(-item_bytes // ITEM_ALIGNMENT) * ITEM_ALIGNMENT
        sent = result["network"]
        times = result["time_us_p50"]
        calls.append(Call(f"{op}_{dtype}", times, sent["sent_bytes"], sent["formula_bytes"], item_bytes))
    return calls


class Ranks:
    """A group of ranks, half of them at each end, or threads of one process; `options` are those of nodes.py."""

    def __init__(self, options, hosts, environment, threads=False):
        self.options = options
        self.hosts = hosts
        self.environment = environment
        self.threads = threads

    def bench(self, dtype, with_combine):
        """The report of `ferry bench`."""
        o = self.options
        ranks = ["--ranks", o.ranks] if self.threads else []
        return self._run([
            o.build / FERRY, "bench", "--backend", o.backend, "--nodes", o.nodes, "--tokens", o.tokens, "--hidden",
            o.hidden, "--topk", o.topk, "--experts", o.experts, "--dtype", dtype, "--op",
            "pair" if with_combine else "dispatch", "--iterations", o.iterations, "--warmup", 1, "--timeout",
            CALL_TIMEOUT_S, *ranks, *self._network(), "--json", "-",
        ])  # fmt: skip

    def latency_on_one_node(self):
        """The report of `ferry bench` for latency mode, of as many ranks on one node."""
        how = ["--nodes", 1, "--ranks", self.options.ranks, *self._as_threads()]
        return self._latency(lambda arguments: self._run_one_process([*arguments, *how]))

    def latency_over_nodes(self):
        """The same over the nodes."""
        ranks = ["--ranks", self.options.ranks] if self.threads else []
        how = ["--nodes", self.options.nodes, *ranks, *self._network()]
        return self._latency(lambda arguments: self._run([*arguments, *how]))

    def trips(self):
        """The report of one-sided puts between two ranks of two nodes."""
        o = self.options
        ranks = ["--ranks", NUM_ENDS] if self.threads else []
        return self._run([
            o.build / FERRY, "bench", "--op", "put", "--backend", o.backend, "--nodes", NUM_ENDS, *ranks,
            *self._network(), "--iterations", PUT_ITERATIONS, "--timeout", CALL_TIMEOUT_S, "--json", "-",
        ], NUM_ENDS)  # fmt: skip

    def _latency(self, run):
        """One report of all numbers of tokens, each of which is a run."""
        reports = [run(self._latency_arguments(num_tokens)) for num_tokens in self.options.latency]
        return {**reports[-1], "results": [result for report in reports for result in report["results"]]}

    def _latency_arguments(self, num_tokens):
        o = self.options
        return [
            o.build / FERRY, "bench", "--op", "latency-pair", "--backend", o.backend, "--tokens", num_tokens,
            "--hidden", o.hidden, "--topk", o.topk, "--experts", o.experts, "--quantize", "fp8", "--order",
            "rank_sums", "--iterations", o.iterations, "--timeout", CALL_TIMEOUT_S, "--json", "-",
        ]  # fmt: skip

    def _as_threads(self):
        return ["--launch", "threads"] if self.threads else []

    def _network(self):
        return [*self._as_threads(), "--transport", "loopback" if self.threads else "ucx"]

    def stage(self, call):
        """The rings alone, with as many bytes of all ranks as the call."""
        o = self.options
        num_items = max(1, round(call.formula_bytes / (o.ranks * (o.nodes - 1)) / call.item_bytes))
        report = self._rail_stage(num_items, call.item_bytes, o.iterations)
        time_us = statistics.median(report["times_ns"]) / 1e3
        return Stage(time_us, report["sent_bytes"] / time_us / 1e3)

    def ring_shape(self):
        """Chunks of a ring, and bytes of a chunk."""
        report = self._rail_stage(1, ITEM_ALIGNMENT, 1)
        return report["num_chunks"], report["chunk_bytes"]

    def _rail_stage(self, num_items, item_bytes, num_iterations):
        o = self.options
        as_threads = ["--threads", o.ranks, "--transport", "loopback"]
        return self._run([
            o.build / RAIL_STAGE, "--nodes", o.nodes, "--items", num_items, "--item-bytes", item_bytes,
            "--iterations", num_iterations, "--timeout", CALL_TIMEOUT_S,
            *(["--kernel-rings"] if o.backend == "cuda" else []), *(as_threads if self.threads else []),
        ])  # fmt: skip

    def _run(self, arguments, num_ranks=None):
        """The JSON that rank 0 prints. `num_ranks`: by default those of the options."""
        if self.threads:
            return self._run_one_process(arguments)
        program, timeout_s = Path(arguments[0]).name, self._timeout_s()
        with RankProcesses(self.hosts, num_ranks or self.options.ranks, arguments, self.environment) as ranks:
            codes = ranks.wait(timeout_s, until_failure=True)
            for rank, code in enumerate(codes):
                if code not in (None, 0):
                    raise Failure(f"{program}: rank {rank} failed: {ranks.stderr(rank).strip() or code}")
            if None in codes:
                raise Failure(f"{program}: rank {codes.index(None)} is still running after {timeout_s} s")
            return json.loads(ranks.stdout(0))

    def _timeout_s(self):
        """Each call has its own deadline; this one is for ranks that ignore it."""
        return (self.options.iterations + 2) * CALL_TIMEOUT_S

    def _run_one_process(self, arguments):
        """The same of a program that starts its ranks itself."""
        return run_for_json(Path(arguments[0]).name, arguments, self.environment, self._timeout_s())
