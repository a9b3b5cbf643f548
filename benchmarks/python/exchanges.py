"""The exchange of a layer through the packages ``ferry`` and ``deep_ep``, behind one interface.

``collectives`` has the same interface over collectives of torch. ``deep_ep`` is whichever package of that name Python
finds: Ferry's, or the original with its first generation's ``Buffer``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

import ferry

Done = Callable[[str], None]
"""Called with the name of a call that has returned."""

_BUFFER_BYTES = 1 << 30  # of DeepEP's own buffers, which 8 ranks need more than a quarter of; Ferry's grow as needed


def random_ids(
    generator: torch.Generator, count: int, num_tokens: int, num_experts: int, num_topk: int, device: torch.device
) -> list[torch.Tensor]:
    """``count`` routings [T, K] of different experts at random."""
    scores = (torch.rand(num_tokens, num_experts, generator=generator) for _ in range(count))
    return [of_one.topk(num_topk, dim=1).indices.to(device) for of_one in scores]


class Rows(NamedTuple):
    """Payload of a dispatch."""

    x: torch.Tensor
    """[T, H] bf16, or fp8 with scales."""
    scales: torch.Tensor | None = None
    """[T, H / 128] f32"""

    def for_deep_ep(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return self.x if self.scales is None else (self.x, self.scales)


class Received(NamedTuple):
    """Rows that a rank has received. ``topk_idx`` and ``topk_weights`` are those of a new dispatch, else None."""

    rows: Rows
    """[N, H]"""
    topk_idx: torch.Tensor | None
    """[N, K]: experts of this rank, the first one 0, and -1 for those of other ranks."""
    topk_weights: torch.Tensor | None


class Exchange(Protocol):
    """Dispatch and combine of one rank. All calls but ``num_wire_rows`` are collective."""

    def new(self, rows: Rows, ids: torch.Tensor, weights: torch.Tensor, done: Done = ...) -> Received:
        """Routes ``ids`` [T, K] i64 and dispatches. ``again`` and ``combine`` refer to the last new dispatch."""
        ...

    def again(self, rows: Rows) -> Received:
        """Dispatches by the same routing."""
        ...

    def combine(self, outputs: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Sums the outputs [N, H] bf16 of each token: [T, H]. ``weights`` [N, K] travel back beside them if given."""
        ...

    def num_wire_rows(self, reached: torch.Tensor) -> int:
        """Rows that this rank sends to other ranks in a dispatch. ``reached`` [T, R]: ranks with experts of a token."""
        ...

    def destroy(self) -> None: ...


def ignore(_: str) -> None: ...


def num_rows_elsewhere(reached: torch.Tensor) -> int:
    """Entries of ``reached`` [T, R] that are true for other ranks than this one."""
    return int(reached.sum() - reached[:, dist.get_rank()].sum())


def is_of_ferry(deep_ep: Any) -> bool:
    """Whether this package ``deep_ep`` is Ferry's, not the original."""
    return "+ferry" in getattr(deep_ep, "__version__", "")


def own_arguments(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Arguments that only this deep_ep's constructors take, where they are needed: others measure the same program."""
    arguments: dict[str, Any] = {} if device.type == "cuda" else {"device": device}
    return arguments | ({"ranks_per_node": options.ranks_per_node} if options.ranks_per_node else {})


class Ferry:
    """``route``, ``dispatch`` and ``combine``."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._group = ferry.Group(dist.group.WORLD, device=device, ranks_per_node=options.ranks_per_node)
        self._num_experts = options.experts
        self._routing: ferry.Routing

    def new(self, rows: Rows, ids: torch.Tensor, weights: torch.Tensor, done: Done = ignore) -> Received:
        self._routing = self._group.route(ids, weights, num_experts=self._num_experts)
        done("route")
        received = self._group.dispatch(self._routing, rows.x, scales=rows.scales)
        done("dispatch")
        return Received(Rows(received.x, received.scales), received.topk_idx, received.topk_weights)

    def again(self, rows: Rows) -> Received:
        received = self._group.dispatch(self._routing, rows.x, scales=rows.scales, tables=False)
        return Received(Rows(received.x, received.scales), None, None)

    def combine(self, outputs: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        return self._group.combine(self._routing, outputs, weights=weights).x

    def num_wire_rows(self, reached: torch.Tensor) -> int:
        return num_rows_elsewhere(reached)

    def destroy(self) -> None:
        self._group.destroy()


class DeepEp:
    """``get_dispatch_layout``, ``dispatch`` and ``combine`` of ``deep_ep.Buffer``."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        import deep_ep  # not needed for anything else here

        own = own_arguments(options, device)
        self._buffer = deep_ep.Buffer(dist.group.WORLD, _BUFFER_BYTES, 0, explicitly_destroy=True, **own)
        self._num_experts = options.experts
        self._handle: Any

    def new(self, rows: Rows, ids: torch.Tensor, weights: torch.Tensor, done: Done = ignore) -> Received:
        per_rank, per_node, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(ids, self._num_experts)
        done("layout")
        received, local_ids, local_weights, _, self._handle, _ = self._buffer.dispatch(
            rows.for_deep_ep(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
        )
        done("dispatch")
        return Received(_rows_of(received), local_ids, local_weights)

    def again(self, rows: Rows) -> Received:
        return Received(_rows_of(self._buffer.dispatch(rows.for_deep_ep(), handle=self._handle)[0]), None, None)

    def combine(self, outputs: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        return self._buffer.combine(outputs, self._handle, topk_weights=weights)[0]

    def num_wire_rows(self, reached: torch.Tensor) -> int:
        return num_rows_elsewhere(reached)

    def destroy(self) -> None:
        self._buffer.destroy()


def _rows_of(received: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Rows:
    return Rows(*received) if isinstance(received, tuple) else Rows(received)
