"""The tables of handles over several nodes: tokens that a rank forwards, and ranks of its node that each row goes to.

Ferry's own tables of these are not part of a Routing's interface. A new dispatch routes each token a second time, to
the ranks that forward it, with the flags of its ranks as its payload. The ranks of each node travel to a token's rows
as well, as a mask beside the scales. The native call makes the exchanges; the operations of torch around them are here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import ferry
from deep_ep._arguments import ROW_GRANULE_BYTES, align
from deep_ep._handles import NodesHandle
from deep_ep._masks import ids_of_mask

_MASK_BITS = 32
_LEAST_COLUMNS = 8  # ranks of a node of the first generation


class Nodes(NamedTuple):
    """Place of this rank in a group of several nodes."""

    rank: int
    num_ranks: int
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        """D."""
        return self.num_ranks // self.ranks_per_node

    @property
    def node_idx(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def rail_idx(self) -> int:
        """Index of this rank in its node."""
        return self.rank % self.ranks_per_node


def rail_inputs(nodes: Nodes, in_rank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids by which each token goes to the ranks that forward it, and its flags as rows. in_rank: [T, R] bool."""
    num_ranks, per_node = nodes.num_ranks, nodes.ranks_per_node
    to_forwarders = torch.zeros_like(in_rank)
    to_forwarders[:, nodes.rail_idx :: per_node] = in_rank.view(-1, nodes.num_nodes, per_node).any(2)
    flags = torch.zeros(len(in_rank), align(num_ranks, ROW_GRANULE_BYTES), dtype=torch.uint8, device=in_rank.device)
    flags[:, :num_ranks] = in_rank
    return ids_of_mask(to_forwarders), flags


def node_masks(nodes: Nodes, in_rank: torch.Tensor) -> torch.Tensor:
    """[T, D] i32: a bit for each of the first 32 ranks of each node that a token goes to."""
    by_node = in_rank.view(-1, nodes.num_nodes, nodes.ranks_per_node)[:, :, :_MASK_BITS].long()
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
    group: ferry.Group,
    nodes: Nodes,
    routing: ferry.Routing,
    in_rank: torch.Tensor,
    rail_routing: ferry.Routing,
    flags: torch.Tensor,
    received_scales: torch.Tensor,
    num_channels: int,
) -> NodesHandle:
    """flags: those of the tokens that this rank forwards, by source node, then token. received_scales: its last columns
    are the masks. Local.
    """
    tables = group.channel_tables(routing, num_channels)
    rails = group.channel_tables(rail_routing, num_channels)
    rank, per_node = nodes.rank, nodes.ranks_per_node
    rail, first = slice(nodes.rail_idx, None, per_node), nodes.node_idx * per_node
    row_ends = tables.rank_prefix[:, rank].contiguous()
    forwarded_ends = rails.rank_prefix[rail, rank].contiguous()
    counts = torch.diff(forwarded_ends, prepend=forwarded_ends.new_zeros(1))
    starts = rails.recv_channel_prefix[rail]
    masks = received_scales[:, nodes.node_idx - nodes.num_nodes]
    return NodesHandle(
        is_token_in_rank=in_rank,
        rdma_channel_prefix_matrix=rails.send_channel_prefix[rail].contiguous(),
        gbl_channel_prefix_matrix=tables.send_channel_prefix,
        # Tokens of a channel end where those of the next one start.
        recv_rdma_channel_prefix_matrix=torch.cat([starts[:, 1:], counts.unsqueeze(1)], dim=1),
        recv_rdma_rank_prefix_sum=forwarded_ends,
        recv_gbl_channel_prefix_matrix=tables.recv_channel_prefix
        + torch.cat([row_ends.new_zeros(1), row_ends[:-1]]).unsqueeze(1),
        recv_gbl_rank_prefix_sum=row_ends,
        recv_src_meta=_source_meta(row_ends, tables.source_token, masks, per_node),
        send_rdma_head=rails.send_index[:, rail].contiguous(),
        send_nvl_head=_forward_index(flags[:, first : first + per_node] != 0),
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
