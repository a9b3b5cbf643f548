"""Host time of each call, with routes and handles that are kept: no call waits for another rank's counts.

Before each call the host waits for the GPU. Medians, of the slowest rank. On CPUs a call also moves the rows, and waits
for the other ranks, so that only calls of few tokens show host time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bench_latency import Batch, Calls, draw, finish, slowest
from exchanges import own_arguments

import ferry

_WARM_UP = 20
_US_PER_S = 1e6

Named = dict[str, Callable[[], Any]]


def _ferry(options: argparse.Namespace, batch: Batch, device: torch.device) -> tuple[Named, Callable[[], None]]:
    group = ferry.Group(dist.group.WORLD, device=device, ranks_per_node=options.ranks_per_node)
    routing = group.route(batch.ids[0], batch.weights, num_experts=options.experts)
    out = group.dispatch(routing, batch.rows, tables=False).x
    sums = torch.empty_like(batch.rows)
    named = {
        "dispatch, outputs given": lambda: group.dispatch(routing, batch.rows, out=out, tables=False),
        "dispatch": lambda: group.dispatch(routing, batch.rows, tables=False),
        "combine, outputs given": lambda: group.combine(routing, out, out=sums),
        "combine": lambda: group.combine(routing, out),
    }
    return named, group.destroy


def _deep_ep(options: argparse.Namespace, batch: Batch, device: torch.device) -> tuple[Named, Callable[[], None]]:
    import deep_ep  # not needed for anything else here

    own = own_arguments(options, device)
    buffer = deep_ep.Buffer(dist.group.WORLD, **own)
    elastic = deep_ep.ElasticBuffer(
        dist.group.WORLD, num_max_tokens_per_rank=len(batch.rows), hidden=options.hidden, **own
    )
    ids = batch.ids[0]
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, options.experts)
    rows, _, _, _, handle, _ = buffer.dispatch(
        batch.rows,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=batch.weights,
    )
    new = {"num_experts": options.experts, "do_cpu_sync": False}
    elastic_rows, _, _, elastic_handle, _ = elastic.dispatch(batch.rows, ids, batch.weights, **new)
    expanded = {"do_expand": True, **new}
    expert_rows, _, _, expanded_handle, _ = elastic.dispatch(batch.rows, ids, batch.weights, **expanded)

    def destroy() -> None:
        buffer.destroy()
        elastic.destroy()

    named = {
        "layout": lambda: buffer.get_dispatch_layout(ids, options.experts),
        "dispatch": lambda: buffer.dispatch(batch.rows, handle=handle),
        "combine": lambda: buffer.combine(rows, handle),
        "elastic new dispatch, bounded rows": lambda: elastic.dispatch(batch.rows, ids, batch.weights, **new),
        "elastic dispatch": lambda: elastic.dispatch(batch.rows, handle=elastic_handle),
        "elastic combine": lambda: elastic.combine(elastic_rows, elastic_handle),
        "expanded new dispatch, bounded rows": lambda: elastic.dispatch(batch.rows, ids, batch.weights, **expanded),
        "expanded dispatch": lambda: elastic.dispatch(batch.rows, handle=expanded_handle),
        "expanded combine": lambda: elastic.combine(expert_rows, expanded_handle),
    }
    return named, destroy


def _host_us(call: Callable[[], Any], iterations: int, device: torch.device) -> float:
    """The median of a call on this rank."""
    times = []
    for _ in range(_WARM_UP + iterations):
        finish(device)
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * _US_PER_S)
    finish(device)
    return statistics.median(times[_WARM_UP:])


def _latency(calls: Calls) -> Named:
    dispatched = calls.dispatch(0)
    return {
        "latency dispatch": lambda: calls.dispatch(0),
        "latency combine": lambda: calls.combine(0, dispatched),
    }


def measure_host_time(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Collective. One result for each number of tokens."""
    results = []
    is_ferry = options.api == "ferry"
    one_batch = argparse.Namespace(**{**vars(options), "iterations": 1})
    for num_tokens in options.tokens:
        batch = draw(one_batch, num_tokens, device)
        named, destroy = (_ferry if is_ferry else _deep_ep)(options, batch, device)
        calls = Calls(options, batch, device)
        named |= _latency(calls)
        host_us = slowest([_host_us(call, options.iterations, device) for call in named.values()], device)
        results.append({"tokens": num_tokens, "host_us": dict(zip(named, host_us, strict=True))})
        calls.destroy()
        destroy()
    return results
