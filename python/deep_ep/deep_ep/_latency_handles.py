"""Handles of latency mode, and the memory that experts may write their output to.

The storage of a handle's first tensor carries a :class:`LatencyLink`, as with the handles of throughput mode; but a
handle of latency mode holds too little to route again, so a copy of that tensor is refused.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import ferry
from ferry.frontend import BufferCalls, SplitCall

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
    """Attribute of the storage of a handle's first tensor."""

    __slots__ = ("combine_memory", "routing")

    def __init__(self, routing: ferry.Routing) -> None:
        self.routing = routing
        self.combine_memory: torch.Tensor | None = None
        """Memory that ``get_next_low_latency_combine_buffer`` returned, once it was called."""


class ReceiveHook(SplitCall):
    """The second half of a call; raises when called twice. On GPUs it runs on the stream of the first half, as engines
    expect that call it on another, also in graphs; that other stream then waits for it.
    """

    __slots__ = ("_calls",)

    # The native module sets both. A handle, since torch takes longer to make two stream objects than the rest takes.
    _calls: BufferCalls
    stream: int

    def __call__(self) -> None:
        self.receive()
        self._calls.received_on(self.stream)


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
