"""Counts of one rank's tokens, without a group."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ferry import _native
from ferry._errors import InvalidArgument
from ferry._memory import current_stream_of


class DispatchLayout(NamedTuple):
    """Counts of one rank's tokens by rank, node and expert."""

    num_tokens_per_rank: torch.Tensor
    """[R] i32: tokens with an expert on the rank."""
    num_tokens_per_node: torch.Tensor
    """[nodes] i32: tokens with an expert in the node."""
    num_tokens_per_expert: torch.Tensor
    """[E] i32: entries that name the expert; duplicates in a token count."""
    is_token_in_rank: torch.Tensor
    """[T, R] bool."""


def dispatch_layout(
    topk_idx: torch.Tensor, *, num_experts: int, num_ranks: int, ranks_per_node: int = 0
) -> DispatchLayout:
    """Count how many tokens go where, for the default placement of experts. Local: no other rank takes part.

    topk_idx: [T, K] i32 or i64, contiguous, on the CPU or a GPU: global expert ids; others count for nothing.
    ranks_per_node: the last node may have fewer; 0: one node of all ranks.

    On a GPU one kernel on the current stream; the host does not wait, and a graph may capture it.
    """
    if not isinstance(topk_idx, torch.Tensor) or topk_idx.dim() != 2:
        raise InvalidArgument(f"dispatch_layout: topk_idx is {_kind_of(topk_idx)}, expected a tensor [T, K]")
    if num_ranks < 1 or num_experts < 1 or ranks_per_node < 0:
        raise InvalidArgument(
            f"dispatch_layout: num_experts={num_experts}, num_ranks={num_ranks}, ranks_per_node={ranks_per_node}, "
            "expected positive numbers"
        )
    device = topk_idx.device
    num_nodes = -(-num_ranks // ranks_per_node) if ranks_per_node else 1
    layout = DispatchLayout(
        torch.empty(num_ranks, dtype=torch.int32, device=device),
        torch.empty(num_nodes, dtype=torch.int32, device=device),
        torch.empty(num_experts, dtype=torch.int32, device=device),
        torch.empty(len(topk_idx), num_ranks, dtype=torch.bool, device=device),
    )
    options = num_experts, num_ranks, ranks_per_node
    index, stream = (device.index, current_stream_of(device)) if device.type == "cuda" else (-1, 0)
    _native.dispatch_layout(topk_idx, *options, tuple(layout), index, stream)
    return layout


def _kind_of(value: object) -> str:
    return f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
