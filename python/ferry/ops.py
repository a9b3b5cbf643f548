"""Dispatch and combine as operators that torch.compile can put into a graph.

    handle = ferry.ops.route(topk_idx, topk_weights, group.key, num_experts=256)
    rows, idx, weights = ferry.ops.dispatch(handle, x, topk_weights)
    out = ferry.ops.combine(handle, y, len(x))

They do the same as the methods of :class:`ferry.Group`, with gradients. Eager code should use those methods or
:mod:`ferry.nn`. All ranks must make the same calls in the same order, compiled or not.
"""

from __future__ import annotations

import torch

from ferry._errors import InvalidArgument
from ferry._group import Group, group_of
from ferry._placement import placement_of
from ferry._routing import Routing

__all__ = ["combine", "dispatch", "expert_row_offsets", "route"]

_LINK = "_ferry_routing"


def _routing_of(handle: torch.Tensor, operation: str) -> Routing[Group]:
    """A handle's storage holds its routing, which lives as long as any tensor on it, including those kept for
    backward.
    """
    routing = getattr(handle.untyped_storage(), _LINK, None)
    if routing is None:
        raise InvalidArgument(
            f"{operation}: handle is not a tensor that ferry.ops.route returned (a copy will not do); pass that tensor"
        )
    return routing


@torch.library.custom_op("ferry::route", mutates_args=())
def route(
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    group: int,
    num_experts: int,
    layout: str = "tokens",
    expert_alignment: int = 1,
    max_recv_rows: int = 0,
    max_tokens: int = 0,
    placement: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :meth:`ferry.Group.route`. ``group`` is :attr:`ferry.Group.key`, ``placement``
    :attr:`ferry.Placement.key` or None; the caller keeps both objects. Returns an opaque handle for the operators here:
    pass the tensor itself, not a copy. Collective.
    """
    routing = group_of(group).route(
        topk_idx.contiguous(),
        None if topk_weights is None else topk_weights.contiguous(),
        num_experts=num_experts,
        layout=layout,
        expert_alignment=expert_alignment,
        max_recv_rows=max_recv_rows,
        max_tokens=max_tokens,
        placement=placement_of(placement),
    )
    handle = torch.empty(1, dtype=torch.uint8, device=topk_idx.device)
    setattr(handle.untyped_storage(), _LINK, routing)
    return handle


@route.register_fake
def _(
    topk_idx,
    topk_weights,
    group,
    num_experts,
    layout="tokens",
    expert_alignment=1,
    max_recv_rows=0,
    max_tokens=0,
    placement=None,
):
    return topk_idx.new_empty(1, dtype=torch.uint8)


@torch.library.custom_op("ferry::dispatch", mutates_args=())
def dispatch(
    handle: torch.Tensor,
    x: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    layout: str = "tokens",
    max_recv_rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :meth:`ferry.Group.dispatch`, with gaps cleared. Collective, and so is its backward.

    x: [T, H]. topk_weights: [T, K] f32, or None to send only rows. layout and max_recv_rows: as given to route.
    Returns rows [N, H]; where weights were sent, ids [N, K] i64 (layout "tokens") and weights [N, K] or [N] f32; empty
    tensors for absent results.
    """
    what = "ferry.ops.dispatch"
    routing = _routing_of(handle, what)
    if layout != routing.layout or max_recv_rows not in (0, routing.num_recv_rows):
        raise InvalidArgument(
            f"{what}: layout is {layout!r} and max_recv_rows {max_recv_rows}; route was given {routing.layout!r}, and "
            f"there are {routing.num_recv_rows} rows"
        )
    has_weights = topk_weights is not None
    received = routing.group.dispatch(
        routing,
        x.contiguous(),
        topk_weights=topk_weights.contiguous() if has_weights else None,
        tables=has_weights,
        zero_padding=True,
    )
    idx = received.topk_idx if received.topk_idx is not None else x.new_empty(0, dtype=torch.int64)
    weights = received.topk_weights if has_weights else x.new_empty(0, dtype=torch.float32)
    return received.x, idx, weights


@dispatch.register_fake
def _(handle, x, topk_weights=None, layout="tokens", max_recv_rows=0):
    rows = max_recv_rows if max_recv_rows > 0 else torch.library.get_ctx().new_dynamic_size()
    idx = x.new_empty(0, dtype=torch.int64)
    weights = x.new_empty(0, dtype=torch.float32)
    if topk_weights is not None and layout == "tokens":
        idx = x.new_empty(rows, topk_weights.shape[1], dtype=torch.int64)
        weights = topk_weights.new_empty(rows, topk_weights.shape[1])
    elif topk_weights is not None:
        weights = topk_weights.new_empty(rows)
    return x.new_empty(rows, x.shape[1]), idx, weights


@torch.library.custom_op("ferry::combine", mutates_args=())
def _combine(
    handle: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
    weights: torch.Tensor | None,
    num_topk: int,
    layout: str,
    max_recv_rows: int,
    wire_format: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    routing = _routing_of(handle, "ferry.ops.combine")
    if num_tokens != routing.num_tokens:
        raise InvalidArgument(
            f"ferry.ops.combine: num_tokens is {num_tokens}, but {routing.num_tokens} tokens were routed"
        )
    weights = None if weights is None else weights.contiguous()
    combined = routing.group.combine(routing, y.contiguous(), weights=weights, wire_format=wire_format)
    sums = combined.weights if combined.weights is not None else y.new_empty(0, dtype=torch.float32)
    return combined.x, sums


@_combine.register_fake
def _(handle, y, num_tokens, weights, num_topk, layout, max_recv_rows, wire_format=None):
    sums = y.new_empty(0, dtype=torch.float32)
    if weights is not None:
        sums = weights.new_empty(num_tokens, num_topk)
    return y.new_empty(num_tokens, y.shape[1]), sums


def combine(
    handle: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
    layout: str = "tokens",
    max_recv_rows: int = 0,
    wire_format: str | None = None,
) -> torch.Tensor:
    """As :meth:`ferry.Group.combine`: y [N, H] -> [T, H], T being ``num_tokens``. Collective, and so is its backward.

    layout and max_recv_rows as given to route. wire_format: as for :func:`ferry.nn.combine`.
    """
    return _combine(handle, y, num_tokens, None, 0, layout, max_recv_rows, wire_format)[0]


@torch.library.custom_op("ferry::expert_row_offsets", mutates_args=())
def expert_row_offsets(handle: torch.Tensor, num_local_experts: int) -> torch.Tensor:
    """[L + 1] i64 on the group's device: :attr:`ferry.Routing.expert_row_offsets`. Local."""
    offsets = _routing_of(handle, "ferry.ops.expert_row_offsets").expert_row_offsets_tensor.clone()
    if len(offsets) != num_local_experts + 1:
        raise InvalidArgument(
            f"ferry.ops.expert_row_offsets: num_local_experts is {num_local_experts}, expected {len(offsets) - 1}"
        )
    return offsets


@expert_row_offsets.register_fake
def _(handle, num_local_experts):
    return handle.new_empty(num_local_experts + 1, dtype=torch.int64)


def _keep_dispatch(ctx, inputs, output) -> None:
    handle, x, topk_weights, layout, max_recv_rows = inputs
    _, idx, _ = output
    ctx.mark_non_differentiable(idx)
    ctx.save_for_backward(handle, idx)
    ctx.options = (x.shape[0], None if topk_weights is None else topk_weights.shape[1], layout, max_recv_rows)


def _dispatch_backward(ctx, grad_x, _, grad_weights):
    handle, idx = ctx.saved_tensors
    num_tokens, num_topk, layout, max_recv_rows = ctx.options
    if num_topk is None:
        return None, _combine(handle, grad_x, num_tokens, None, 0, layout, max_recv_rows)[0], None, None, None
    if layout == "tokens":
        # Weights of experts on other ranks were constants here, whatever the program did with them.
        grad_weights = grad_weights.masked_fill(idx < 0, 0.0)
    x, weights = _combine(handle, grad_x, num_tokens, grad_weights, num_topk, layout, max_recv_rows)
    return None, x, weights, None, None


def _keep_combine(ctx, inputs, output) -> None:
    handle, _, _, weights, _, layout, max_recv_rows, _ = inputs
    ctx.save_for_backward(handle)
    ctx.options = (weights is not None, layout, max_recv_rows)


def _combine_backward(ctx, grad, grad_sums):
    has_weights, layout, max_recv_rows = ctx.options
    sent = grad_sums if has_weights else None  # a combine with weights is itself the gradient of a dispatch
    rows, _, weights = dispatch(ctx.saved_tensors[0], grad, sent, layout, max_recv_rows)
    return None, rows, None, weights if has_weights else None, None, None, None, None


dispatch.register_autograd(_dispatch_backward, setup_context=_keep_dispatch)
_combine.register_autograd(_combine_backward, setup_context=_keep_combine)
