"""Handles of the first generation: plain tensors, and how the ferry Routing is found from them. Groups of one node have
six, those of several nodes ten.

One tensor, the carrier (``rank_prefix_matrix``, with several nodes ``recv_gbl_rank_prefix_sum``), has a :class:`Link`
as an attribute of its storage. It is made for the handle, is never empty and has the same shape on every rank. The
storage is shared by every tensor object on the same memory (autograd's saved tensors are new ones), and the attribute
lives exactly as long as the storage. A copy (a clone, a round trip to another device) has another storage; then the
tensors contain enough to route again. The native calls make handles and find links.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import ferry


class Handle(NamedTuple):
    """Handle of a group of one node. Clients get these as a plain tuple."""

    rank_prefix_matrix: torch.Tensor
    """[R, R] i32: [i, j] is the number of tokens that ranks 0 to i send to rank j."""
    channel_prefix_matrix: torch.Tensor
    """[R, C] i32: [r, c] is the number of tokens that channels 0 to c of this rank send to rank r."""
    recv_channel_prefix_matrix: torch.Tensor
    """[R, C] i32: [r, c] is the number of rows from channels before c of rank r."""
    recv_src_idx: torch.Tensor
    """[N] i32: the token at its source; -1 in rows without a token."""
    is_token_in_rank: torch.Tensor
    """[T, R] bool."""
    send_head: torch.Tensor
    """[T, R] i32: index of the token among those this rank sends to rank r; -1: not sent there."""


class NodesHandle(NamedTuple):
    """Handle of a group of D nodes. Clients get these as a plain tuple.

    A rank *forwards* the tokens that come to its node from the ranks of its rail: those with its index in their nodes,
    itself included. F is their number; they are ordered by source node, then token.
    """

    is_token_in_rank: torch.Tensor
    """[T, R] bool."""
    rdma_channel_prefix_matrix: torch.Tensor
    """[D, C] i32: [d, c] is the number of tokens that channels 0 to c of this rank send to node d."""
    gbl_channel_prefix_matrix: torch.Tensor
    """[R, C] i32: [r, c] is the number of tokens that channels 0 to c of this rank send to rank r."""
    recv_rdma_channel_prefix_matrix: torch.Tensor
    """[D, C] i32: [d, c] is the number of tokens that this rank forwards from channels 0 to c of its rail's rank in
    node d.
    """
    recv_rdma_rank_prefix_sum: torch.Tensor
    """[D] i32: the tokens that this rank forwards from nodes 0 to d. The last is F."""
    recv_gbl_channel_prefix_matrix: torch.Tensor
    """[R, C] i32: [r, c] is the first row of channel c of rank r."""
    recv_gbl_rank_prefix_sum: torch.Tensor
    """[R] i32: the rows from ranks 0 to r."""
    recv_src_meta: torch.Tensor
    """[N, 8] u8, two i32: the node that the row's token comes from, and a bit for each rank of this node that the token
    goes to, of the first 32. -1 and 0 in rows without a token.
    """
    send_rdma_head: torch.Tensor
    """[T, D] i32: index of the token among those this rank sends to node d; -1: not sent there."""
    send_nvl_head: torch.Tensor
    """[F, 8], or as many columns as a node has ranks if they are more, i32: index of the token among those this rank
    forwards to rank j of its node; -1: not sent there.
    """


class Link(NamedTuple):
    """Attribute of the storage of a handle's carrier."""

    routing: ferry.Routing
    knows_topk: bool
    """Whether it was made from the expert ids. Otherwise from the ranks of each token, and its K is not that of the
    weights.
    """
