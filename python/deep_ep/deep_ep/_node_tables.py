"""The tables of handles over several nodes: what a rank forwards, and which ranks of its node each row goes to.

Ferry's own tables of that are no part of a Routing's interface. Here each token is routed a second time, to the ranks
that forward it, with the flags of its ranks as its payload. The ranks of each node travel to a token's rows as well, as
a mask beside the scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import ferry
from deep_ep._arguments import ROW_GRANULE_BYTES, align
from deep_ep._handles import NodesHandle, ids_of_mask
from deep_ep._member import Member, Turn

_MASK_BITS = 32
_LEAST_COLUMNS = 8  # ranks of a node of the first generation


class Forwarded(NamedTuple):
    """The tokens that this rank forwards, ordered by source node, then token."""

    routing: ferry.Routing
    in_node: torch.Tensor
    """[F, ranks per node] bool: which ranks of this node each goes to."""


def forward(member: Member, turn: Turn, in_rank: torch.Tensor) -> Forwarded:
    """Collective: a route and a dispatch. in_rank: [T, R] bool."""
    num_ranks, per_node = member.num_ranks, member.ranks_per_node
    to_forwarders = torch.zeros_like(in_rank)
    to_forwarders[:, member.rail_idx :: per_node] = in_rank.view(-1, member.num_nodes, per_node).any(2)
    routing = turn.rail_route(ids_of_mask(to_forwarders), num_experts=num_ranks)
    flags = torch.zeros(len(in_rank), align(num_ranks, ROW_GRANULE_BYTES), dtype=torch.uint8, device=in_rank.device)
    flags[:, :num_ranks] = in_rank
    received = turn.rail_dispatch(flags)
    first = member.node_idx * per_node
    return Forwarded(routing, received[:, first : first + per_node] != 0)


def node_masks(member: Member, in_rank: torch.Tensor) -> torch.Tensor:
    """[T, D] i32: a bit for each of the first 32 ranks of each node that a token goes to."""
    by_node = in_rank.view(-1, member.num_nodes, member.ranks_per_node)[:, :, :_MASK_BITS].long()
    masks = (by_node << torch.arange(by_node.shape[2], device=in_rank.device)).sum(2)
    # The last bit is the sign.
    return torch.where(masks < 1 << (_MASK_BITS - 1), masks, masks - (1 << _MASK_BITS)).to(torch.int32)


def with_masks(scales: torch.Tensor | None, masks: torch.Tensor) -> torch.Tensor:
    """[T, S + D] i32: the bits of the scales, then the masks."""
    return masks if scales is None else torch.cat([scales.view(torch.int32), masks], dim=1)


def without_masks(received: torch.Tensor, num_nodes: int, dtype: torch.dtype) -> torch.Tensor:
    """The scales [N, S]."""
    return received[:, :-num_nodes].contiguous().view(dtype)


def make_handle(
    member: Member,
    routing: ferry.Routing,
    in_rank: torch.Tensor,
    forwarded: Forwarded,
    received_masks: torch.Tensor,
    num_channels: int,
) -> NodesHandle:
    """received_masks: the scales that were received, the last of which are the masks. Local."""
    tables = member.group.channel_tables(routing, num_channels)
    rails = member.group.channel_tables(forwarded.routing, num_channels)
    rank, per_node, rail = member.rank, member.ranks_per_node, slice(member.rail_idx, None, member.ranks_per_node)
    row_ends = tables.rank_prefix[:, rank].contiguous()
    forwarded_ends = rails.rank_prefix[rail, rank].contiguous()
    counts = torch.diff(forwarded_ends, prepend=forwarded_ends.new_zeros(1))
    starts = rails.recv_channel_prefix[rail]
    masks = received_masks[:, member.node_idx - member.num_nodes]
    return NodesHandle(
        is_token_in_rank=in_rank,
        rdma_channel_prefix_matrix=rails.send_channel_prefix[rail].contiguous(),
        gbl_channel_prefix_matrix=tables.send_channel_prefix,
        # What comes from a channel ends where the next one starts.
        recv_rdma_channel_prefix_matrix=torch.cat([starts[:, 1:], counts.unsqueeze(1)], dim=1),
        recv_rdma_rank_prefix_sum=forwarded_ends,
        recv_gbl_channel_prefix_matrix=tables.recv_channel_prefix
        + torch.cat([row_ends.new_zeros(1), row_ends[:-1]]).unsqueeze(1),
        recv_gbl_rank_prefix_sum=row_ends,
        recv_src_meta=_source_meta(row_ends, tables.source_token, masks, per_node),
        send_rdma_head=rails.send_index[:, rail].contiguous(),
        send_nvl_head=_forward_index(forwarded.in_node),
    )


def _source_meta(
    row_ends: torch.Tensor, source_token: torch.Tensor, masks: torch.Tensor, ranks_per_node: int
) -> torch.Tensor:
    """[N, 8] u8. row_ends: [R] where the rows of each rank end. masks: [N]."""
    rows = torch.arange(len(source_token), dtype=row_ends.dtype, device=row_ends.device)
    nodes = torch.searchsorted(row_ends, rows, right=True, out_int32=True) // ranks_per_node
    is_spare = source_token < 0
    meta = torch.stack([nodes.masked_fill(is_spare, -1), masks.masked_fill(is_spare, 0)], dim=1)
    return meta.view(torch.uint8)


def _forward_index(in_node: torch.Tensor) -> torch.Tensor:
    num_forwarded, per_node = in_node.shape
    index = torch.full((num_forwarded, max(per_node, _LEAST_COLUMNS)), -1, dtype=torch.int32, device=in_node.device)
    counted = in_node.cumsum(0, dtype=torch.int32)
    index[:, :per_node] = torch.where(in_node, counted - 1, -1)
    return index
