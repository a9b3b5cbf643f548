"""Behaviour that only GPUs have: calls that overlap other work, tensors freed while kernels use them, and graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from clients import Inputs, dispatch, inputs_of, layout_of, make_buffer, make_elastic, make_ep
from ranks import DEVICES, run_ranks
from world import World, make_world

import ferry
import reference

pytestmark = pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")

NUM_RANKS = 2
# Clock ticks of a kernel that keeps a stream busy for about half a second.
BUSY = 800_000_000


def check_async(rank: int, world: World) -> None:
    buffer = make_buffer(rank, "cuda")
    mine = inputs_of(world, rank, torch.device("cuda", torch.cuda.current_device()))
    *_, handle, _ = dispatch(buffer, world, mine)
    expected = reference.received_rows(world, rank)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY)
    late = mine.x.clone()
    busy = buffer.capture()
    x, *_, event = buffer.dispatch(
        late, handle=handle, previous_event=busy, async_finish=True, allocate_on_comm_stream=True
    )
    del late
    trash = torch.full_like(mine.x, float("nan"))  # would reuse memory that was freed too early
    assert event.event is not None
    assert not busy.event.event.query(), "the call waited for the GPU"
    with event:
        trash += 1  # overlaps the exchange
    y = reference.scaled(x, rank)
    out, _, event = buffer.combine(y, handle, async_finish=True)
    del x, y
    trash = torch.full((len(expected), mine.x.shape[1]), float("nan"), device=trash.device)
    event.current_stream_wait()
    assert torch.equal(out.cpu(), reference.combined(world, rank, []))
    again, *_, event = buffer.dispatch(mine.x, handle=handle, async_finish=True)
    event.current_stream_wait()
    assert torch.equal(again.cpu(), expected)
    buffer.destroy()


def test_calls_run_beside_other_work() -> None:
    run_ranks(NUM_RANKS, check_async, make_world(NUM_RANKS, 6, [40, 30]))


def check_deferred(rank: int, world: World) -> None:
    """An epilogue on another stream than the call's, while the call still waits for its input."""
    buffer = make_ep(rank, "cuda")
    mine = inputs_of(world, rank, torch.device("cuda", torch.cuda.current_device()))
    options = {"num_experts": world.num_experts, "do_expand": True}
    expected, _, _, handle, _ = buffer.dispatch(mine.x, mine.idx, **options)
    out, _, _ = buffer.combine(expected, handle)
    deferred = {"async_with_compute_stream": True, "allocate_on_comm_stream": True, "defer_epilogue": True}
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY)
    late = mine.x.clone()
    busy = buffer.capture()
    event = buffer.dispatch(late, handle=handle, previous_event=busy, **deferred)
    del late
    trash = torch.full_like(mine.x, float("nan"))
    assert not busy.event.query(), "the call waited for the GPU"
    waits = torch.cuda.Stream()
    with torch.cuda.stream(waits):
        rows = event.wait()[0]
        event = buffer.combine(rows, handle, **deferred)
        sums = event.wait()[0]
    trash += 1
    waits.synchronize()
    assert torch.equal(rows, expected) and torch.equal(sums, out)
    buffer.destroy()


def test_deferred_epilogues_run_on_the_stream_that_waits() -> None:
    run_ranks(NUM_RANKS, check_deferred, make_world(NUM_RANKS, 6, [32, 30]))


def captured(body):
    """Once to warm up, once to capture; replays run it again."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = body()
    return graph, results


def refill(mine: Inputs, world: World, rank: int) -> None:
    mine.x.copy_(world.x[rank])
    mine.idx.copy_(world.topk_idx[rank])
    mine.weights.copy_(world.topk_weights[rank])


def check_first_generation(rank: int, worlds: list[World]) -> None:
    buffer = make_buffer(rank, "cuda")
    mine = inputs_of(worlds[0], rank, torch.device("cuda", torch.cuda.current_device()))

    def body():
        x, idx, weights, counts, handle, _ = dispatch(buffer, worlds[0], mine, num_worst_tokens=96)
        assert counts == []
        out, sums, _ = buffer.combine(reference.scaled(x, rank), handle, topk_weights=weights)
        return x, idx, out, sums

    graph, (x, idx, out, sums) = captured(body)
    for world in worlds:
        refill(mine, world, rank)
        graph.replay()
        expected = reference.received_rows(world, rank)
        count = len(expected)
        assert torch.equal(x[:count].cpu(), expected)
        assert idx[:count].tolist() == reference.received_ids(world, rank)
        assert (idx[count:] == -1).all()
        assert torch.equal(out.cpu(), reference.combined(world, rank, []))
        assert torch.equal(sums.cpu(), torch.where(world.topk_idx[rank] >= 0, world.topk_weights[rank], 0.0))
    torch.cuda.synchronize()
    buffer.destroy()


def test_graphs_of_the_first_generation() -> None:
    worlds = [make_world(NUM_RANKS, 6, [24, 24], seed=seed) for seed in range(3)]
    run_ranks(NUM_RANKS, check_first_generation, worlds)


def check_second_generation(rank: int, worlds: list[World], expand: bool) -> None:
    buffer = make_elastic(rank, "cuda")
    mine = inputs_of(worlds[0], rank, torch.device("cuda", torch.cuda.current_device()))

    def body():
        x, _, _, handle, _ = buffer.dispatch(
            mine.x,
            mine.idx,
            mine.weights,
            num_experts=worlds[0].num_experts,
            expert_alignment=4,
            do_cpu_sync=False,
            do_expand=expand,
            do_zero_padding=expand,
        )
        assert handle.num_recv_tokens_per_expert_list == []
        return x, handle, buffer.combine(x, handle)[0]

    graph, (x, handle, out) = captured(body)
    for world in worlds:
        refill(mine, world, rank)
        graph.replay()
        if expand:
            layout = reference.Expanded(world, rank, 4)
            for row, (source, token, _) in layout.rows.items():
                assert torch.equal(x[row].cpu(), world.x[source][token])
            ends = [start + count for start, count in zip(layout.starts, layout.counts)]
            assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
            times = [len({e for e in ids if e >= 0}) for ids in world.topk_idx[rank].tolist()]
        else:
            expected = reference.received_rows(world, rank)
            assert torch.equal(x[: len(expected)].cpu(), expected)
            times = [len(world.ranks_of(rank, token)) for token in range(len(mine.x))]
        torch.testing.assert_close(
            out.float().cpu(), world.x[rank].float() * torch.tensor(times).unsqueeze(1), rtol=1e-2, atol=1e-2
        )
    torch.cuda.synchronize()
    buffer.destroy()


@pytest.mark.parametrize("expand", [False, True])
def test_graphs_of_the_second_generation(expand: bool) -> None:
    worlds = [make_world(NUM_RANKS, 6, [24, 24], seed=seed) for seed in range(3)]
    run_ranks(NUM_RANKS, check_second_generation, worlds, expand)


def check_late_errors(rank: int, world: World) -> None:
    buffer = make_buffer(rank, "cuda")
    mine = inputs_of(world, rank, torch.device("cuda", torch.cuda.current_device()))
    layout = layout_of(buffer, mine.idx, world.num_experts)

    def told_late(call: Callable[[], object]) -> type[Exception] | None:
        """The exception of this call or of the next one, which is local."""
        found = None
        for attempt in (call, look, look):
            try:
                attempt()
            except ferry.FerryError as error:
                found = found or type(error)
            torch.cuda.synchronize()
        return found

    def look() -> None:
        buffer.get_dispatch_layout(mine.idx, world.num_experts)

    options = {"topk_idx": mine.idx, "topk_weights": mine.weights, **layout}
    assert told_late(lambda: buffer.dispatch(mine.x, num_worst_tokens=1, **options)) is ferry.CapacityExceeded
    wrong = mine.idx.int() if rank == 1 else mine.idx
    refused = told_late(lambda: buffer.dispatch(mine.x, num_worst_tokens=96, **{**options, "topk_idx": wrong}))
    assert refused is ferry.InvalidArgument
    # All ranks have made the same calls: the next one works.
    x, *_ = buffer.dispatch(mine.x, num_worst_tokens=96, **options)
    expected = reference.received_rows(world, rank)
    assert torch.equal(x[: len(expected)].cpu(), expected)
    buffer.destroy()


def test_errors_that_the_exchange_shows() -> None:
    run_ranks(NUM_RANKS, check_late_errors, make_world(NUM_RANKS, 6, [24, 20]))
