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
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ferry

APIS = ("ferry", "deep_ep")
DTYPES = ("bf16", "fp8")
_WARM_UP = 20
_US_PER_S = 1e6
_BLOCK = 128
_BUFFER_BYTES = 1 << 28  # of DeepEP's own buffers, if it is that package which is installed; Ferry's grow as needed


class Batch(NamedTuple):
    """Payload of one rank. ``ids`` and ``weights`` are of one iteration each."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    ids: list[torch.Tensor]
    weights: torch.Tensor
    outputs: torch.Tensor
    """More rows [.., H] bf16 than any dispatch can bring: the experts' outputs."""


Done = Callable[[str], None]
"""Called with the name of a call that has returned."""


class Layer(NamedTuple):
    """The exchange of a layer, as programs call it."""

    run: Callable[[Batch, int, Done], torch.Tensor]
    again: Callable[[Batch, Done], None]
    """A cached dispatch of the last routing."""
    destroy: Callable[[], None]


def _ignore(_: str) -> None: ...


def _draw(options: argparse.Namespace, num_tokens: int, device: torch.device) -> Batch:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    ids = []
    for _ in range(options.iterations):
        scores = torch.rand(num_tokens, options.experts, generator=generator)
        ids.append(scores.topk(options.topk, dim=1).indices.to(device))
    rows = torch.randn(num_tokens, options.hidden, generator=generator).to(device, torch.bfloat16)
    scales = None
    if options.dtype == "fp8":
        rows = rows.to(torch.float8_e4m3fn)
        scales = torch.ones(num_tokens, options.hidden // _BLOCK, device=device)
    weights = torch.rand(num_tokens, options.topk, generator=generator).to(device)
    outputs = torch.randn(num_tokens * num_ranks, options.hidden, generator=generator).to(device, torch.bfloat16)
    return Batch(rows, scales, ids, weights, outputs)


def _ferry_layer(options: argparse.Namespace, device: torch.device) -> Layer:
    group = ferry.Group(dist.group.WORLD, device=device, ranks_per_node=options.ranks_per_node)
    last: ferry.Routing | None = None

    def run(batch: Batch, iteration: int, done: Done) -> torch.Tensor:
        nonlocal last
        last = group.route(batch.ids[iteration], batch.weights, num_experts=options.experts)
        done("route")
        received = group.dispatch(last, batch.rows, scales=batch.scales)
        done("dispatch")
        outputs = batch.outputs[: len(received.x)]
        done("")
        combined = group.combine(last, outputs, weights=received.topk_weights).x
        done("combine")
        return combined

    def again(batch: Batch, done: Done) -> None:
        group.dispatch(last, batch.rows, scales=batch.scales, tables=False)
        done("cached dispatch")

    return Layer(run, again, group.destroy)


def own_arguments(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Arguments that only this deep_ep's constructors take, where they are needed: others measure the same program."""
    arguments: dict[str, Any] = {} if device.type == "cuda" else {"device": device}
    return arguments | ({"ranks_per_node": options.ranks_per_node} if options.ranks_per_node else {})


def _deep_ep_layer(options: argparse.Namespace, device: torch.device) -> Layer:
    import deep_ep  # not needed for anything else here

    buffer = deep_ep.Buffer(dist.group.WORLD, _BUFFER_BYTES, 0, **own_arguments(options, device))
    last: Any = None

    def run(batch: Batch, iteration: int, done: Done) -> torch.Tensor:
        nonlocal last
        ids = batch.ids[iteration]
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, options.experts)
        done("layout")
        x = batch.rows if batch.scales is None else (batch.rows, batch.scales)
        _, _, weights, _, last, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=batch.weights,
        )
        done("dispatch")
        outputs = batch.outputs[: len(weights)]
        done("")
        combined = buffer.combine(outputs, last, topk_weights=weights)[0]
        done("combine")
        return combined

    def again(batch: Batch, done: Done) -> None:
        buffer.dispatch(batch.rows if batch.scales is None else (batch.rows, batch.scales), handle=last)
        done("cached dispatch")

    return Layer(run, again, getattr(buffer, "destroy", lambda: None))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wall_us(layer: Layer, batch: Batch, iterations: int, device: torch.device) -> float:
    """Time of an iteration on the slowest rank."""

    for iteration in range(min(_WARM_UP, iterations)):
        layer.run(batch, iteration, _ignore)
    _finish(device)
    dist.barrier()
    begin = time.perf_counter()
    for iteration in range(iterations):
        layer.run(batch, iteration, _ignore)
    _finish(device)
    elapsed = torch.tensor([(time.perf_counter() - begin) / iterations * _US_PER_S], device=device)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


def _host_us(layer: Layer, batch: Batch, iterations: int, device: torch.device) -> dict[str, float]:
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
        layer.run(batch, iteration, done)
        _finish(device)
        done("")
        layer.again(batch, done)
    medians = torch.tensor([statistics.median(of_call) for of_call in times.values()], device=device)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(times, medians.tolist(), strict=True))


def measure_layers(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Collective. One result for each number of tokens."""
    layer = (_ferry_layer if options.api == "ferry" else _deep_ep_layer)(options, device)
    results = []
    for num_tokens in options.tokens:
        batch = _draw(options, num_tokens, device)
        wall_us = _wall_us(layer, batch, options.iterations, device)
        host_us = _host_us(layer, batch, options.iterations, device)
        results.append({"tokens": num_tokens, "layer_us": wall_us, "host_us": host_us})
    layer.destroy()
    return results
