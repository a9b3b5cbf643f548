"""Latency mode in a profile. Programs find the kernels of a call by name: in the profiler's table by exactly one line
that contains "dispatch", or "combine"; in the trace, where a call is split, by two kernels each, with "::" before it.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import pytest
import torch
from clients import inputs_of
from ranks import DEVICES, run_ranks
from test_low_latency import make_latency_buffer
from world import World, make_world

from deep_ep.utils.testing import bench_kineto

pytestmark = pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")

NUM_RANKS = 2
NUM_CALLS = 5
NAMES = ("dispatch", "combine")
# Names in the table are cut to this width, as by the programs that read it.
WIDTH = 100


def check_profile(call: Callable[[], object], num_kernels: int, trace: pathlib.Path) -> None:
    """num_kernels: of each name in a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_CALLS):
            call()
        torch.cuda.synchronize()
    table = profiler.key_averages().table(sort_by="cuda_time_total", max_name_column_width=WIDTH)
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    for name in NAMES:
        assert sum(name in line for line in table.split("\n")) == 1, f"{name} in\n{table}"
        kernels = [event for event in events if f"::{name}" in event["name"]]
        assert len(kernels) == num_kernels * NUM_CALLS, f"{name} in\n{table}"
        assert all(event["dur"] > 0 for event in kernels)


def check_calls(rank: int, world: World, use_fp8: bool, counts: bool, shrinks: bool, folder: pathlib.Path) -> None:
    most = len(world.x[rank])
    buffer = make_latency_buffer(rank, "cuda", world, most, enable_shrink=shrinks)
    mine = inputs_of(world, rank, buffer.device)
    num_local = world.num_local(rank)
    total = torch.zeros(num_local, dtype=torch.int32, device=buffer.device)
    rows = torch.zeros(num_local, NUM_RANKS * most, mine.x.shape[1], dtype=mine.x.dtype, device=buffer.device)

    def call(split: bool) -> None:
        *_, handle, _, hook = buffer.low_latency_dispatch(
            mine.x,
            mine.idx,
            most,
            world.num_experts,
            cumulative_local_expert_recv_stats=total if counts else None,
            use_fp8=use_fp8,
            return_recv_hook=split,
        )
        if hook is not None:
            hook()
        *_, hook = buffer.low_latency_combine(rows, mine.idx, mine.weights, handle, return_recv_hook=split)
        if hook is not None:
            hook()

    for split in (False, True):
        # Ranks that can do without others make a whole call as two halves.
        num_kernels = 2 if split or shrinks else 1
        check_profile(lambda: call(split), num_kernels, folder / f"{rank}_{split}.json")  # noqa: B023
        times = bench_kineto(lambda: call(split), NAMES, NUM_CALLS, num_kernels_per_period=num_kernels)  # noqa: B023
        halves = [one for time in times for one in (time if isinstance(time, list) else [time])]
        assert len(halves) == 2 * num_kernels
        assert all(half > 0 for half in halves)
    torch.cuda.synchronize()
    buffer.destroy()


@pytest.mark.parametrize("num_tokens", [4, 128])
@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_calls_show_one_kernel_of_each_name(
    num_tokens: int, use_fp8: bool, counts: bool, tmp_path: pathlib.Path
) -> None:
    world = make_world(NUM_RANKS, 8, [num_tokens] * NUM_RANKS, hidden=256)
    run_ranks(NUM_RANKS, check_calls, world, use_fp8, counts, False, tmp_path)


def test_calls_that_go_on_without_lost_ranks_show_their_halves(tmp_path: pathlib.Path) -> None:
    world = make_world(NUM_RANKS, 8, [16] * NUM_RANKS, hidden=256)
    run_ranks(NUM_RANKS, check_calls, world, True, True, True, tmp_path)
