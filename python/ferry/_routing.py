"""Values that calls return: routings, and the results of dispatch and combine."""

from __future__ import annotations

from typing import Generic, Literal, NamedTuple, TypeVar

import torch

from ferry import _native
from ferry._errors import InvalidArgument
from ferry._tensors import tensor_of

# A routing keeps its group, and a group makes routings: here its type is open, so that only groups import routings.
GroupT = TypeVar("GroupT")

Layout = Literal["tokens", "experts", "slab"]
LAYOUTS: tuple[Layout, ...] = ("tokens", "experts", "slab")


class Received(NamedTuple):
    """The result of dispatch. N is ``Routing.num_recv_rows``; a slab's rows are [L * C]."""

    x: torch.Tensor
    """[N, H], dtype of the payload."""
    scales: torch.Tensor | None
    """[N, S], dtype of the scales; None if none were sent."""
    topk_idx: torch.Tensor | None
    """Layout "tokens": [N, K] i64, local expert ids, -1 where the expert is on another rank. Otherwise None."""
    topk_weights: torch.Tensor | None
    """Layout "tokens": [N, K] f32, 0 where the expert is on another rank. Otherwise [N]. None if none were routed."""


class ChannelTables(NamedTuple):
    """A routing as prefix counts by channel: equal parts of a rank's tokens, in token order. All i32."""

    rank_prefix: torch.Tensor
    """[R, R]: (i, j) counts the tokens that ranks 0 to i send to rank j."""
    send_channel_prefix: torch.Tensor
    """[R, C]: (r, c) counts this rank's tokens of channels 0 to c that go to rank r."""
    recv_channel_prefix: torch.Tensor
    """[R, C]: (r, c) counts this rank's rows from channels of rank r before c."""
    source_token: torch.Tensor
    """[N]: the token at its source of each row; -1 in rows without a token."""
    send_index: torch.Tensor
    """[T, R]: which of this rank's tokens for rank r it is, from 0; -1: none."""


class Combined(NamedTuple):
    """The result of combine for the tokens of this rank."""

    x: torch.Tensor
    """[T, H], dtype of the rows."""
    weights: torch.Tensor | None
    """[T, K] f32: the weights given to combine, summed back; None if none were given."""


class Routing(Generic[GroupT]):
    """Destination of every token: the result of :meth:`Group.route`, or part of that of :meth:`Group.latency_dispatch`.

    A value that may be kept and used for any number of dispatches and combines of its group, also after other routes.
    It holds everything that a cached dispatch or a backward pass needs.
    """

    __slots__ = ("_native", "group", "has_weights", "is_bounded")

    def __init__(self, native: _native.Routing, group: GroupT, has_weights: bool, is_bounded: bool) -> None:
        self._native = native
        self.group = group
        self.has_weights = has_weights
        """Whether weights were given to route."""
        self.is_bounded = is_bounded
        """Whether ``max_recv_rows`` was given to route."""

    @property
    def num_tokens(self) -> int:
        """T of this rank."""
        return self._native.num_tokens

    @property
    def num_topk(self) -> int:
        """K."""
        return self._native.num_topk

    @property
    def num_experts(self) -> int:
        """E, of all ranks."""
        return self._native.num_experts

    @property
    def num_physical_experts(self) -> int:
        """P, of all ranks: E without a placement. With one, local experts and the ids in ``topk_idx`` are physical."""
        return self._native.num_physical_experts

    @property
    def expert_counts(self) -> torch.Tensor | None:
        """[P] i64 on the group's device: rows of each physical expert on all ranks together.

        None for a latency_dispatch on GPUs of one node, and where GPUs of several nodes route without the host in
        layout "tokens". A view of the routing's own memory: do not write to it.
        """
        return tensor_of(self._native.num_rows_per_expert_view())

    @property
    def num_local_experts(self) -> int:
        """L of this rank."""
        return self._native.num_local_experts

    @property
    def layout(self) -> Layout:
        """Arrangement of received rows."""
        return LAYOUTS[self._native.layout]

    @property
    def num_recv_rows(self) -> int:
        """Rows that outputs of dispatch and inputs of combine have on this rank."""
        return self._native.num_recv_rows

    @property
    def num_used_rows(self) -> int:
        """Rows in use, alignment gaps included; at most ``num_recv_rows``."""
        return self._native.num_used_rows

    @property
    def num_rows_per_local_expert(self) -> list[int]:
        """[L] rows of each local expert, without alignment gaps."""
        return self._native.num_rows_per_local_expert()

    @property
    def may_repeat_experts(self) -> bool:
        """False if it is known that no token of any rank names an expert twice: then ``num_rows_per_local_expert``
        counts choices too. Groups on GPUs detect it; groups on the CPU do not, and return True.
        """
        return self._native.may_repeat_experts()

    @property
    def local_expert_counts(self) -> torch.Tensor:
        """[L] i32 on the group's device: ``num_rows_per_local_expert`` for code that must not involve the host.

        A view of the routing's own memory: do not write to it.
        """
        return tensor_of(self._native.num_rows_per_local_expert_view())

    @property
    def expert_row_offsets(self) -> list[int]:
        """[L + 1] first row of each local expert's group, then the end of the last; empty for layout "tokens"."""
        return self._native.expert_row_offsets()

    @property
    def expert_row_offsets_tensor(self) -> torch.Tensor | None:
        """[L + 1] i64 on the group's device: ``expert_row_offsets`` for code that must not involve the host.

        None for layout "tokens". A view of the routing's own memory: do not write to it.
        """
        return tensor_of(self._native.expert_row_offsets_view())

    @property
    def num_rows_from_rank(self) -> list[int]:
        """[R] rows received from each rank."""
        return self._native.num_rows_from_rank()

    @property
    def num_rows_to_rank(self) -> list[int]:
        """[R] rows sent to each rank."""
        return self._native.num_rows_to_rank()

    @property
    def local_expert_ids(self) -> list[int]:
        """[L] global ids of this rank's experts, ascending."""
        return self._native.local_expert_ids()

    @property
    def source_ranges(self) -> torch.Tensor | None:
        """[L, R, 2] i32 on the group's device: number of rows of each local expert from each source rank, and the first
        of them, counted from the start of the expert's rows. None except in latency mode.

        A view of the routing's own memory: do not write to it.
        """
        return tensor_of(self._native.source_ranges())

    @property
    def slots(self) -> torch.Tensor:
        """[T, K] i32: the row of (t, k) in the output of the rank that owns its expert; -1 where there is none.

        This and the tensors below are views of the routing's own memory: do not write to them.
        """
        return tensor_of(self._native.slots())

    @property
    def source(self) -> torch.Tensor:
        """[num_used_rows, 2] i32: source rank and source token of each received row; -1 in rows without a token."""
        return tensor_of(self._native.source())

    @property
    def topk_idx(self) -> torch.Tensor:
        """[T, K] i64: the ids given to route; with a placement the physical experts that were picked."""
        return tensor_of(self._native.topk_idx())

    @property
    def topk_weights(self) -> torch.Tensor | None:
        """[T, K] f32: the weights given to route; None if there were none."""
        return tensor_of(self._native.topk_weights())

    def __repr__(self) -> str:
        return (
            f"ferry.Routing({self.num_tokens} tokens, top {self.num_topk} of {self.num_experts} experts, "
            f"layout {self.layout!r}, {self.num_recv_rows} rows here)"
        )


def check_routing(routing: Routing, operation: str) -> None:
    if not isinstance(routing, Routing):
        raise InvalidArgument(
            f"{operation}: routing is a {type(routing).__name__}, expected the ferry.Routing that route returned"
        )
