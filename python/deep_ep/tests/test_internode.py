"""Buffers over several nodes, emulated on this host: handles, results, and information for programs about nodes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clients import Inputs, device_of, dispatch, inputs_of, layout_of, make_buffer, make_elastic
from network import skip_without_network
from ranks import run_ranks
from world import World, make_world

import deep_ep
import ferry
import reference
from deep_ep._num_sms import chunk_of_config

NUM_CHANNELS = 3
LOST_RANK = 1
CONFIG = deep_ep.Config(num_sms=2 * NUM_CHANNELS)


@pytest.fixture(scope="module", autouse=True)
def _needs_a_network() -> None:
    skip_without_network()


class Nodes:
    """Expected contents of a rank's handle, counted token by token from the documentation."""

    def __init__(self, world: World, per_node: int, rank: int) -> None:
        self.world, self.per_node, self.rank = world, per_node, rank
        self.num_nodes = world.num_ranks // per_node
        self.node, self.rail = divmod(rank, per_node)

    def channel_of(self, source: int, token: int) -> int:
        return token // -(-len(self.world.x[source]) // NUM_CHANNELS)

    def tokens(self, source: int, goes: Callable[[list[int]], bool]) -> list[int]:
        """Tokens of a rank that go to ranks of which ``goes`` is true."""
        return [t for t in range(len(self.world.x[source])) if goes(self.world.ranks_of(source, t))]

    def to_rank(self, source: int, rank: int) -> list[int]:
        return self.tokens(source, lambda ranks: rank in ranks)

    def to_node(self, source: int, node: int) -> list[int]:
        return self.tokens(source, lambda ranks: any(rank // self.per_node == node for rank in ranks))

    def up_to(self, source: int, tokens: list[int], channel: int) -> int:
        return sum(self.channel_of(source, token) <= channel for token in tokens)

    def by_channel(self, source: int, tokens: list[int]) -> list[int]:
        return [self.up_to(source, tokens, channel) for channel in range(NUM_CHANNELS)]

    def forwarded(self) -> list[tuple[int, int]]:
        """(source rank, token) of the tokens that this rank forwards."""
        rails = [node * self.per_node + self.rail for node in range(self.num_nodes)]
        return [(source, token) for source in rails for token in self.to_node(source, self.node)]

    def handle(self, num_spare: int) -> list[Any]:
        world, rank, per_node = self.world, self.rank, self.per_node
        ranks, nodes = range(world.num_ranks), range(self.num_nodes)
        rails = [node * per_node + self.rail for node in nodes]
        rows = world.rows_of(rank)
        row_ends = [sum(source <= r for source, _ in rows) for r in ranks]
        forwarded = self.forwarded()
        num_tokens = len(world.x[rank])
        meta = [
            [
                source // per_node,
                sum(1 << r % per_node for r in world.ranks_of(source, token) if r // per_node == self.node),
            ]
            for source, token in rows
        ] + [[-1, 0]] * num_spare

        def index(members: list[Any], one: Any) -> int:
            return members.index(one) if one in members else -1

        def forwarded_to(j: int) -> list[tuple[int, int]]:
            return [(s, t) for s, t in forwarded if self.node * per_node + j in world.ranks_of(s, t)]

        to_nodes = [self.to_node(rank, node) for node in nodes]
        columns = [forwarded_to(j) if j < per_node else [] for j in range(8)]
        return [
            reference.in_rank(world, rank).tolist(),
            [self.by_channel(rank, tokens) for tokens in to_nodes],
            [self.by_channel(rank, self.to_rank(rank, r)) for r in ranks],
            [self.by_channel(source, self.to_node(source, self.node)) for source in rails],
            [sum(source // per_node <= node for source, _ in forwarded) for node in nodes],
            [[row_ends[r] - len(came) + self.up_to(r, came, c - 1) for c in range(NUM_CHANNELS)]
             for r, came in ((r, self.to_rank(r, rank)) for r in ranks)],
            row_ends,
            meta,
            [[index(tokens, token) for tokens in to_nodes] for token in range(num_tokens)],
            [[index(column, one) for column in columns] for one in forwarded],
        ]  # fmt: skip


def check_contents(rank: int, world: World, device: str, per_node: int, num_worst_tokens: int) -> None:
    buffer = make_buffer(rank, device, ranks_per_node=per_node)
    mine = inputs_of(world, rank, device_of(rank, device))
    nodes = Nodes(world, per_node, rank)
    per_rank, per_rail, *_ = buffer.get_dispatch_layout(mine.idx, world.num_experts)
    assert per_rank.tolist() == [len(nodes.to_rank(rank, r)) for r in range(world.num_ranks)]
    assert per_rail.tolist() == [len(nodes.to_node(rank, node)) for node in range(nodes.num_nodes)]
    assert per_rail.dtype == torch.int32
    x, *_, handle, _ = dispatch(buffer, world, mine, config=CONFIG, num_worst_tokens=num_worst_tokens)
    assert type(handle) is tuple and len(handle) == 10
    assert all(isinstance(tensor, torch.Tensor) and tensor.is_contiguous() for tensor in handle)
    assert [handle[0].dtype, handle[7].dtype] == [torch.bool, torch.uint8] and handle[7].shape == (len(x), 8)
    assert {tensor.dtype for index, tensor in enumerate(handle) if index not in (0, 7)} == {torch.int32}
    num_spare = len(x) - len(world.rows_of(rank))
    expected = nodes.handle(num_spare)
    found = [tensor.view(torch.int32) if tensor.dtype == torch.uint8 else tensor for tensor in handle]
    assert [tensor.cpu().tolist() for tensor in found] == expected
    buffer.destroy()


@pytest.mark.parametrize("per_node", [1, 2])
def test_contents_of_handles(per_node: int, device: str) -> None:
    run_ranks(4, check_contents, make_world(4, 8, [7, 0, 4, 9]), device, per_node, 0)


def test_contents_of_a_bounded_handle(device: str) -> None:
    run_ranks(2, check_contents, make_world(2, 6, [7, 4]), device, 1, 20)


def sums_of_nodes(
    world: World, rank: int, per_node: int, biases: list[torch.Tensor], *, rounds_once: bool = False
) -> torch.Tensor:
    """Sums of :func:`reference.scaled` rows: of each node in fp32 and rounded; then biases and nodes."""
    x = world.x[rank]
    out = torch.empty_like(x)
    for token in range(len(x)):
        total = torch.zeros(x.shape[1])
        for bias in biases:
            total = total + bias[token].float()
        ranks = world.ranks_of(rank, token)
        for node in sorted({r // per_node for r in ranks}):
            part = torch.zeros(x.shape[1])
            for other in ranks:
                if other // per_node == node:
                    part = part + reference.scaled(x[token], other).float()
            total = total + (part if rounds_once else part.to(x.dtype).float())
        out[token] = total.to(x.dtype)
    return out


def check_results(rank: int, world: World, device: str, per_node: int) -> None:
    buffer = make_buffer(rank, device, ranks_per_node=per_node)
    mine = inputs_of(world, rank, device_of(rank, device))
    rows = reference.received_rows(world, rank)
    layout = layout_of(buffer, mine.idx, world.num_experts)
    x, idx, weights, counts, handle, event = buffer.internode_dispatch(
        mine.x, topk_idx=mine.idx, topk_weights=mine.weights, expert_alignment=4, **layout
    )
    assert event.event is None
    assert torch.equal(x.cpu(), rows)
    assert idx.tolist() == reference.received_ids(world, rank)
    assert torch.equal(weights.cpu(), reference.received_weights(world, rank))
    assert counts == [reference.align(count, 4) for count in reference.entries_per_local_expert(world, rank)]

    biases = [(mine.x * 0.5).contiguous(), (mine.x * 0.25).contiguous()]
    expected = sums_of_nodes(world, rank, per_node, [bias.cpu() for bias in biases])
    y = reference.scaled(x, rank)
    out, sums, event = buffer.internode_combine(y, handle, topk_weights=weights, bias=biases, async_finish=True)
    event.current_stream_wait()
    assert torch.equal(out.cpu(), expected)
    assert torch.equal(sums.cpu(), torch.where(world.topk_idx[rank] >= 0, world.topk_weights[rank], 0.0))

    # The group itself gives the same bits.
    group = buffer.runtime
    routing = group.route(mine.idx, mine.weights, num_experts=world.num_experts)
    received = group.dispatch(routing, mine.x)
    assert torch.equal(received.x, x) and torch.equal(received.topk_idx, idx)
    assert torch.equal(group.combine(routing, y, bias=biases).x, out)

    check_again(buffer, mine, handle, y, rows, sums_of_nodes(world, rank, per_node, []))
    check_scales(buffer, world, rank, mine, layout)
    buffer.destroy()


def check_again(
    buffer: deep_ep.Buffer, mine: Inputs, handle: tuple, y: torch.Tensor, rows: torch.Tensor, expected: torch.Tensor
) -> None:
    """Cached dispatches: with the handle itself, as autograd restores it, and with a copy of it."""
    saved = [tensor.detach().view(tensor.shape) for tensor in handle]
    copied = tuple(tensor.clone() for tensor in handle)
    for given in (handle, saved, copied):
        again, *nothing, _ = buffer.dispatch(mine.x, handle=given)
        assert nothing == [None] * 4
        assert torch.equal(again.cpu(), rows)
        assert torch.equal(buffer.combine(y, given)[0].cpu(), expected)


def check_scales(buffer: deep_ep.Buffer, world: World, rank: int, mine: Inputs, layout: dict[str, Any]) -> None:
    """Scales of both dtypes and of any strides arrive as they were sent."""
    sent = [torch.arange(3 * len(x), dtype=torch.float32).view(3, -1).t() + 100 * r for r, x in enumerate(world.x)]
    rows = mine.x.to(torch.float8_e4m3fn)
    for dtype in (torch.float32, torch.int32):
        scales = sent[rank].to(dtype).to(rows.device)
        payload = (rows, scales)
        (x, came), *_ = buffer.dispatch(payload, topk_idx=mine.idx, topk_weights=mine.weights, **layout)
        assert came.dtype == dtype and came.is_contiguous()
        expected = [sent[s][t] for s, t in world.rows_of(rank)]
        assert torch.equal(came.cpu(), reference.stack(expected, sent[rank]).to(dtype))
        assert len(x) == len(expected)
    flat = scales[:, 0].contiguous()
    (_, came), *_ = buffer.dispatch((rows, flat), topk_idx=mine.idx, topk_weights=mine.weights, **layout)
    assert came.dim() == 1 and len(came) == len(expected)


@pytest.mark.parametrize(("num_ranks", "per_node"), [(4, 2), (3, 1)])
def test_results(num_ranks: int, per_node: int, device: str) -> None:
    run_ranks(num_ranks, check_results, make_world(num_ranks, 12, [5, 8, 0, 6][:num_ranks]), device, per_node)


def check_rounding(rank: int, world: World, device: str) -> None:
    mine = inputs_of(world, rank, device_of(rank, device))
    bias = (mine.x * 0.5).contiguous()
    sums = []
    for rounds_once in (False, True):
        buffer = make_elastic(rank, device, ranks_per_node=2, allow_multiple_reduction=not rounds_once)
        x, *_, handle, _ = buffer.dispatch(mine.x, mine.idx, mine.weights, num_experts=world.num_experts)
        sums.append(buffer.combine(reference.scaled(x, rank), handle, bias=bias)[0])
        expected = sums_of_nodes(world, rank, 2, [bias.cpu()], rounds_once=rounds_once)
        assert torch.equal(sums[-1].cpu(), expected)
        buffer.destroy()
    assert not torch.equal(*sums), "the data shows the difference"


def test_sums_that_are_rounded_once(device: str) -> None:
    run_ranks(4, check_rounding, make_world(4, 12, [5, 8, 3, 6], num_topk=6), device)


def check_refusals(rank: int, world: World) -> None:
    buffer = make_buffer(rank, "cpu", ranks_per_node=1)
    mine = inputs_of(world, rank, torch.device("cpu"))
    layout = layout_of(buffer, mine.idx, world.num_experts)
    good: dict[str, Any] = {"x": mine.x, "topk_idx": mine.idx, "topk_weights": mine.weights, **layout}
    x, *_, handle, _ = buffer.dispatch(**good)
    wrong_arguments = [
        ({"num_tokens_per_rdma_rank": torch.zeros(3, dtype=torch.int32)}, "num_tokens_per_rdma_rank"),
        ({"is_token_in_rank": None}, "is_token_in_rank"),
        ({"topk_weights": mine.weights.double()}, "float32"),
    ]
    for wrong, match in wrong_arguments:
        with pytest.raises(ferry.InvalidArgument, match=match if rank == 0 else None):
            buffer.dispatch(**good | (wrong if rank == 0 else {}))
    with pytest.raises(ferry.InvalidArgument, match="6 elements, expected the 10 tensors" if rank == 0 else None):
        buffer.combine(x, handle[:6] if rank == 0 else handle)
    with pytest.raises(ferry.CapacityExceeded):
        buffer.dispatch(**good, num_worst_tokens=1)
    # Afterwards the ranks still agree on the next call.
    assert torch.equal(buffer.combine(x, handle)[0], buffer.combine(x, handle)[0])
    with pytest.raises(NotImplementedError, match="mask_lost_ranks"):
        make_buffer(rank, "cpu", ranks_per_node=1, low_latency_mode=True, enable_shrink=True)
    for wrong in (-1, "two", 1.5):
        with pytest.raises(ferry.InvalidArgument, match="ranks_per_node"):
            make_buffer(rank, "cpu", ranks_per_node=wrong)
    buffer.destroy()


def test_refusals() -> None:
    run_ranks(2, check_refusals, make_world(2, 6, [7, 5]))


def check_a_lost_rank(rank: int, world: World) -> None:
    buffer = make_buffer(rank, "cpu", ranks_per_node=2)
    mine = inputs_of(world, rank, torch.device("cpu"))
    dispatch(buffer, world, mine)
    dist.barrier()  # data that it has sent may be lost with it
    if rank == LOST_RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ferry.PeerLost) as caught:
        dispatch(buffer, world, mine)
    assert caught.value.peer == LOST_RANK
    with pytest.raises(ferry.PeerLost):
        dispatch(buffer, world, mine)


def test_a_lost_rank_is_named_in_every_node() -> None:
    run_ranks(4, check_a_lost_rank, make_world(4, 8, [7, 5, 6, 3]), lost=(LOST_RANK,))


def check_variable(rank: int, world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEP_EP_RANKS_PER_NODE", "1")
        buffer, elastic = make_buffer(rank, "cpu"), make_elastic(rank, "cpu")
        assert buffer.runtime.ranks_per_node == 1
        assert deep_ep.get_physical_domain_size(dist.group.WORLD) == (2, 1)
        assert deep_ep.Config().get_rdma_buffer_size_hint(64, 2) > 0
    assert elastic.get_physical_domain_size() == elastic.get_logical_domain_size() == (2, 1)
    assert (elastic.num_scaleout_ranks, elastic.num_scaleup_ranks) == (2, 1)
    assert (elastic.scaleout_rank_idx, elastic.scaleup_rank_idx) == (rank, 0)
    mine = inputs_of(world, rank, torch.device("cpu"))
    x, *_, handle, _ = elastic.dispatch(mine.x, mine.idx, mine.weights, num_experts=world.num_experts)
    assert torch.equal(x, reference.received_rows(world, rank))
    assert handle.psum_num_recv_tokens_per_scaleup_rank[-1] == len(x)
    out = elastic.combine(reference.scaled(x, rank), handle)[0]
    assert torch.equal(out, sums_of_nodes(world, rank, 1, []))
    buffer.destroy()
    elastic.destroy()


def test_the_variable_spreads_ranks_over_nodes() -> None:
    run_ranks(2, check_variable, make_world(2, 6, [7, 5]))


def check_launcher(rank: int) -> None:
    pairs = dist.new_group([0, 1])
    apart = dist.new_group([0, 2])
    mixed = dist.new_group([0, 1, 2])
    with pytest.MonkeyPatch.context() as patch:
        assert deep_ep.get_physical_domain_size(dist.group.WORLD) == (1, 4)
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        assert deep_ep.get_physical_domain_size(dist.group.WORLD) == (2, 2)
        if rank == 0:
            assert deep_ep.get_logical_domain_size(pairs) == (1, 2)
            assert deep_ep.get_logical_domain_size(apart) == (2, 1)
            assert deep_ep.get_logical_domain_size(mixed) == (1, 3)
        patch.setenv("DEEP_EP_RANKS_PER_NODE", "3")
        with pytest.raises(ferry.InvalidArgument, match="DEEP_EP_RANKS_PER_NODE is 3"):
            deep_ep.get_physical_domain_size(dist.group.WORLD)
    dist.barrier()  # a rank that ends closes connections of groups that others are still making


def test_hosts_as_the_launcher_says() -> None:
    run_ranks(4, check_launcher)


def check_chunks(rank: int, world: World, device: str) -> None:
    configs = {
        None: 0,
        deep_ep.Config(): 0,
        deep_ep.Buffer.get_dispatch_config(16): 0,
        deep_ep.Config(20, 6, 256, 2, 256): 2,
        deep_ep.Config(20, 1, 8, 1 << 20, 1 << 21): 1 << 20,
    }
    mine = inputs_of(world, rank, device_of(rank, device))
    for per_node in (1, 2):
        buffer = make_buffer(rank, device, ranks_per_node=per_node)
        calls = buffer._member.calls
        for config, chunk in configs.items():
            assert calls.chunk_of(chunk_of_config(config)) == (chunk if per_node == 1 else 0)
            x, _, weights, _, handle, _ = dispatch(buffer, world, mine, config=config)
            assert torch.equal(x.cpu(), reference.received_rows(world, rank))
            out, _, _ = buffer.combine(reference.scaled(x, rank), handle, weights, config=config)
            assert torch.equal(out.cpu(), reference.combined(world, rank, []))
            again, *_ = buffer.dispatch(mine.x, handle=handle, config=config)
            assert torch.equal(again, x)
        buffer.destroy()


def test_chunks_of_a_config_change_no_result(device: str) -> None:
    run_ranks(2, check_chunks, make_world(2, 6, [20, 33]), device)
