"""Small steps of a client that the tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ranks import device_of
from world import World

import deep_ep
from deep_ep._steps import Steps


def make_buffer(rank: int, kind: str, **options: Any) -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, device=device_of(rank, kind), **options)


def make_elastic(rank: int, kind: str, **options: Any) -> deep_ep.ElasticBuffer:
    shape = {"num_max_tokens_per_rank": 32, "hidden": 64} | options
    return deep_ep.ElasticBuffer(dist.group.WORLD, device=device_of(rank, kind), **shape)


def make_ep(rank: int, kind: str, **options: Any) -> deep_ep.EPBuffer:
    shape = {"num_max_tokens_per_rank": 32, "hidden": 64} | options
    return deep_ep.EPBuffer(dist.group.WORLD, device=device_of(rank, kind), **shape)


class Deferring:
    """An EPBuffer whose calls return what they return without ``defer_epilogue``."""

    def __init__(self, buffer: deep_ep.EPBuffer) -> None:
        self._buffer = buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def dispatch(self, *arguments: Any, **options: Any) -> tuple:
        return self._waited(self._buffer.dispatch, arguments, options)

    def combine(self, *arguments: Any, **options: Any) -> tuple:
        return self._waited(self._buffer.combine, arguments, options)

    def _waited(self, call: Any, arguments: tuple, options: dict[str, Any]) -> tuple:
        event = call(*arguments, **options, async_with_compute_stream=True, defer_epilogue=True)
        assert isinstance(event, deep_ep.EventOverlap) and event.event is not None
        return *event.wait(), deep_ep.EventOverlap()


def make_deferring(rank: int, kind: str, **options: Any) -> Deferring:
    return Deferring(make_ep(rank, kind, **options))


class Inputs(NamedTuple):
    x: torch.Tensor
    idx: torch.Tensor
    weights: torch.Tensor


def inputs_of(world: World, rank: int, device: torch.device) -> Inputs:
    return Inputs(world.x[rank].to(device), world.topk_idx[rank].to(device), world.topk_weights[rank].to(device))


def layout_of(buffer: deep_ep.Buffer, idx: torch.Tensor, num_experts: int) -> dict[str, Any]:
    """The arguments of dispatch that come from get_dispatch_layout."""
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, num_experts)
    assert event.event is None
    return {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
    }


def dispatch(buffer: deep_ep.Buffer, world: World, mine: Inputs, **options: Any) -> tuple:
    layout = layout_of(buffer, mine.idx, world.num_experts)
    return buffer.dispatch(mine.x, topk_idx=mine.idx, topk_weights=mine.weights, **layout, **options)


@contextmanager
def tensors_read() -> Iterator[list[torch.Size]]:
    """Shapes of the tensors that native calls say they read."""
    reads, shapes = Steps.reads, []

    def noted(steps: Steps, tensor: torch.Tensor) -> None:
        shapes.append(tensor.shape)
        reads(steps, tensor)

    Steps.reads = noted
    try:
        yield shapes
    finally:
        Steps.reads = reads


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert (left.shape, left.stride(), left.dtype, left.device) == (
            right.shape,
            right.stride(),
            right.dtype,
            right.device,
        )
        left, right = (one.clone(memory_format=torch.contiguous_format) for one in (left, right))
        assert left.view(torch.uint8).equal(right.view(torch.uint8))
    elif isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right):
            assert_same(one, other)
    else:
        assert left == right
