"""Calls of ferry.Group with arguments of all forms: types of results, and outputs that are given."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import device_of, run_ranks
from world import World, make_world

import ferry


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    is_alike = (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    return is_alike and one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))


def check(rank: int, world: World, layout: str, kind: str) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    idx, weights, x = world.topk_idx[rank], world.topk_weights[rank], world.x[rank]
    scales = torch.rand(2, len(x), device=device).t()
    options = {"layout": layout, "slab_capacity": 32 if layout == "slab" else 0}
    for given in (None, weights):
        num_sms = 8 if given is None else 0
        routing = group.route(idx, given, num_experts=world.num_experts, num_sms=num_sms, **options)
        assert isinstance(routing, ferry.Routing) and routing.group is group
        assert (routing.has_weights, routing.is_bounded) == (given is not None, False)
        assert same(routing.topk_idx, idx) and same(routing.topk_weights, given)
        # Numbers that are no int, and owners of experts by name, make the same route.
        owners = [world.owner(expert) for expert in range(world.num_experts)]
        numbers = {"num_experts": torch.tensor(world.num_experts), "num_sms": str(num_sms), "expert_to_rank": owners}
        again = group.route(idx, given, **numbers, **options)
        assert same(again.slots, routing.slots) and same(again.source, routing.source)

        rows = routing.num_recv_rows
        out = torch.empty(rows, x.shape[1], dtype=x.dtype, device=device)
        plain = group.dispatch(routing, x, zero_padding=True)
        assert isinstance(plain, ferry.Received)
        assert (plain.x.shape, plain.x.dtype, plain.scales) == (out.shape, x.dtype, None)
        assert (plain.topk_idx is None) == (layout != "tokens")
        assert (plain.topk_weights is None) == (given is None)
        for how in (
            {"scales": scales, "num_sms": 8},
            {"topk_weights": weights},
            {"tables": False},
            {"out": out, "tables": False},
            {"out": out, "out_scales": torch.empty(2, rows, device=device).t(), "scales": scales},
            {"num_sms": torch.tensor(0)},
        ):
            received = group.dispatch(routing, x, zero_padding=True, **how)
            assert same(received.x, plain.x)
            assert (received.x is out) == ("out" in how)
            assert (received.scales is None) == ("scales" not in how)
            assert received.scales is how.get("out_scales", received.scales)
            assert (received.topk_idx is None) == (not how.get("tables", True) or layout != "tokens")
            has_weights = how.get("tables", True) and (given is not None or "topk_weights" in how)
            assert (received.topk_weights is None) == (not has_weights)
            if given is not None and has_weights:
                assert same(received.topk_weights, plain.topk_weights)
        y = torch.randn(out.shape).to(device, x.dtype)
        returned = torch.rand((rows, idx.shape[1]) if layout == "tokens" else (rows,), device=device)
        sums = group.combine(routing, y)
        assert isinstance(sums, ferry.Combined) and sums.weights is None
        assert (sums.x.shape, sums.x.dtype) == (x.shape, x.dtype)
        summed = group.combine(routing, y, weights=returned)
        assert same(summed.x, sums.x) and summed.weights.shape == idx.shape
        biased = group.combine(routing, y, bias=x).x
        for bias in ([x], (x,), iter([x]), [None, x]):
            assert same(group.combine(routing, y, bias=bias).x, biased)
        for bias in ([], (), 0):
            assert same(group.combine(routing, y, bias=bias).x, sums.x)
        twice = group.combine(routing, y, bias=[x, x], num_sms=8).x
        assert same(group.combine(routing, y, bias=(tensor for tensor in (x, x))).x, twice)
        # Tensors that have no owner but the call.
        made = [torch.rand(x.shape, device=device) for _ in range(2)]
        kept = [tensor.to(x.dtype) for tensor in made]
        fleeting = group.combine(routing, y, bias=(tensor.to(x.dtype) for tensor in made)).x
        assert same(fleeting, group.combine(routing, y, bias=kept).x)
        weighted = group.combine(routing, y, weighted=True, topk_weights=weights).x
        if given is not None:
            assert same(group.combine(routing, y, weighted=True).x, weighted)
        sums_out = torch.empty_like(x)
        assert group.combine(routing, y, out=sums_out).x is sums_out and same(sums_out, sums.x)
    group.destroy()


@pytest.mark.parametrize("layout", ["tokens", "experts", "slab"])
def test_forms_of_arguments(layout: str, device: str) -> None:
    run_ranks(2, check, make_world(2, 6, [7, 4]), layout, device)
