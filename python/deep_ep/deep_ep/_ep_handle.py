"""EPHandle: returned by dispatch of the second generation and taken by combine."""

from __future__ import annotations

from typing import Any

import torch

import ferry


class EPHandle:
    """Destinations and sources of a dispatch's tokens. All tensors are live: combine and cached dispatches read them.

    T tokens of this rank, K experts per token, L local experts, R ranks, N received rows (if the host does not wait for
    counts: as many as could arrive), M ``num_max_tokens_per_rank``.
    """

    do_expand: bool
    """True: one row per (token, local expert), grouped by expert; False: one row per token."""
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    """Bound of the dispatch, and of combines that name none."""
    topk_idx: torch.Tensor
    """[T, K] i64: the ids that were dispatched."""
    num_recv_tokens: int
    """N."""
    num_expanded_tokens: int
    """Rows of an expanded output; 0 if not expanded."""
    num_recv_tokens_per_expert_list: list[int]
    """[L] tokens of each local expert, rounded up to the alignment; [] if the host did not wait for them."""
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    """[R] i32: rows from ranks 0 to r; the last is the number of all received rows."""
    psum_num_recv_tokens_per_expert: torch.Tensor
    """[L] i32. Not expanded: aligned counts of experts 0 to l. Expanded: where the rows of l end, without the gap."""
    num_unaligned_recv_tokens_per_expert: torch.Tensor | None
    """[L] i32: tokens of each local expert; None if not expanded."""
    recv_src_metadata: torch.Tensor
    """[N, 2 + K] i32: M * source rank + source token; K * source rank + the token's last choice here; then, for each
    choice, its expanded row or -1. -1 in rows without a token, and in all but the last of a token's equal choices.
    Combine of an expanded handle sums the rows that columns 2 and up name when it is called.
    """
    dst_buffer_slot_idx: torch.Tensor
    """[T, K] i32: the received row of (t, k) on the rank of its expert; -1 where there is none. Read only."""
    token_metadata_at_forward: None = None
    channel_linked_list: None = None

    def __init__(self, routing: ferry.Routing, **fields: Any) -> None:
        self._routing: ferry.Routing | None = routing
        self._last_equal: torch.Tensor | None = None
        """[N, K] i8, expanded handles only: the last choice that names the same expert; -1 where it is not here."""
        self.__dict__.update(fields)

    def __copy__(self) -> EPHandle:
        copied = EPHandle.__new__(EPHandle)
        copied.__dict__.update(self.__dict__)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Without the routing, which belongs to this process: with a pickled or deep copy, ranks route again."""
        return {**self.__dict__, "_routing": None}

    def __repr__(self) -> str:
        rows = f"{self.num_expanded_tokens} expanded rows" if self.do_expand else f"{self.num_recv_tokens} rows"
        return f"deep_ep.EPHandle({len(self.topk_idx)} tokens, {rows} here, {self.num_experts} experts)"
