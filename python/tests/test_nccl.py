"""Calls beside collectives of NCCL: both wait for the other rank while they hold multiprocessors, and ranks bring them
in different orders.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from slabs import make_group
from world import World, make_world

import ferry

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")

NUM_RANKS = 2
NUM_EXPERTS = 32
HIDDEN = 7168
SIZES = [1, 8, 32, 64, 128]
NUM_ROUNDS = int(os.environ.get("FERRY_NCCL_ROUNDS", "200"))
# As many thread blocks as an NCCL kernel has by default at most (NCCL_MAX_CTAS); few would leave Ferry more room.
NCCL_CTAS = "32"
# Far longer than a round, and short enough to end a test whose ranks wait for each other.
TIMEOUT_S = 20
# Side of a square matrix product that fills an H100 for 5 ms.
BUSY_SIDE = 12288

Exchange = Callable[[], torch.Tensor]


class Calls:
    """Whole calls, split calls and those of throughput mode on one rank's tokens, each as a function of nothing."""

    def __init__(self, group: ferry.Group, world: World, rank: int, max_tokens: int) -> None:
        self.group, self.max_tokens = group, max_tokens
        self.x, self.idx, self.weights = (
            field[rank].to(group.device) for field in (world.x, world.topk_idx, world.topk_weights)
        )
        self.rows = torch.randn(
            NUM_EXPERTS // NUM_RANKS, NUM_RANKS * max_tokens, HIDDEN, device=group.device, dtype=torch.bfloat16
        )

    def latency(self, *, sums: bool, split: bool) -> torch.Tensor:
        """``sums``: rows travel as FP8, and come back as sums of each rank with weights that only combine is given."""
        dispatched = self.group.latency_dispatch(
            self.x,
            self.idx,
            None if sums else self.weights,
            num_experts=NUM_EXPERTS,
            max_tokens=self.max_tokens,
            quantize="fp8" if sums else None,
            split=split,
        )
        if split:
            dispatched.receive()
        combined = self.group.latency_combine(
            self.rows,
            dispatched,
            self.weights if sums else None,
            order="rank_sums" if sums else "exact",
            split=split,
        )
        if split:
            combined.receive()
        return combined.x

    def throughput(self) -> torch.Tensor:
        routing = self.group.route(
            self.idx, self.weights, num_experts=NUM_EXPERTS, max_recv_rows=NUM_RANKS * self.max_tokens
        )
        received = self.group.dispatch(routing, self.x)
        return self.group.combine(routing, received.x).x

    def ways(self) -> dict[str, Exchange]:
        ways: dict[str, Exchange] = {"throughput": self.throughput}
        for sums in (False, True):
            for split in (False, True):
                name = f"{'rank sums' if sums else 'exact'}{', split' if split else ''}"
                ways[name] = lambda sums=sums, split=split: self.latency(sums=sums, split=split)
        return ways


def as_graph(exchange: Exchange) -> Exchange:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = exchange()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


class Neighbour:
    """An all-gather of NCCL on a stream of its own, which every other round this rank begins before its exchange."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.group = dist.new_group(backend="nccl")
        self.mine = torch.full((8 << 20,), float(rank), device="cuda")
        self.all = torch.empty(NUM_RANKS * self.mine.numel(), device="cuda")
        self.stream = torch.cuda.Stream()
        self.gather()
        torch.cuda.synchronize()

    def gather(self) -> None:
        with torch.cuda.stream(self.stream):
            dist.all_gather_into_tensor(self.all, self.mine, group=self.group)

    def round(self, number: int, exchange: Exchange, *, waits: bool) -> torch.Tensor:
        """``waits``: an exchange that comes second begins after the all-gather has ended."""
        first = (number + self.rank) % NUM_RANKS == 0
        if first:
            self.gather()
            if waits:
                torch.cuda.current_stream().wait_stream(self.stream)
        out = exchange()
        if not first:
            self.gather()
        torch.cuda.synchronize()
        return out


def check_beside_nccl(rank: int, busy: bool, waits: bool) -> None:
    os.environ["NCCL_MIN_CTAS"] = os.environ["NCCL_MAX_CTAS"] = NCCL_CTAS
    torch.cuda.set_device(rank)
    neighbour = Neighbour(rank)
    matrix = torch.randn(BUSY_SIDE, BUSY_SIDE, device="cuda", dtype=torch.bfloat16) if busy else None
    product = torch.empty_like(matrix) if busy else None
    computing = torch.cuda.Stream()
    for num_tokens in SIZES:
        world = make_world(NUM_RANKS, NUM_EXPERTS, [num_tokens] * NUM_RANKS, hidden=HIDDEN, num_topk=8)
        group = make_group(rank, "cuda", world, num_tokens, timeout=TIMEOUT_S)
        calls = Calls(group, world, rank, num_tokens)
        ways = calls.ways()
        expected = {name: exchange().clone() for name, exchange in ways.items()}
        torch.cuda.synchronize()
        ways |= {f"{name}, in a graph": as_graph(exchange) for name, exchange in ways.items()}
        for name, exchange in ways.items():
            for number in range(NUM_ROUNDS):
                if busy:
                    with torch.cuda.stream(computing):
                        torch.mm(matrix, matrix, out=product)
                out = neighbour.round(number, exchange, waits=waits)
                group.wait()  # raises if the exchange failed
                assert torch.equal(out, expected[name.removesuffix(", in a graph")]), (num_tokens, name, number)
        group.wait()
        group.destroy()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_exchanges_and_all_gathers_run_in_any_order(busy: bool, waits: bool) -> None:
    run_ranks(NUM_RANKS, check_beside_nccl, busy, waits)
