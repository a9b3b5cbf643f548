"""Handles of latency mode, and the memory that experts may write their output to.

The storage of a handle's first tensor carries the Routing, as with the handles of throughput mode; but a handle of
latency mode holds too little to route again, so a copy of that tensor is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import ferry
from ferry import InvalidArgument
from ferry._latency import Sent

_ATTRIBUTE = "_ferry_latency"
_MAX_IN_FLIGHT = 2  # kMaxLatencyCallsInFlight


class LatencyHandle(NamedTuple):
    """Programs get these as a plain tuple."""

    src_info: torch.Tensor
    """[L, R * M] i32: the token at its source of each row; -1 in rows without a token."""
    layout_range: torch.Tensor
    """[L, R] i64: first row << 32 | number of rows of a local expert that come from a rank."""
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int


class LatencyLink:
    """Attribute of a handle's first tensor."""

    __slots__ = ("combine_memory", "routing")

    def __init__(self, routing: ferry.Routing) -> None:
        self.routing = routing
        self.combine_memory: torch.Tensor | None = None
        """Of ``get_next_low_latency_combine_buffer``, once it was called."""


class ReceiveHook:
    """The second half of a call; raises when called twice."""

    __slots__ = ("_group", "_sent")

    def __init__(self, sent: Sent, group: ferry.Group) -> None:
        self._sent = sent
        self._group = group

    def __call__(self) -> None:
        self._sent.receive()
        self._group.poll()


def attach(src_info: torch.Tensor, routing: ferry.Routing) -> None:
    setattr(src_info.untyped_storage(), _ATTRIBUTE, LatencyLink(routing))


def link_of(handle: Any, operation: str, group: ferry.Group) -> LatencyLink:
    """Of a handle that this buffer returned."""
    expected = f"expected the {len(LatencyHandle._fields)} values that low_latency_dispatch returned"
    if not isinstance(handle, (tuple, list)) or len(handle) != len(LatencyHandle._fields):
        shown = f"{len(handle)} values" if isinstance(handle, (tuple, list)) else f"a {type(handle).__name__}"
        raise InvalidArgument(f"{operation}: handle is {shown}, {expected}")
    first = handle[0]
    if not isinstance(first, torch.Tensor):
        raise InvalidArgument(f"{operation}: handle[0] is a {type(first).__name__}, {expected}")
    link = None if first.is_meta else getattr(first.untyped_storage(), _ATTRIBUTE, None)
    if link is None:
        raise InvalidArgument(
            f"{operation}: handle[0] is not the tensor that low_latency_dispatch returned, perhaps a copy of it; pass "
            "the handle as it was returned"
        )
    if link.routing.group is not group:
        raise InvalidArgument(
            f"{operation}: the handle was returned by another buffer; call low_latency_dispatch on this one"
        )
    return link


class CombineMemory:
    """Two slabs of each shape in symmetric memory, for handles in turn."""

    def __init__(self) -> None:
        self._slabs: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def next(self, group: ferry.Group, shape: tuple[int, int, int]) -> torch.Tensor:
        slabs = self._slabs.setdefault(shape, [])
        if len(slabs) < _MAX_IN_FLIGHT:
            slabs.append(group.empty(shape, dtype=torch.bfloat16))
            return slabs[-1]
        slabs.append(slabs.pop(0))
        return slabs[-1]

    def clear(self) -> None:
        self._slabs.clear()
