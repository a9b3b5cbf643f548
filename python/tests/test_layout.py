"""Counts and tables of one rank, and tensors that the native module cannot read in place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import DEVICES, device_of, run_ranks
from world import World, make_world

import ferry


class Odd(torch.Tensor):
    """A type without the table that the native module reads tensors through."""

    __dlpack_c_exchange_api__ = None


def counted(idx: torch.Tensor, num_experts: int, num_ranks: int, ranks_per_node: int) -> list[list]:
    """Token by token, for experts that ranks divide evenly."""
    per_rank, per_expert = [0] * num_ranks, [0] * num_experts
    per_node = [0] * -(-num_ranks // ranks_per_node)
    in_rank = []
    for row in idx.tolist():
        experts = [expert for expert in row if 0 <= expert < num_experts]
        ranks = {expert * num_ranks // num_experts for expert in experts}
        for expert in experts:
            per_expert[expert] += 1
        for rank in ranks:
            per_rank[rank] += 1
        for node in {rank // ranks_per_node for rank in ranks}:
            per_node[node] += 1
        in_rank.append([rank in ranks for rank in range(num_ranks)])
    return [per_rank, per_node, per_expert, in_rank]


@pytest.mark.starts_cuda
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ranks_per_node", [0, 2, 3])
def test_counts_where_tokens_go(kind: str, dtype: torch.dtype, ranks_per_node: int) -> None:
    generator = torch.Generator().manual_seed(3)
    idx = torch.randint(-1, 13, (57, 4), generator=generator, dtype=dtype)
    for ids in (idx.to(kind), idx.to(kind).as_subclass(Odd)):
        layout = ferry.dispatch_layout(ids, num_experts=12, num_ranks=4, ranks_per_node=ranks_per_node)
        assert [table.tolist() for table in layout] == counted(idx, 12, 4, ranks_per_node or 4)
        assert layout.is_token_in_rank.dtype == torch.bool


def test_refuses_what_cannot_be_counted() -> None:
    good = torch.zeros(2, 1, dtype=torch.int64)
    for ids in (None, good[0], good.float(), good.expand(2, 3), good.to("meta")):
        with pytest.raises(ferry.InvalidArgument, match="topk_idx"):
            ferry.dispatch_layout(ids, num_experts=4, num_ranks=2)
    with pytest.raises(ferry.InvalidArgument, match="num_ranks=0"):
        ferry.dispatch_layout(good, num_experts=4, num_ranks=0)


def check_tables(rank: int, world: World, kind: str) -> None:
    device = device_of(rank, kind)
    group = ferry.Group(dist.group.WORLD, device=device)
    idx, x = world.topk_idx[rank].to(device), world.x[rank].to(device)
    routing = group.route(idx.as_subclass(Odd), num_experts=world.num_experts)
    received = group.dispatch(routing, x.as_subclass(Odd), tables=False)
    assert torch.equal(received.x, group.dispatch(routing, x, tables=False).x)
    tables = group.channel_tables(routing, 3)
    rows = world.rows_of(rank)
    assert tables.source_token.tolist() == [token for _, token in rows]
    assert tables.rank_prefix[-1, rank].item() == len(rows)
    sent = (tables.send_index >= 0).sum(dim=0, dtype=torch.int32)
    assert torch.equal(sent, tables.send_channel_prefix[:, -1])
    assert sent.tolist() == routing.num_rows_to_rank
    assert (tables.recv_channel_prefix[:, 0] == 0).all()
    with pytest.raises(ferry.InvalidArgument, match="num_channels"):
        group.channel_tables(routing, 0)
    with pytest.raises(ferry.InvalidArgument, match="num_channels is 'all', expected an integer"):
        group.channel_tables(routing, "all")
    experts = group.route(idx, num_experts=world.num_experts, layout="experts")
    with pytest.raises(ferry.InvalidArgument, match="kTokens"):
        group.channel_tables(experts, 3)
    group.destroy()


@pytest.mark.parametrize("kind", DEVICES)
def test_tables_by_channel(kind: str) -> None:
    run_ranks(2, check_tables, make_world(2, 6, [20, 11]), kind)
