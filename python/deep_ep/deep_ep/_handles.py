"""Handles of the first generation: plain tensors, and how the ferry Routing is found from them. Groups of one node have
six, those of several nodes ten.

One tensor, the carrier, has its Routing as an attribute of its storage. It is made for the handle, is never empty and
has the same shape on every rank. The storage is shared by every tensor object on the same memory (autograd's saved
tensors are new ones), and the attribute lives exactly as long as the storage. A copy (a clone, a round trip to another
device) has another storage; then the tensors contain enough to route again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import ferry
from deep_ep._arguments import MAX_TOPK, check_table
from ferry import InvalidArgument

_ATTRIBUTE = "_ferry_routing"
_META_BYTES = 8

Checked = dict[str, tuple[torch.dtype, tuple[int | str, ...]]]


class Handle(NamedTuple):
    """Of a group of one node. Clients get these as a plain tuple."""

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

    carrier_idx = 0

    @property
    def num_rows(self) -> int:
        """N."""
        return self.recv_src_idx.shape[0]

    @staticmethod
    def checked(num_ranks: int) -> Checked:
        """The tensors that calls use."""
        return {
            "rank_prefix_matrix": (torch.int32, (num_ranks, num_ranks)),
            "recv_src_idx": (torch.int32, ("N",)),
            "is_token_in_rank": (torch.bool, ("T", num_ranks)),
        }


class NodesHandle(NamedTuple):
    """Of a group of D nodes. Clients get these as a plain tuple.

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

    carrier_idx = 6

    @property
    def num_rows(self) -> int:
        """N."""
        return self.recv_src_meta.shape[0]

    @staticmethod
    def checked(num_ranks: int) -> Checked:
        """The tensors that calls use."""
        return {
            "is_token_in_rank": (torch.bool, ("T", num_ranks)),
            "recv_gbl_rank_prefix_sum": (torch.int32, (num_ranks,)),
            "recv_src_meta": (torch.uint8, ("N", _META_BYTES)),
        }


AnyHandle = Handle | NodesHandle
Form = type[Handle] | type[NodesHandle]


class Link(NamedTuple):
    """Attribute of a handle's carrier."""

    routing: ferry.Routing
    knows_topk: bool
    """Whether it was made from the expert ids. Otherwise from the ranks of each token, and its K is not that of the
    weights.
    """


def attach(handle: AnyHandle, link: Link) -> None:
    setattr(handle[handle.carrier_idx].untyped_storage(), _ATTRIBUTE, link)


def attached(handle: Any, form: Form, group: ferry.Group) -> Link | None:
    """The link, if the handle's tensors are those that dispatch of this group returned."""
    if not isinstance(handle, (tuple, list)) or len(handle) <= form.carrier_idx:
        return None
    carrier = handle[form.carrier_idx]
    if not isinstance(carrier, torch.Tensor) or carrier.is_meta:
        return None
    link = getattr(carrier.untyped_storage(), _ATTRIBUTE, None)
    return link if link is not None and link.routing.group is group else None


def is_copy(handle: Any, form: Form, device: torch.device) -> bool:
    """As many tensors as a handle has, on the device: if they are not linked to a routing, they are copies."""
    return (
        isinstance(handle, (tuple, list))
        and len(handle) == len(form._fields)
        and all(isinstance(tensor, torch.Tensor) and tensor.device == device for tensor in handle)
    )


def unpack(handle: Any, operation: str, form: Form, num_ranks: int, device: torch.device) -> AnyHandle:
    """Checks the tensors of a handle that are used."""
    if not isinstance(handle, (tuple, list)) or len(handle) != len(form._fields):
        shown = f"{len(handle)} elements" if isinstance(handle, (tuple, list)) else f"a {type(handle).__name__}"
        raise InvalidArgument(
            f"{operation}: handle is {shown}, expected the {len(form._fields)} tensors that dispatch returned"
        )
    tensors = form(*handle)
    for name, (dtype, shape) in form.checked(num_ranks).items():
        check_table(getattr(tensors, name), f"{operation}: handle's {name}", device, dtype, shape)
    return tensors


def check_mask(is_token_in_rank: torch.Tensor, what: str) -> None:
    """Refuses tokens of more than 32 ranks. The host reads the mask, which on a GPU it waits for."""
    if is_token_in_rank.shape[1] <= MAX_TOPK:
        return
    counts = is_token_in_rank.sum(dim=1)
    too_many = (counts > MAX_TOPK).nonzero()
    if len(too_many) > 0:
        token = int(too_many[0])
        raise InvalidArgument(
            f"{what}[{token}] names {int(counts[token])} ranks, expected at most {MAX_TOPK}; send such a token as "
            f"several, to at most {MAX_TOPK} ranks each"
        )


def ids_of_mask(is_token_in_rank: torch.Tensor) -> torch.Tensor:
    """[T, R] bool -> [T, min(R, 32)] i64: the ranks of each token, as if each rank were one expert; then -1.

    A token of more than 32 ranks gets ids that no expert has, so that its route is refused on all ranks, also where the
    host does not read the mask.
    """
    num_ranks = is_token_in_rank.shape[1]
    ranks = torch.arange(num_ranks, device=is_token_in_rank.device)
    ids = torch.where(is_token_in_rank, ranks, -1)
    if num_ranks > MAX_TOPK:
        ids = ids.sort(dim=1, descending=True).values
        ids = ids[:, :MAX_TOPK].masked_fill(ids[:, MAX_TOPK : MAX_TOPK + 1] >= 0, num_ranks)
    return ids.contiguous()
