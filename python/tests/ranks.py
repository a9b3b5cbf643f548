"""Runs one function on every rank of a torch process group, ranks being forked processes, and collects failures."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # assert_close loads it, for seconds; loaded here, forked ranks already have it
import torch.multiprocessing as mp

DEADLINE_S = 120
# Counted by NVML: starting CUDA here would keep the forked ranks from using it.
DEVICES = ["cpu", "cuda"] if torch.cuda.device_count() > 0 else ["cpu"]


def run_last_what_starts_cuda(items: list[pytest.Item]) -> None:
    """For conftest.py. Tests marked ``starts_cuda`` use GPUs in this process; it can fork no ranks for GPUs then."""
    items.sort(key=lambda item: item.get_closest_marker("starts_cuda") is not None)


def device_of(rank: int, kind: str) -> torch.device:
    """This rank's device; a GPU becomes the current one. Ranks share GPUs where there are too few."""
    if kind == "cpu":
        return torch.device("cpu")
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _rank_main(rank: int, num_ranks: int, store: str, failures: Any, body: Callable[..., None], args: tuple) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
        body(rank, *args)
    except BaseException:
        failures.put((rank, traceback.format_exc()))
        raise SystemExit(1) from None


def run_ranks(num_ranks: int, body: Callable[..., None], *args: Any, lost: tuple[int, ...] = ()) -> None:
    """``body(rank, *args)`` in each rank; ``lost`` ranks are expected to die."""
    context = mp.get_context("fork")
    failures = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=_rank_main, args=(rank, num_ranks, store, failures, body, args))
            for rank in range(num_ranks)
        ]
        deadline = time.monotonic() + DEADLINE_S
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for rank in late:
            processes[rank].kill()
            processes[rank].join()
    texts = [f"rank {rank} did not end within {DEADLINE_S} s" for rank in late]
    while not failures.empty():
        rank, text = failures.get()
        texts.append(f"rank {rank}:\n{text}")
    for rank, process in enumerate(processes):
        if process.exitcode != 0 and rank not in lost and not texts:
            texts.append(f"rank {rank} ended with exit code {process.exitcode}")
    assert not texts, "\n".join(texts)


def all_ranks(says: bool) -> bool:
    """Whether ``says`` is true on all ranks. Also a barrier of the ranks."""
    told = torch.tensor([int(says)])
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return bool(told.item())
