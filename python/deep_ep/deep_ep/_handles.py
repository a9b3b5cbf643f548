"""Handles of the first generation: six tensors, and how the ferry Routing is found from them.

The first tensor, which is never empty and has the same shape on every rank, carries its Routing as an attribute of its
storage. The storage is shared by every tensor object on the same memory (autograd's saved tensors are new ones), and
the attribute lives exactly as long as the storage. A copy (a clone, a round trip to another device) has another
storage; then the tensors contain enough to route again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import ferry
from deep_ep._arguments import MAX_TOPK, check_table
from ferry import InvalidArgument

_ATTRIBUTE = "_ferry_routing"


class Handle(NamedTuple):
    """Clients get these as a plain tuple."""

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


class Link(NamedTuple):
    """Attribute of a handle's first tensor."""

    routing: ferry.Routing
    knows_topk: bool
    """Whether it was made from the expert ids. Otherwise from the ranks of each token, and its K is not that of the
    weights.
    """


def attach(handle: Handle, link: Link) -> None:
    setattr(handle.rank_prefix_matrix.untyped_storage(), _ATTRIBUTE, link)


def attached(handle: Any, group: ferry.Group) -> Link | None:
    """The link, if the handle's tensors are those that dispatch of this group returned."""
    first = handle[0] if isinstance(handle, (tuple, list)) and handle else None
    if not isinstance(first, torch.Tensor) or first.is_meta:
        return None
    link = getattr(first.untyped_storage(), _ATTRIBUTE, None)
    return link if link is not None and link.routing.group is group else None


def is_copy(handle: Any, device: torch.device) -> bool:
    """Six tensors on the device: if they are not linked to a routing, they are copies."""
    return (
        isinstance(handle, (tuple, list))
        and len(handle) == len(Handle._fields)
        and all(isinstance(tensor, torch.Tensor) and tensor.device == device for tensor in handle)
    )


def unpack(handle: Any, operation: str, num_ranks: int, device: torch.device) -> Handle:
    """Checks the tensors of a handle that are used."""
    if not isinstance(handle, (tuple, list)) or len(handle) != len(Handle._fields):
        shown = f"{len(handle)} elements" if isinstance(handle, (tuple, list)) else f"a {type(handle).__name__}"
        raise InvalidArgument(
            f"{operation}: handle is {shown}, expected the {len(Handle._fields)} tensors that dispatch returned"
        )
    tensors = Handle(*handle)
    shapes: dict[str, tuple[torch.dtype, tuple[int | str, ...]]] = {
        "rank_prefix_matrix": (torch.int32, (num_ranks, num_ranks)),
        "recv_src_idx": (torch.int32, ("N",)),
        "is_token_in_rank": (torch.bool, ("T", num_ranks)),
    }
    for name, (dtype, shape) in shapes.items():
        check_table(getattr(tensors, name), f"{operation}: handle's {name}", device, dtype, shape)
    return tensors


def ids_of_mask(is_token_in_rank: torch.Tensor) -> torch.Tensor:
    """[T, R] bool -> [T, min(R, 32)] i64: the ranks of each token, as if each rank were one expert; then -1.

    No token has more than 32 ranks, since none has more than 32 experts.
    """
    num_ranks = is_token_in_rank.shape[1]
    ranks = torch.arange(num_ranks, device=is_token_in_rank.device)
    ids = torch.where(is_token_in_rank, ranks, -1)
    if num_ranks > MAX_TOPK:
        ids = ids.sort(dim=1, descending=True).values[:, :MAX_TOPK]
    return ids.contiguous()
