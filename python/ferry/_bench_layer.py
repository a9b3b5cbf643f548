"""The wall time of a layer's exchange as programs call it: a new route, a dispatch, a combine, nothing cached.

Through ``deep_ep`` that is ``get_dispatch_layout``, a new ``dispatch`` with ids and weights, and ``combine`` with
weights, as programs written for DeepEP call them; through ``ferry`` it is ``route``, ``dispatch`` and ``combine``. The
experts' outputs are ordinary tensors. Each iteration has other ids; between the first and the last of them the host
waits only where the calls do.
"""

from __future__ import annotations

import argparse
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
    """What one rank sends. ``ids`` and ``weights`` are of one iteration each."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    ids: list[torch.Tensor]
    weights: torch.Tensor
    outputs: torch.Tensor
    """More rows [.., H] bf16 than any dispatch can bring: the experts' outputs."""


Layer = Callable[[Batch, int], torch.Tensor]


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


def _ferry_layer(options: argparse.Namespace, device: torch.device) -> tuple[Layer, Callable[[], None]]:
    group = ferry.Group(dist.group.WORLD, device=device)

    def layer(batch: Batch, iteration: int) -> torch.Tensor:
        routing = group.route(batch.ids[iteration], batch.weights, num_experts=options.experts)
        received = group.dispatch(routing, batch.rows, scales=batch.scales)
        outputs = batch.outputs[: len(received.x)]
        return group.combine(routing, outputs, weights=received.topk_weights).x

    return layer, group.destroy


def _deep_ep_layer(options: argparse.Namespace, device: torch.device) -> tuple[Layer, Callable[[], None]]:
    import deep_ep  # not needed for anything else here

    on_gpu = device.type == "cuda"
    buffer = deep_ep.Buffer(dist.group.WORLD, _BUFFER_BYTES, 0, **({} if on_gpu else {"device": device}))

    def layer(batch: Batch, iteration: int) -> torch.Tensor:
        ids = batch.ids[iteration]
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, options.experts)
        x = batch.rows if batch.scales is None else (batch.rows, batch.scales)
        _, _, weights, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=batch.weights,
        )
        return buffer.combine(batch.outputs[: len(weights)], handle, topk_weights=weights)[0]

    return layer, getattr(buffer, "destroy", lambda: None)


def _wall_us(layer: Layer, batch: Batch, iterations: int, device: torch.device) -> float:
    """Time of an iteration on the slowest rank."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for iteration in range(min(_WARM_UP, iterations)):
        layer(batch, iteration)
    finish()
    dist.barrier()
    begin = time.perf_counter()
    for iteration in range(iterations):
        layer(batch, iteration)
    finish()
    elapsed = torch.tensor([(time.perf_counter() - begin) / iterations * _US_PER_S], device=device)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


def measure_layers(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Collective. One result for each number of tokens."""
    make = _ferry_layer if options.api == "ferry" else _deep_ep_layer
    layer, destroy = make(options, device)
    results = []
    for num_tokens in options.tokens:
        batch = _draw(options, num_tokens, device)
        results.append({"tokens": num_tokens, "layer_us": _wall_us(layer, batch, options.iterations, device)})
    destroy()
    return results
