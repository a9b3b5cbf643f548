"""Calls of ferry.Group as the native module makes them as a whole, against the same step by step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import device_of, run_ranks
from world import World, make_world

import ferry


class NoCalls:
    """Takes no call as a whole."""

    def route(self, *_: object) -> None: ...

    def dispatch(self, *_: object) -> None: ...

    def combine(self, *_: object) -> None: ...


def assert_same(left: tuple, right: tuple) -> None:
    for one, other in zip(left, right, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            assert one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))


def check(rank: int, world: World, layout: str, kind: str) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    idx, weights, x = world.topk_idx[rank], world.topk_weights[rank], world.x[rank]
    scales = torch.rand(2, len(x), device=device).t()
    options = {"layout": layout, "slab_capacity": 32 if layout == "slab" else 0}
    whole, nothing = group._calls, NoCalls()
    asked: list[str] = []

    class Counted:
        def route(self, *given: object) -> object:
            asked.append("route")
            made = whole.route(*given)
            assert made is not None
            return made

        def dispatch(self, *given: object) -> object:
            asked.append("dispatch")
            made = whole.dispatch(*given)
            assert made is not None
            return made

        def combine(self, *given: object) -> object:
            asked.append("combine")
            made = whole.combine(*given)
            assert made is not None
            return made

    for given in (None, weights):
        for calls in (Counted(), nothing):
            group._calls = calls
            num_sms = 8 if given is None else 0
            routing = group.route(idx, given, num_experts=world.num_experts, num_sms=num_sms, **options)
            assert isinstance(routing, ferry.Routing) and routing.group is group
            assert (routing.has_weights, routing.is_bounded) == (given is not None, False)
            tables = routing.topk_idx, routing.topk_weights, routing.slots, routing.source
            if calls is not nothing:
                of_whole = tables
        assert_same(of_whole, tables)
        rows = routing.num_recv_rows
        out = torch.empty(rows, x.shape[1], dtype=x.dtype, device=device)
        for how in (
            {},
            {"scales": scales, "num_sms": 8},
            {"topk_weights": weights},
            {"tables": False},
            {"out": out, "tables": False},
        ):
            results = []
            for calls in (Counted(), nothing):
                group._calls = calls
                received = group.dispatch(routing, x, zero_padding=True, **how)
                assert isinstance(received, ferry.Received)
                # The caller's own memory is written both times.
                results.append(ferry.Received(*[None if one is None else one.clone() for one in received]))
            assert_same(*results)
            assert (received.x is out) == ("out" in how)
        y = torch.randn(out.shape).to(device, x.dtype)
        returned = torch.rand((rows, idx.shape[1]) if layout == "tokens" else (rows,), device=device)
        for how in (
            {},
            {"weights": returned},
            {"bias": x},
            {"bias": [x, x], "num_sms": 8},
            {"weighted": True, "topk_weights": weights},
            {"out": torch.empty_like(x)},
        ):
            results = []
            for calls in (Counted(), nothing):
                group._calls = calls
                combined = group.combine(routing, y, **how)
                assert isinstance(combined, ferry.Combined)
                results.append(ferry.Combined(*[None if one is None else one.clone() for one in combined]))
            assert_same(*results)
            assert ("out" in how) == (combined.x is how.get("out"))
    assert (asked.count("route"), asked.count("dispatch"), asked.count("combine")) == (2, 10, 12)
    group._calls = whole
    group.destroy()


@pytest.mark.parametrize("layout", ["tokens", "experts", "slab"])
def test_same_results(layout: str, device: str) -> None:
    run_ranks(2, check, make_world(2, 6, [7, 4]), layout, device)
