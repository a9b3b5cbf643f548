"""The wall time of a layer's exchange as programs call it: a new route, a dispatch, a combine, nothing cached.

Through ``deep_ep`` that is ``get_dispatch_layout``, a new ``dispatch`` with ids and weights, and ``combine`` with
weights, as programs written for DeepEP call them; through ``ferry`` it is ``route``, ``dispatch`` and ``combine``. The
experts' outputs are ordinary tensors. Each iteration has other ids; between the first and the last of them the host
waits only where the calls do.

Also what each call costs on the host, with an idle GPU before the layer; a new route and what waits for it includes the
wait for the counts of all ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from exchanges import DeepEp, Done, Exchange, Ferry, Rows, ignore, random_ids

APIS = ("ferry", "deep_ep")
DTYPES = ("bf16", "fp8")
_WARM_UP = 20
_US_PER_S = 1e6
_BLOCK = 128


class Batch(NamedTuple):
    """Payload of one rank. ``ids`` and ``weights`` are of one iteration each."""

    rows: Rows
    ids: list[torch.Tensor]
    weights: torch.Tensor
    outputs: torch.Tensor
    """More rows [.., H] bf16 than any dispatch can bring: the experts' outputs."""


def _draw(options: argparse.Namespace, num_tokens: int, device: torch.device) -> Batch:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    ids = random_ids(generator, options.iterations, num_tokens, options.experts, options.topk, device)
    rows = torch.randn(num_tokens, options.hidden, generator=generator).to(device, torch.bfloat16)
    scales = None
    if options.dtype == "fp8":
        rows = rows.to(torch.float8_e4m3fn)
        scales = torch.ones(num_tokens, options.hidden // _BLOCK, device=device)
    weights = torch.rand(num_tokens, options.topk, generator=generator).to(device)
    outputs = torch.randn(num_tokens * num_ranks, options.hidden, generator=generator).to(device, torch.bfloat16)
    return Batch(Rows(rows, scales), ids, weights, outputs)


def _run(exchange: Exchange, batch: Batch, iteration: int, done: Done = ignore) -> torch.Tensor:
    received = exchange.new(batch.rows, batch.ids[iteration], batch.weights, done)
    outputs = batch.outputs[: len(received.rows.x)]
    done("")
    combined = exchange.combine(outputs, received.topk_weights)
    done("combine")
    return combined


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wall_us(exchange: Exchange, batch: Batch, iterations: int, device: torch.device) -> float:
    """Time of an iteration on the slowest rank."""

    for iteration in range(min(_WARM_UP, iterations)):
        _run(exchange, batch, iteration)
    _finish(device)
    dist.barrier()
    begin = time.perf_counter()
    for iteration in range(iterations):
        _run(exchange, batch, iteration)
    _finish(device)
    elapsed = torch.tensor([(time.perf_counter() - begin) / iterations * _US_PER_S], device=device)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


def _host_us(exchange: Exchange, batch: Batch, iterations: int, device: torch.device) -> dict[str, float]:
    """Median host time of each call, of the slowest rank."""
    times: dict[str, list[float]] = {}
    begin = 0.0

    def done(call: str) -> None:
        nonlocal begin
        end = time.perf_counter()
        if call:
            times.setdefault(call, []).append((end - begin) * _US_PER_S)
        begin = time.perf_counter()

    for iteration in range(iterations):
        _finish(device)
        done("")
        _run(exchange, batch, iteration, done)
        _finish(device)
        done("")
        exchange.again(batch.rows)
        done("cached dispatch")
    medians = torch.tensor([statistics.median(of_call) for of_call in times.values()], device=device)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(times, medians.tolist(), strict=True))


def measure_layers(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Collective. One result for each number of tokens."""
    exchange = (Ferry if options.api == "ferry" else DeepEp)(options, device)
    results = []
    for num_tokens in options.tokens:
        batch = _draw(options, num_tokens, device)
        wall_us = _wall_us(exchange, batch, options.iterations, device)
        host_us = _host_us(exchange, batch, options.iterations, device)
        results.append({"tokens": num_tokens, "layer_us": wall_us, "host_us": host_us})
    exchange.destroy()
    return results
