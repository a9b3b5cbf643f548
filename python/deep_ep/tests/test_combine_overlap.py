"""Combines of latency mode that begin before their rows are computed, as engines call them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clients import inputs_of
from late_tiles import LateTiles
from ranks import DEVICES, run_ranks
from slabs import run_experts, weighted_sums, with_short_weights
from test_low_latency import make_latency_buffer
from world import World, make_world

import deep_ep
import ferry

BLOCK_M = 4


def combine_late(
    buffer: deep_ep.Buffer, tiles: LateTiles, given: tuple[Any, ...], split: bool, **options: Any
) -> torch.Tensor:
    """A combine whose rows become final while it runs."""
    thread = tiles.finish_late()
    out, _, hook = buffer.low_latency_combine(tiles.y, *given, overlap=True, return_recv_hook=split, **options)
    if hook is not None:
        hook()
    thread.join()
    return out


def check_overlap(rank: int, world: World, most: int, kind: str) -> None:
    buffer = make_latency_buffer(rank, kind, world, most)
    world = world.to(buffer.device)
    mine = inputs_of(world, rank, buffer.device)
    x, count, handle, *_ = buffer.low_latency_dispatch(mine.x, mine.idx, most, world.num_experts, use_fp8=False)
    y, counts = run_experts(x, world.first_expert(rank)), count.tolist()
    given = (mine.idx, mine.weights, handle)
    expected = weighted_sums(world, rank, rank_sums=True)
    # uint32 words are the same words. As engines do, a flat tensor has room for smaller tiles.
    for dtype in (torch.int32, torch.uint32):
        for split in (False, True):
            tiles = LateTiles(y, counts, BLOCK_M, 3)
            longer = torch.zeros(2 * tiles.words.numel(), dtype=torch.int32, device=y.device)
            flat = longer[: tiles.words.numel()]
            tiles.words = flat.view_as(tiles.words)
            for signal in (tiles.words, flat, longer):
                tiles.y.fill_(torch.nan)
                longer.zero_()
                out = combine_late(
                    buffer,
                    tiles,
                    given,
                    split,
                    packed_recv_count=count,
                    comp_signal=signal.view(dtype),
                    block_m=BLOCK_M,
                    threshold=3,
                    num_sms=3,
                )
                assert torch.equal(out, expected)
            whole = LateTiles(y, counts, y.shape[1], 7)
            out = combine_late(
                buffer, whole, given, split, src_signals=whole.words.view(-1).view(dtype), src_signal_expect_value=7
            )
            assert torch.equal(out, expected)
    unused = torch.zeros(1, device=y.device)
    out, *_ = buffer.low_latency_combine(y, *given, overlap=False, comp_signal=unused, block_m=0, src_signals=unused)
    assert torch.equal(out, expected)
    buffer.destroy()


def test_rows_that_are_computed_while_the_combine_runs(device: str) -> None:
    run_ranks(2, check_overlap, with_short_weights(make_world(2, 6, [5, 9], hidden=128)), 10, device)


def check_graph(rank: int, world: World, most: int) -> None:
    """The combine is sent on another stream than its rows are computed on, and its hook called on that one."""
    buffer = make_latency_buffer(rank, "cuda", world, most)
    world = world.to(buffer.device)
    mine = inputs_of(world, rank, buffer.device)
    x, _, handle, *_ = buffer.low_latency_dispatch(mine.x, mine.idx, most, world.num_experts, use_fp8=False)
    final = run_experts(x, world.first_expert(rank))
    y, out = torch.empty_like(final), torch.empty_like(mine.x)
    words = torch.zeros(len(y), dtype=torch.int32, device=buffer.device)

    def step(other: torch.cuda.Stream) -> None:
        words.zero_()
        y.fill_(torch.nan)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            *_, hook = buffer.low_latency_combine(
                y, mine.idx, mine.weights, handle, return_recv_hook=True, out=out, overlap=True, src_signals=words,
                src_signal_expect_value=1, num_sms=3,
            )  # fmt: skip
        y.copy_(final)
        words.fill_(1)
        other.wait_stream(torch.cuda.current_stream())
        hook()

    expected = weighted_sums(world, rank, rank_sums=True)
    other = torch.cuda.Stream()
    step(other)
    assert torch.equal(out, expected)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        step(torch.cuda.default_stream())
        assert torch.equal(out, expected)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(other)
    for factor in (1, 2, 4):  # exact in bf16
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected * factor)
        final.mul_(2)
    buffer.destroy()


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_a_hook_on_another_stream_in_a_graph() -> None:
    run_ranks(2, check_graph, with_short_weights(make_world(2, 6, [5, 9], hidden=128)), 10)


BAD_RANK = 1


def check_refused(rank: int, world: World, most: int) -> None:
    buffer = make_latency_buffer(rank, "cpu", world, most)
    mine = inputs_of(world, rank, buffer.device)
    x, _, handle, *_ = buffer.low_latency_dispatch(mine.x, mine.idx, most, world.num_experts, use_fp8=False)
    y = run_experts(x, world.first_expert(rank))
    words = torch.full((len(y), y.shape[1] // BLOCK_M), 2, dtype=torch.int32)
    good = {"overlap": True, "comp_signal": words, "block_m": BLOCK_M, "threshold": 2}
    expected = weighted_sums(world, rank, rank_sums=True)
    for wrong, match in (
        ({"comp_signal": None}, "overlap is True and neither comp_signal nor src_signals is given"),
        ({"src_signals": words}, "both comp_signal and src_signals are given"),
        ({"comp_signal": "words"}, "comp_signal is a str"),
        ({"comp_signal": words.long()}, r"comp_signal is of shape .* expected 15 contiguous words of int32 or uint32"),
        ({"comp_signal": words.view(-1)[:-1]}, "expected 15 contiguous words"),
        ({"comp_signal": words.repeat(1, 2)}, "expected 15 contiguous words"),
        ({"comp_signal": words.t().contiguous().t()}, "expected 15 contiguous words"),
        ({"block_m": 0}, "block_m is 0, expected an integer of at least 1"),
        ({"threshold": 0}, "threshold is 0, expected an integer of at least 1"),
        ({"num_sms": 0}, "num_sms is 0, expected an integer of at least 1"),
        ({"comp_signal": None, "src_signals": words, "src_signal_expect_value": 2}, "expected 3 contiguous words"),
        ({"comp_signal": None, "src_signals": words[:, 0].contiguous()}, "src_signal_expect_value is None"),
    ):
        for split in (False, True):
            with pytest.raises(ValueError, match=match if rank == BAD_RANK else None) as raised:
                options = good | (wrong if rank == BAD_RANK else {})
                *_, hook = buffer.low_latency_combine(
                    y, mine.idx, mine.weights, handle, return_recv_hook=split, **options
                )
                if hook is not None:
                    hook()
            assert isinstance(raised.value, ferry.InvalidArgument)
        out, *_ = buffer.low_latency_combine(y, mine.idx, mine.weights, handle, **good)
        assert torch.equal(out, expected)
    buffer.destroy()


def test_wrong_signals_are_refused_on_all_ranks() -> None:
    run_ranks(2, check_refused, with_short_weights(make_world(2, 6, [5, 9])), 10)
