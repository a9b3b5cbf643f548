"""The calls of latency mode through ``ferry`` and ``deep_ep``, behind one interface, as ``exchanges`` has for layers.

Slabs are of the worst case, as in programs: R * M rows for each expert, M being the number of tokens, rounded up.
Through ``ferry`` the slab and the experts' outputs are in symmetric memory; through ``deep_ep`` outputs are ordinary
tensors, as engines have them.
"""

from __future__ import annotations

import argparse
import math
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from exchanges import Rows, is_of_ferry, num_rows_elsewhere, own_arguments

import ferry

ORDERS = ("exact", "rank_sums")
_BLOCK = 128
_F32_BYTES = 4
_BF16_BYTES = 2
_ROW_GRANULE = 4  # DeepEP's slabs of fp8 rows have a multiple of this


class Slab(NamedTuple):
    """Received rows [L, C, H], with scales [L, C, H / 128] where they are fp8, and the combine's handle."""

    rows: Rows
    handle: Any


class LatencyExchange(Protocol):
    """Calls of one rank; halves one right after the other where ``use`` says so. All but ``num_wire_rows`` are
    collective.
    """

    outputs: torch.Tensor
    """[L, C, H] bf16, for the experts' outputs."""

    def use(self, num_tokens: int, split: bool) -> None:
        """Prepares for batches of so many tokens, at most those that it was created for."""
        ...

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Slab: ...

    def combine(self, outputs: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, slab: Slab) -> torch.Tensor: ...

    def num_wire_rows(self, reached: torch.Tensor, num_chosen: int) -> tuple[int, int]:
        """Rows that this rank sends to other ranks in a dispatch, and those that it gets back. ``reached`` [T, R]:
        ranks with experts of a token; ``num_chosen``: choices of experts of other ranks.
        """
        ...

    def destroy(self) -> None: ...


def _max_tokens(num_tokens: int) -> int:
    """M, the most tokens of a rank: the same through every package, and such that DeepEP takes it."""
    step = _ROW_GRANULE // math.gcd(_ROW_GRANULE, dist.get_world_size())
    return -(-num_tokens // step) * step


def _slab_shape(options: argparse.Namespace, max_tokens: int) -> tuple[int, int, int]:
    num_ranks = dist.get_world_size()
    return options.experts // num_ranks, num_ranks * max_tokens, options.hidden


class FerryLatency:
    """``latency_dispatch`` and ``latency_combine``."""

    def __init__(self, options: argparse.Namespace, device: torch.device, most_tokens: int) -> None:
        self._options = options
        self._is_fp8 = options.dtype == "fp8"
        latency_bytes = 0
        if device.type == "cuda":
            scale_bytes = options.hidden // _BLOCK * _F32_BYTES
            latency_bytes = ferry.latency_bytes_required(
                num_ranks=dist.get_world_size(),
                max_tokens=_max_tokens(most_tokens),
                num_topk=options.topk,
                dispatch_row_bytes=options.hidden + scale_bytes if self._is_fp8 else options.hidden * _BF16_BYTES,
                combine_row_bytes=options.hidden * _BF16_BYTES,
            )
        self._group = ferry.Group(
            dist.group.WORLD, device=device, ranks_per_node=options.ranks_per_node, latency_bytes=latency_bytes
        )
        self._slabs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def use(self, num_tokens: int, split: bool) -> None:
        max_tokens = self._max_tokens = _max_tokens(num_tokens)
        self._split = split
        if max_tokens not in self._slabs:
            shape = _slab_shape(self._options, max_tokens)
            slab = self._group.empty(shape, dtype=torch.float8_e4m3fn if self._is_fp8 else torch.bfloat16)
            self._slabs[max_tokens] = slab, self._group.empty(shape)
        self._slab, self.outputs = self._slabs[max_tokens]

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Slab:
        sent = self._group.latency_dispatch(
            x,
            ids,
            weights,
            num_experts=self._options.experts,
            max_tokens=self._max_tokens,
            quantize="fp8" if self._is_fp8 else None,
            split=self._split,
            out=self._slab,
        )
        if self._split:
            sent.receive()
        return Slab(Rows(sent.x, sent.scales), sent)

    def combine(self, outputs: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, slab: Slab) -> torch.Tensor:
        combined = self._group.latency_combine(outputs, slab.handle, order=self._options.order, split=self._split)
        if self._split:
            combined.receive()
        return combined.x

    def num_wire_rows(self, reached: torch.Tensor, num_chosen: int) -> tuple[int, int]:
        return num_chosen, num_rows_elsewhere(reached) if self._options.order == "rank_sums" else num_chosen

    def destroy(self) -> None:
        self._group.destroy()


class DeepEpLatency:
    """``low_latency_dispatch`` and ``low_latency_combine`` of ``deep_ep.Buffer``."""

    def __init__(self, options: argparse.Namespace, device: torch.device, most_tokens: int) -> None:
        import deep_ep  # not needed for anything else here

        self._options = options
        self._is_fp8 = options.dtype == "fp8"
        self._device = device
        self._sums_ranks = is_of_ferry(deep_ep)  # before they send
        num_ranks = dist.get_world_size()
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            _max_tokens(most_tokens), options.hidden, num_ranks, options.experts
        )
        self._buffer = deep_ep.Buffer(
            dist.group.WORLD,
            0,
            hint,
            low_latency_mode=True,
            num_qps_per_rank=options.experts // num_ranks,
            explicitly_destroy=True,
            **own_arguments(options, device),
        )
        self._outputs: dict[int, torch.Tensor] = {}

    def use(self, num_tokens: int, split: bool) -> None:
        max_tokens = self._max_tokens = _max_tokens(num_tokens)
        self._split = split
        if max_tokens not in self._outputs:
            shape = _slab_shape(self._options, max_tokens)
            self._outputs[max_tokens] = torch.zeros(shape, dtype=torch.bfloat16, device=self._device)
        self.outputs = self._outputs[max_tokens]
        self._buffer.clean_low_latency_buffer(max_tokens, self._options.hidden, self._options.experts)

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Slab:
        received, _, handle, _, hook = self._buffer.low_latency_dispatch(
            x, ids, self._max_tokens, self._options.experts, use_fp8=self._is_fp8, return_recv_hook=self._split
        )
        if hook is not None:
            hook()
        return Slab(Rows(*received) if self._is_fp8 else Rows(received), handle)

    def combine(self, outputs: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, slab: Slab) -> torch.Tensor:
        combined, _, hook = self._buffer.low_latency_combine(
            outputs, ids, weights, slab.handle, return_recv_hook=self._split
        )
        if hook is not None:
            hook()
        return combined

    def num_wire_rows(self, reached: torch.Tensor, num_chosen: int) -> tuple[int, int]:
        return num_chosen, num_rows_elsewhere(reached) if self._sums_ranks else num_chosen

    def destroy(self) -> None:
        self._buffer.destroy()
