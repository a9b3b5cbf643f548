"""Timing of calls. Without a GPU, by the clock of the host."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

__all__ = ["bench", "bench_kineto"]

# Larger than the last cache of any GPU.
_FLUSH_BYTES = 256 << 20


def _on_host(call: Callable[[], object], num_tests: int, after: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(num_tests):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
        after()
    return times


def _on_gpu(call: Callable[[], object], num_tests: int, after: Callable[[], object]) -> list[float]:
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_tests)]
    torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda").zero_()
    for begin, end in marks:
        begin.record()
        call()
        end.record()
        after()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


def bench(
    fn: Callable[[], object],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], object] | None = None,
) -> tuple[float, float, float]:
    """Mean, minimum and maximum seconds of a call ``fn()``, measured on the current stream.

    post_fn: called after each, not timed.
    """
    for _ in range(num_warmups):
        fn()
    times = (_on_gpu if torch.cuda.is_available() else _on_host)(fn, num_tests, post_fn or (lambda: None))
    return sum(times) / len(times), min(times), max(times)


def bench_kineto(
    fn: Callable[[], object],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], object] | None = None,
) -> float | list[float] | tuple[float | list[float], ...]:
    """Seconds on the GPU of a call ``fn()``: of the kernels whose names contain each given name, per call.

    In latency mode on one node these are one kernel named "dispatch" and one named "combine", or two where a call is
    split, one for each half. Programs may pass other names, which Ferry does not have. If none of the names is found,
    the first gets the time of the whole call (all kernels of the GPU, per call, including waits for other ranks;
    without a GPU the time of the call), and the others are NaN. If some are found, those that are not are NaN.

    trace_path: where to write the trace. barrier_comm_profiling: ranks synchronise first: with ``barrier``, or else
    with the default process group. suppress_kineto_output: has no effect: this function prints nothing.
    num_kernels_per_period: with 1, kernels with one name are summed. With n, each time is a list of n: of the first,
    the second, ... of every n kernels in a row. If calls do not have n kernels each, or a multiple, the first is the
    sum and the others are NaN.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    fn()
    if barrier_comm_profiling:
        (barrier or dist.barrier)()
    with _profile(trace_path) as kernels:
        times = _on_host(fn, num_tests, lambda: None)
    found = [[seconds for kernel, seconds in kernels if name in kernel] for name in names]
    if not any(found):
        found[0] = [sum(seconds for _, seconds in kernels) if kernels else sum(times)]
    result = [_per_call(seconds, num_tests, num_kernels_per_period) for seconds in found]
    return result[0] if isinstance(kernel_names, str) else tuple(result)


def _per_call(seconds: list[float], num_tests: int, num_kernels_per_period: int) -> float | list[float]:
    """Mean seconds, per call, of kernels in the order in which they ran."""
    whole = sum(seconds) / num_tests if seconds else float("nan")
    if num_kernels_per_period == 1:
        return whole
    if not seconds or len(seconds) % (num_kernels_per_period * num_tests) != 0:
        return [whole, *[float("nan")] * (num_kernels_per_period - 1)]
    return [sum(seconds[first::num_kernels_per_period]) / num_tests for first in range(num_kernels_per_period)]


@contextlib.contextmanager
def _profile(trace_path: str | None) -> Iterator[list[tuple[str, float]]]:
    """Yields a list that is filled at the end: name and seconds of each kernel of the GPU, as they began."""
    kernels: list[tuple[str, float]] = []
    if not torch.cuda.is_available():
        yield kernels
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield kernels
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    kernels.extend((event.name, event.time_range.elapsed_us() / 1e6) for event in events)
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
