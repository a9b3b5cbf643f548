"""Combines of latency mode whose rows become final while the call runs."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from late_tiles import LateTiles
from ranks import run_ranks
from slabs import make_group, options_of, run_experts, weighted_sums, with_short_weights
from world import World, make_world

import ferry


def check_late_tiles(rank: int, world: World, most: int, kind: str) -> None:
    group = make_group(rank, kind, world, most)
    world = world.to(group.device)
    x, ids, weights = world.x[rank], world.topk_idx[rank], world.topk_weights[rank]
    sent = group.latency_dispatch(x, ids, weights, **options_of(world, most))
    y = run_experts(sent.x, world.first_expert(rank))
    counts = sent.routing.local_expert_counts.tolist()
    for tile_rows, threshold in ((1, 1), (3, 4), (y.shape[1], 2)):
        for options in ({}, {"order": "rank_sums"}, {"order": "rank_sums", "wire_format": "fp8"}):
            expected = weighted_sums(world, rank, rank_sums=bool(options), fp8="wire_format" in options)
            for split in (False, True):
                tiles = LateTiles(y, counts, tile_rows, threshold)
                thread = tiles.finish_late()
                combined = group.latency_combine(
                    tiles.y,
                    sent,
                    split=split,
                    signals=ferry.TileSignals(tiles.words, tile_rows, threshold),
                    **options,
                )
                if split:
                    gc.collect()
                    combined.receive()
                assert torch.equal(combined.x, expected)
                thread.join()
    group.destroy()


def test_tiles_that_finish_late(device: str) -> None:
    world = with_short_weights(make_world(2, 6, [5, 9], hidden=256))
    run_ranks(2, check_late_tiles, world, 11, device)


def check_kept_words(rank: int, world: World, most: int) -> None:
    """A split call keeps words that the program has dropped."""
    group = make_group(rank, "cpu", world, most)
    sent = group.latency_dispatch(
        world.x[rank], world.topk_idx[rank], world.topk_weights[rank], **options_of(world, most)
    )
    y = run_experts(sent.x, world.first_expert(rank))
    words = torch.ones(len(y), y.shape[1], dtype=torch.int32)
    combined = group.latency_combine(y, sent, split=True, signals=ferry.TileSignals(words, 1, 1))
    place, shape = words.data_ptr(), words.shape
    del words
    gc.collect()
    others = [torch.zeros(shape, dtype=torch.int32) for _ in range(32)]
    assert place not in [other.data_ptr() for other in others]
    combined.receive()
    assert torch.equal(combined.x, weighted_sums(world, rank, rank_sums=False))
    group.destroy()


def test_a_split_call_keeps_its_words() -> None:
    run_ranks(2, check_kept_words, with_short_weights(make_world(2, 6, [5, 9])), 11)


BAD_RANK = 1


def check_refused(rank: int, world: World, most: int, kind: str) -> None:
    group = make_group(rank, kind, world, most)
    world = world.to(group.device)
    sent = group.latency_dispatch(
        world.x[rank], world.topk_idx[rank], world.topk_weights[rank], **options_of(world, most)
    )
    y = run_experts(sent.x, world.first_expert(rank))
    words = torch.full((len(y), y.shape[1] // 2), 4, dtype=torch.int32, device=y.device)
    good = ferry.TileSignals(words, 2, 4)
    wrong_ones: list[tuple[Any, str]] = [
        (words, "signals is a Tensor, expected a ferry.TileSignals or None"),
        (dataclasses.replace(good, words=None), "signals.words is None, expected a tensor"),
        (dataclasses.replace(good, words=words.tolist()), "signals.words"),
        (dataclasses.replace(good, words=words.float()), "has dtype f32, expected i32"),
        (dataclasses.replace(good, words=words.view(-1)), "expected .3, 11."),
        (dataclasses.replace(good, words=words[:, :-1].contiguous()), "expected .3, 11."),
        (dataclasses.replace(good, words=words.t().contiguous().t()), "must be contiguous"),
        (dataclasses.replace(good, tile_rows=0), "signals.tile_rows is 0"),
        (dataclasses.replace(good, tile_rows="two"), "signals.tile_rows is 'two', expected an integer"),
        (dataclasses.replace(good, tile_rows=1), "a word for each 1 of an expert's 22 rows"),
        (dataclasses.replace(good, threshold=0), "signals.threshold is 0"),
        (dataclasses.replace(good, threshold=2**31), "signals.threshold"),
    ]
    for signals, match in wrong_ones:
        for split in (False, True):
            with pytest.raises(ferry.InvalidArgument, match=match if rank == BAD_RANK else None):
                combined = group.latency_combine(y, sent, split=split, signals=signals if rank == BAD_RANK else good)
                if split:
                    combined.receive()
                group.wait()
    combined = group.latency_combine(y, sent, signals=good)
    assert torch.equal(combined.x, weighted_sums(world, rank, rank_sums=False))
    with pytest.raises(dataclasses.FrozenInstanceError):
        good.threshold = 5  # type: ignore[misc]
    group.destroy()


def test_wrong_signals_are_refused(device: str) -> None:
    run_ranks(2, check_refused, with_short_weights(make_world(2, 6, [5, 9])), 11, device)


def check_unsupported(rank: int, world: World, option: str) -> None:
    group = make_group(rank, "cpu", world, 11, **{option: True})
    sent = group.latency_dispatch(
        world.x[rank], world.topk_idx[rank], world.topk_weights[rank], **options_of(world, 11)
    )
    signals = ferry.TileSignals(torch.ones(len(sent.x), 1, dtype=torch.int32), sent.x.shape[1], 1)
    with pytest.raises(ferry.Unsupported, match="latency_combine: signals are given in a group with"):
        group.latency_combine(sent.x, sent, signals=signals)
    group.destroy()


@pytest.mark.parametrize("option", ["verify", "mask_lost_ranks"])
def test_groups_that_take_no_signals(option: str) -> None:
    run_ranks(2, check_unsupported, make_world(2, 6, [5, 9]), option)
