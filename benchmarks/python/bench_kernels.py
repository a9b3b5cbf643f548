"""Durations of a call's kernels, by torch's profiler.

Before each call a matrix product and an all-reduce of the process group: the product gives the host time to put what
follows on the stream, and the all-reduce ends on all ranks at nearly the same time, so that a kernel seldom waits for a
rank that is late. What is left is the time of the kernels alone, as other packages give theirs, without launch and
gaps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_WARM_UP = 5
_PRODUCT_SIZE = 4096
# In the names of kernels of the packages that make the calls.
_PACKAGES = ("ferry", "deep_ep")


def short_name(kernel: str) -> str:
    """Name in the source for a demangled one with template arguments and parameters."""
    name = kernel.replace("(anonymous namespace)::", "").split("<")[0].split("(")[0]
    return name.rsplit("::", 1)[-1].removeprefix("void ")


def by_kernel(events: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    """µs of each launch of the packages' kernels, by short name. ``events``: names and µs of all kernels."""
    times: dict[str, list[float]] = {}
    for name, us in events:
        if any(package in name for package in _PACKAGES):
            times.setdefault(short_name(name), []).append(us)
    return times


def summarise(times: dict[str, list[float]], num_calls: int) -> dict[str, Any]:
    """``call_us``: the kernels of one call together, by the median of each."""
    kernels = [
        {"name": name, "launches_per_call": len(us) / num_calls, "us_p50": statistics.median(us), "us_min": min(us)}
        for name, us in times.items()
    ]
    return {"call_us": sum(one["us_p50"] * one["launches_per_call"] for one in kernels), "kernels": kernels}


def _events(profiler: Any) -> Iterator[tuple[str, float]]:
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            yield event.name, event.device_time if hasattr(event, "device_time") else event.cuda_time


def measure_kernels(call: Callable[[int], Any], iterations: int, device: torch.device) -> dict[str, Any]:
    """Kernels of this rank. Collective."""
    square = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device)
    flag = torch.ones(1, device=device)

    def lined_up(iteration: int) -> None:
        torch.mm(square, square)
        dist.all_reduce(flag)
        call(iteration)

    for iteration in range(min(_WARM_UP, iterations)):
        lined_up(iteration)
    torch.cuda.synchronize(device)
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for iteration in range(iterations):
            lined_up(iteration)
        torch.cuda.synchronize(device)
    return summarise(by_kernel(_events(profiler)), iterations)
