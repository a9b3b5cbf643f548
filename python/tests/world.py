"""Inputs of all ranks, generated identically on each rank, and the results they should give, in plain torch."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass
class World:
    num_ranks: int
    num_experts: int
    x: list[torch.Tensor]
    """[R] of [T, H]"""
    topk_idx: list[torch.Tensor]
    topk_weights: list[torch.Tensor]

    def to(self, device: torch.device) -> World:
        """The same with its tensors on ``device``."""
        lists = [[one.to(device) for one in field] for field in (self.x, self.topk_idx, self.topk_weights)]
        return World(self.num_ranks, self.num_experts, *lists)

    def owner(self, expert: int) -> int:
        bounds = [rank * self.num_experts // self.num_ranks for rank in range(self.num_ranks + 1)]
        return next(rank for rank in range(self.num_ranks) if bounds[rank] <= expert < bounds[rank + 1])

    def first_expert(self, rank: int) -> int:
        return rank * self.num_experts // self.num_ranks

    def num_local(self, rank: int) -> int:
        return self.first_expert(rank + 1) - self.first_expert(rank)

    def rows_of(self, rank: int) -> list[tuple[int, int]]:
        """Layout "tokens": (source rank, source token) of each row that ``rank`` receives."""
        return [
            (source, token)
            for source in range(self.num_ranks)
            for token in range(len(self.x[source]))
            if any(e >= 0 and self.owner(e) == rank for e in self.topk_idx[source][token].tolist())
        ]

    def rows_of_expert(self, expert: int) -> list[tuple[int, int]]:
        return [
            (source, token)
            for source in range(self.num_ranks)
            for token in range(len(self.x[source]))
            if expert in self.topk_idx[source][token].tolist()
        ]

    def without(self, lost: int) -> World:
        """The world for ranks that mask one: the masked rank has no tokens, and no token picks its experts."""
        first = self.first_expert(lost)
        left = dataclasses.replace(self, x=list(self.x), topk_idx=list(self.topk_idx))
        for rank, ids in enumerate(self.topk_idx):
            is_lost = (ids >= first) & (ids < first + self.num_local(lost))
            left.topk_idx[rank] = torch.where(is_lost, -1, ids)[: 0 if rank == lost else len(ids)]
        left.x[lost] = self.x[lost][:0]
        return left

    def ranks_of(self, source: int, token: int) -> list[int]:
        return sorted({self.owner(e) for e in self.topk_idx[source][token].tolist() if e >= 0})


def make_world(
    num_ranks: int,
    num_experts: int,
    num_tokens: list[int],
    *,
    hidden: int = 64,
    num_topk: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> World:
    """Random ids, which include duplicates and tokens without an expert."""
    generator = torch.Generator().manual_seed(seed)
    world = World(num_ranks, num_experts, [], [], [])
    for rank in range(num_ranks):
        count = num_tokens[rank]
        world.x.append(torch.randn(count, hidden, generator=generator).to(dtype))
        world.topk_idx.append(torch.randint(-1, num_experts, (count, num_topk), generator=generator))
        world.topk_weights.append(torch.rand(count, num_topk, generator=generator))
    return world
