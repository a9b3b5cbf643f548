"""Latency mode: expected results of its calls, in plain torch and loops, and calls that all ranks make."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from ranks import device_of
from world import World

import ferry


def make_group(rank: int, kind: str, world: World, max_tokens: int, **options: Any) -> ferry.Group:
    row_bytes = world.x[rank].shape[1] * 4
    num_bytes = ferry.latency_bytes_required(
        backend=kind,
        num_ranks=world.num_ranks,
        max_tokens=max_tokens,
        num_topk=world.topk_idx[rank].shape[1],
        dispatch_row_bytes=row_bytes,
        combine_row_bytes=row_bytes,
    )
    return ferry.Group(dist.group.WORLD, device=device_of(rank, kind), latency_bytes=num_bytes, **options)


def with_short_weights(world: World) -> World:
    """Weights of 4 bits: their products with bf16 are exact in fp32, so that fused and plain additions are the same."""
    return dataclasses.replace(world, topk_weights=[(w * 8).round() / 8 for w in world.topk_weights])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def stack(rows: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.stack(rows) if rows else like.new_empty(0, *like.shape[1:])


def rows_of_experts(world: World, rank: int) -> list[list[tuple[int, int]]]:
    """For each local expert (source rank, source token) of its rows."""
    first = world.first_expert(rank)
    return [world.rows_of_expert(first + local) for local in range(world.num_local(rank))]


def check_slab(slab: torch.Tensor, world: World, rank: int, payload: list[torch.Tensor]) -> None:
    """Every row that holds a token. ``payload``: rows that each rank sent, [T, any]."""
    for local, rows in enumerate(rows_of_experts(world, rank)):
        expected = stack([payload[s][t] for s, t in rows], payload[rank])
        assert torch.equal(as_bytes(slab[local, : len(rows)]), as_bytes(expected)), local


def check_ranges(ranges: list[list[tuple[int, int]]], world: World, rank: int) -> None:
    """ranges: rows of each local expert from each source rank, and the first of them."""
    for local, rows in enumerate(rows_of_experts(world, rank)):
        expected, first = [], 0
        for source in range(world.num_ranks):
            count = sum(s == source for s, _ in rows)
            expected.append((count, first))
            first += count
        assert [tuple(pair) for pair in ranges[local]] == expected


def run_experts(slab: torch.Tensor, first_expert: int) -> torch.Tensor:
    """Outputs that show from which expert a row comes."""
    factors = 1.0 + 0.25 * torch.arange(first_expert, first_expert + len(slab), device=slab.device)
    return (slab.float() * factors.view(-1, 1, 1)).to(torch.bfloat16)


def after_fp8(row: torch.Tensor) -> torch.Tensor:
    """A row [H] of fp32 once it has travelled as FP8."""
    quantized = ferry.quantize(row.unsqueeze(0), "fp8")
    return (quantized.x.float() * quantized.scales.repeat_interleave(128, dim=1))[0]


def weighted_sums(
    world: World, rank: int, *, rank_sums: bool, weights: torch.Tensor | None = None, fp8: bool = False
) -> torch.Tensor:
    """Sums of :func:`run_experts` for this rank's tokens, [T, H]. fp8: sums of ranks travel as FP8."""
    x, weights = world.x[rank], world.topk_weights[rank] if weights is None else weights
    out = torch.zeros_like(x)
    for token, ids in enumerate(world.topk_idx[rank].tolist()):
        sums: dict[int, torch.Tensor] = {}
        for expert in sorted({e for e in ids if e >= 0}):
            owner = world.owner(expert) if rank_sums else 0
            total = sums.get(owner, torch.zeros(x.shape[1], device=x.device))
            row = run_experts(x[token].view(1, 1, -1), expert).view(-1).float()
            for k, other in enumerate(ids):
                if other == expert:
                    total = total + weights[token, k] * row
            sums[owner] = total
        parts = [sums[owner] for owner in sorted(sums)]
        if fp8:
            parts = [after_fp8(part) for part in parts]
        elif rank_sums:
            parts = [part.to(x.dtype).float() for part in parts]
        if parts:
            out[token] = sum(parts, torch.zeros(x.shape[1], device=x.device)).to(x.dtype)
    return out


def options_of(world: World, max_tokens: int, **options: Any) -> dict[str, Any]:
    return {"num_experts": world.num_experts, "max_tokens": max_tokens} | options
