"""The wall time of latency mode as programs call it: a dispatch, a combine, and a pair of them.

Through ``ferry`` those are ``latency_dispatch`` and ``latency_combine``, through ``deep_ep`` ``low_latency_dispatch``
and ``low_latency_combine``. Each iteration has other ids. Wall times are means of calls in a row on the slowest rank,
until the GPU is done with the last one; the time of a call on the host is with an idle GPU before it. Times of kernels
are those of `bench_kernels`, of a call on the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bench_kernels import measure_kernels
from exchanges import random_ids
from latency_exchanges import DeepEpLatency, FerryLatency, LatencyExchange, Slab

_WARM_UP = 20
_US_PER_S = 1e6
_GRAPH_PAIRS = 100


class Batch(NamedTuple):
    """Payload of one rank. ``ids`` are of one iteration each."""

    rows: torch.Tensor
    ids: list[torch.Tensor]
    weights: torch.Tensor


def draw(options: argparse.Namespace, num_tokens: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = random_ids(generator, options.iterations, num_tokens, options.experts, options.topk, device)
    rows = torch.randn(num_tokens, options.hidden, generator=generator).to(device, torch.bfloat16)
    weights = torch.rand(num_tokens, options.topk, generator=generator).to(device)
    return Batch(rows, ids, weights)


class Calls:
    """The calls of one number of tokens. A dispatch returns the slab that its combine needs."""

    def __init__(self, options: argparse.Namespace, batch: Batch, device: torch.device) -> None:
        exchange = FerryLatency if options.api == "ferry" else DeepEpLatency
        self._exchange: LatencyExchange = exchange(options, device, len(batch.rows))
        self._exchange.use(len(batch.rows), options.split)
        self._batch = batch

    def dispatch(self, iteration: int) -> Slab:
        return self._exchange.dispatch(self._batch.rows, self._batch.ids[iteration], self._batch.weights)

    def combine(self, iteration: int, slab: Slab) -> torch.Tensor:
        ids, weights = self._batch.ids[iteration], self._batch.weights
        return self._exchange.combine(self._exchange.outputs, ids, weights, slab)

    def destroy(self) -> None:
        self._exchange.destroy()


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(us: list[float], device: torch.device) -> list[float]:
    slowest = torch.tensor(us, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def _wall_us(call: Callable[[int], Any], iterations: int, device: torch.device) -> float:
    for iteration in range(min(_WARM_UP, iterations)):
        call(iteration)
    finish(device)
    dist.barrier()
    begin = time.perf_counter()
    for iteration in range(iterations):
        call(iteration)
    finish(device)
    return (time.perf_counter() - begin) / iterations * _US_PER_S


def _host_us(calls: Calls, iterations: int, device: torch.device) -> list[float]:
    """Median host time of a dispatch and of a combine."""
    times: tuple[list[float], list[float]] = ([], [])
    for iteration in range(iterations):
        finish(device)
        begin = time.perf_counter()
        dispatched = calls.dispatch(iteration)
        times[0].append((time.perf_counter() - begin) * _US_PER_S)
        finish(device)
        begin = time.perf_counter()
        calls.combine(iteration, dispatched)
        times[1].append((time.perf_counter() - begin) * _US_PER_S)
    finish(device)
    return [statistics.median(of_call) for of_call in times]


def _graph_pair_us(pair: Callable[[int], Any], iterations: int, device: torch.device) -> float:
    """A pair in a replayed graph of many. Only for GPUs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [pair(number % iterations) for number in range(_GRAPH_PAIRS)]
    graph.replay()
    finish(device)
    dist.barrier()
    begin = time.perf_counter()
    graph.replay()
    finish(device)
    elapsed_us = (time.perf_counter() - begin) / _GRAPH_PAIRS * _US_PER_S
    del kept
    return elapsed_us


def measure_latency(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Collective. One result for each number of tokens."""
    results = []
    for num_tokens in options.tokens:
        batch = draw(options, num_tokens, device)
        calls = Calls(options, batch, device)

        def pair(iteration: int, calls: Calls = calls) -> torch.Tensor:
            return calls.combine(iteration, calls.dispatch(iteration))

        dispatched = calls.dispatch(0)
        wall_us = [
            _wall_us(calls.dispatch, options.iterations, device),
            _wall_us(lambda _, calls=calls, of=dispatched: calls.combine(0, of), options.iterations, device),
            _wall_us(pair, options.iterations, device),
        ]
        dispatch_us, combine_us, pair_us = slowest(wall_us, device)
        host_us = slowest(_host_us(calls, options.iterations, device), device)
        graph_us = None
        if device.type == "cuda":
            (graph_us,) = slowest([_graph_pair_us(pair, options.iterations, device)], device)
        kernels = None
        if options.kernel_times:
            kernels = {
                "dispatch": measure_kernels(calls.dispatch, options.iterations, device),
                "combine": measure_kernels(
                    lambda _, calls=calls, of=dispatched: calls.combine(0, of), options.iterations, device
                ),
            }
            times = slowest([of_call["call_us"] for of_call in kernels.values()], device)
            for of_call, us in zip(kernels.values(), times, strict=True):
                of_call["call_us"] = us
        results.append(
            {
                "tokens": num_tokens,
                "dispatch_us": dispatch_us,
                "combine_us": combine_us,
                "pair_us": pair_us,
                "graph_pair_us": graph_us,
                "kernel_times": kernels,
                "host_us": dict(zip(("dispatch", "combine"), host_us, strict=True)),
            }
        )
        calls.destroy()
    return results
