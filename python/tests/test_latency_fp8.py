"""Combines of latency mode whose ranks' sums travel as FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from slabs import make_group, options_of, run_experts, weighted_sums, with_short_weights
from world import World, make_world

import ferry


def check_fp8_sums(rank: int, world: World, most: int, kind: str) -> None:
    group = make_group(rank, kind, world, most)
    world = world.to(group.device)
    x, ids, weights = world.x[rank], world.topk_idx[rank], world.topk_weights[rank]
    sent = group.latency_dispatch(x, ids, weights, **options_of(world, most))
    y = run_experts(sent.x, world.first_expert(rank))
    fp8: dict[str, Any] = {"order": "rank_sums", "wire_format": "fp8"}
    expected = weighted_sums(world, rank, rank_sums=True, fp8=True)
    as_given = weighted_sums(world, rank, rank_sums=True)
    assert not torch.equal(expected, as_given)
    for split in (False, True):
        combined = group.latency_combine(y, sent, split=split, **fp8)
        if split:
            combined.receive()
        assert torch.equal(combined.x, expected)
        assert torch.equal(group.latency_combine(y, sent, order="rank_sums").x, as_given)
    other = weights.flip(1).contiguous()
    combined = group.latency_combine(y, sent, other, **fp8)
    assert torch.equal(combined.x, weighted_sums(world, rank, rank_sums=True, weights=other, fp8=True))
    with pytest.raises(ferry.InvalidArgument, match="latency_combine: wire_format is 'int8', expected None or 'fp8'"):
        group.latency_combine(y, sent, order="rank_sums", wire_format="int8")
    for wrong, match in (
        ({"order": "exact"}, "order is kExact, expected kRankSums"),
        ({"x": y.float()}, "the dtype of input x is f32, expected bf16"),
    ):
        with pytest.raises(ferry.Unsupported, match=match):
            group.latency_combine(**{"x": y, "dispatched": sent} | fp8 | wrong)
    group.destroy()


def test_sums_of_ranks_travel_as_fp8(device: str) -> None:
    world = with_short_weights(make_world(2, 6, [5, 9], hidden=256))
    run_ranks(2, check_fp8_sums, world, 11, device)
