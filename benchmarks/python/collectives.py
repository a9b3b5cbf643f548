"""The exchange of a layer by collectives of torch.distributed, with the interface of ``exchanges.Exchange``."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from exchanges import Done, Received, Rows, ignore, num_rows_elsewhere

# Torch renames them; old versions have only the second name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that every collective takes."""
    return tensor.view(torch.uint8)


def _pack(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Ids and weights [T, K] in one tensor [T, 2 K] i32, for one collective."""
    return torch.cat((ids.int(), weights.view(torch.int32)), 1)


def _unpack(packed: torch.Tensor, experts_per_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, weights = packed.chunk(2, 1)
    local = ids - dist.get_rank() * experts_per_rank
    is_here = (local >= 0) & (local < experts_per_rank)
    return torch.where(is_here, local, -1).long(), weights.contiguous().view(torch.float32)


class AllToAll:
    """``all_to_all_single`` of rows that are gathered for each rank before it and added up after it."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._experts_per_rank = options.experts // dist.get_world_size()

    def route(self, ids: torch.Tensor) -> None:
        """Finds the rows of each rank and exchanges their numbers, for which the host waits."""
        num_ranks = dist.get_world_size()
        goes = torch.zeros(len(ids), num_ranks, dtype=torch.bool, device=ids.device)
        goes.scatter_(1, ids // self._experts_per_rank, True)
        ranks, self._tokens = goes.t().nonzero(as_tuple=True)  # by rank, inside a rank by token
        sent = torch.bincount(ranks, minlength=num_ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        self._num_sent, self._num_received = torch.stack((sent, received)).tolist()
        self._num_tokens = len(ids)

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.new_empty(sum(self._num_received), tensor.shape[1])
        dist.all_to_all_single(_as_bytes(out), _as_bytes(tensor[self._tokens]), self._num_received, self._num_sent)
        return out

    def new(self, rows: Rows, ids: torch.Tensor, weights: torch.Tensor, done: Done = ignore) -> Received:
        self.route(ids)
        done("route")
        received = self.again(rows)
        tables = _unpack(self._send(_pack(ids, weights)), self._experts_per_rank)
        done("dispatch")
        return Received(received.rows, *tables)

    def again(self, rows: Rows) -> Received:
        scales = None if rows.scales is None else self._send(rows.scales)
        return Received(Rows(self._send(rows.x), scales), None, None)

    def combine(self, outputs: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        rows = outputs.new_empty(len(self._tokens), outputs.shape[1])
        dist.all_to_all_single(rows, outputs, self._num_sent, self._num_received)
        sums = torch.zeros(self._num_tokens, outputs.shape[1], device=outputs.device)
        return sums.index_add_(0, self._tokens, rows.float()).to(outputs.dtype)

    def num_wire_rows(self, reached: torch.Tensor) -> int:
        return num_rows_elsewhere(reached)

    def destroy(self) -> None: ...


class AllGather:
    """Every rank gets every row, ``all_gather``, and the outputs are added up on the way back, ``reduce_scatter``.

    Takes as many tokens of each rank. Outputs have a row for each token of all ranks, zeros where this rank has no
    expert of it.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._experts_per_rank = options.experts // dist.get_world_size()

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.new_empty(len(tensor) * dist.get_world_size(), tensor.shape[1])
        _all_gather(_as_bytes(out), _as_bytes(tensor))
        return out

    def new(self, rows: Rows, ids: torch.Tensor, weights: torch.Tensor, done: Done = ignore) -> Received:
        tables = _unpack(self._gather(_pack(ids, weights)), self._experts_per_rank)
        done("route")
        received = self.again(rows)
        done("dispatch")
        return Received(received.rows, *tables)

    def again(self, rows: Rows) -> Received:
        scales = None if rows.scales is None else self._gather(rows.scales)
        return Received(Rows(self._gather(rows.x), scales), None, None)

    def combine(self, outputs: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        sums = outputs.new_empty(len(outputs) // dist.get_world_size(), outputs.shape[1])
        _reduce_scatter(sums, outputs)
        return sums

    def num_wire_rows(self, reached: torch.Tensor) -> int:
        return len(reached) * (dist.get_world_size() - 1)

    def destroy(self) -> None: ...
