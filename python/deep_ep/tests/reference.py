"""Expected results of the calls, in plain torch and loops, from the documentation alone."""

from __future__ import annotations

import torch
from world import World


def stack(rows: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.stack(rows) if rows else like.new_empty(0, *like.shape[1:])


def local_ids(world: World, rank: int, source: int, token: int) -> list[int]:
    """[K] ids of ``rank``'s experts among the token's, -1 elsewhere."""
    first = world.first_expert(rank)
    return [
        expert - first if expert >= 0 and world.owner(expert) == rank else -1
        for expert in world.topk_idx[source][token].tolist()
    ]


def received_rows(world: World, rank: int) -> torch.Tensor:
    return stack([world.x[s][t] for s, t in world.rows_of(rank)], world.x[rank])


def received_ids(world: World, rank: int) -> list[list[int]]:
    return [local_ids(world, rank, s, t) for s, t in world.rows_of(rank)]


def received_weights(world: World, rank: int) -> torch.Tensor:
    rows = [
        torch.where(torch.tensor(local_ids(world, rank, s, t)) >= 0, world.topk_weights[s][t], 0.0)
        for s, t in world.rows_of(rank)
    ]
    return stack(rows, world.topk_weights[rank])


def in_rank(world: World, source: int) -> torch.Tensor:
    """[T, R] bool."""
    table = torch.zeros(len(world.x[source]), world.num_ranks, dtype=torch.bool)
    for token in range(len(table)):
        table[token, world.ranks_of(source, token)] = True
    return table


def choices_per_expert(world: World, source: int) -> list[int]:
    """[E], duplicates counted."""
    return [int((world.topk_idx[source] == expert).sum()) for expert in range(world.num_experts)]


def entries_per_local_expert(world: World, rank: int) -> list[int]:
    """[L], duplicates counted."""
    first = world.first_expert(rank)
    return [
        sum(choices_per_expert(world, source)[first + local] for source in range(world.num_ranks))
        for local in range(world.num_local(rank))
    ]


def rank_prefix(world: World) -> torch.Tensor:
    """[R, R] i32."""
    counts = [in_rank(world, source).sum(0) for source in range(world.num_ranks)]
    return torch.stack(counts).cumsum(0).to(torch.int32)


def scaled(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """Outputs of the experts of ``rank``, chosen so that a sum shows which ranks took part."""
    return (rows.float() * (1.0 + 0.25 * rank)).to(rows.dtype)


def combined(world: World, rank: int, biases: list[torch.Tensor]) -> torch.Tensor:
    """Sums of :func:`scaled` rows in fp32, biases first, then ranks ascending, rounded once."""
    x = world.x[rank]
    out = torch.empty_like(x)
    for token in range(len(x)):
        total = torch.zeros(x.shape[1])
        for bias in biases:
            total = total + bias[token].float()
        for other in world.ranks_of(rank, token):
            total = total + scaled(x[token], other).float()
        out[token] = total.to(x.dtype)
    return out


def align(value: int, alignment: int) -> int:
    return (value + alignment - 1) // alignment * alignment


class Expanded:
    """One row per (token, local expert), by expert, groups at multiples of an alignment."""

    def __init__(self, world: World, rank: int, alignment: int) -> None:
        first = world.first_expert(rank)
        self.rows: dict[int, tuple[int, int, int]] = {}
        """Expanded row -> source, token, local expert."""
        self.starts: list[int] = []
        self.counts: list[int] = []
        position = 0
        for local in range(world.num_local(rank)):
            members = world.rows_of_expert(first + local)
            self.starts.append(position)
            self.counts.append(len(members))
            for offset, (source, token) in enumerate(members):
                self.rows[position + offset] = (source, token, local)
            position += align(len(members), alignment)
        self.num_rows = position

    def row_of(self, source: int, token: int, local: int) -> int:
        return next(row for row, key in self.rows.items() if key == (source, token, local))
