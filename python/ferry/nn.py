"""Dispatch and combine with gradients, and a layer built on them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ferry import ops
from ferry._errors import InvalidArgument
from ferry._group import Group
from ferry._placement import Placement
from ferry._quantize import WireFormat
from ferry._routing import Routing

__all__ = ["ExpertParallel", "combine", "dispatch"]


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Contiguous tensor. Anything but a tensor is left as it is: the group's call refuses it, on all ranks."""
    return tensor.contiguous() if isinstance(tensor, torch.Tensor) else tensor


def _ends_recomputation(error: Exception) -> bool:
    """Whether activation checkpointing raised it: checkpointing runs a layer again and stops, on all ranks alike, as
    soon as it has the tensors that backward needs. No rank combines then.
    """
    checkpoint = sys.modules.get("torch.utils.checkpoint")
    return isinstance(error, getattr(checkpoint, "_StopRecomputationError", ()))


# Each is the other's transpose, and its backward applies the other, so that gradients have gradients, too.
class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        routing: Routing[Group],
        x: torch.Tensor,
        topk_weights: torch.Tensor | None,
        tables: bool,
        num_sms: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        # Gaps are cleared: if an expert's output for them were NaN, gradients would be NaN too.
        received = routing.group.dispatch(
            routing,
            _contiguous(x),
            topk_weights=_contiguous(topk_weights),
            tables=tables,
            zero_padding=True,
            num_sms=num_sms,
        )
        ctx.routing, ctx.num_sms = routing, num_sms
        ctx.has_weights = received.topk_weights is not None and topk_weights is not None
        if ctx.has_weights and received.topk_idx is not None:
            ctx.save_for_backward(received.topk_idx)
        if received.topk_idx is not None:
            ctx.mark_non_differentiable(received.topk_idx)
        return received.x, received.topk_idx, received.topk_weights

    @staticmethod
    def backward(
        ctx: Any, grad_x: torch.Tensor, _: Any, grad_weights: torch.Tensor | None
    ) -> tuple[None, torch.Tensor, torch.Tensor | None, None, None]:
        weights = grad_weights if ctx.has_weights else None
        if ctx.has_weights and ctx.saved_tensors:
            # Weights of experts on other ranks were constants here, in whatever way the program used them.
            weights = weights.masked_fill(ctx.saved_tensors[0] < 0, 0.0)
        sums, summed_weights = _Combine.apply(ctx.routing, grad_x, weights, ctx.num_sms)
        return None, sums, summed_weights, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        routing: Routing[Group],
        y: torch.Tensor,
        weights: torch.Tensor | None,
        num_sms: int,
        wire_format: WireFormat | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.routing, ctx.num_sms, ctx.has_weights = routing, num_sms, weights is not None
        combined = routing.group.combine(
            routing, _contiguous(y), weights=_contiguous(weights), num_sms=num_sms, wire_format=wire_format
        )
        return combined.x, combined.weights

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor, grad_weights: torch.Tensor | None
    ) -> tuple[None, torch.Tensor, torch.Tensor | None, None, None]:
        weights = grad_weights if ctx.has_weights else None
        rows, _, received_weights = _Dispatch.apply(ctx.routing, grad, weights, ctx.has_weights, ctx.num_sms)
        return None, rows, received_weights, None, None


def dispatch(
    routing: Routing[Group], x: torch.Tensor, topk_weights: torch.Tensor | None = None, *, num_sms: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """As :meth:`ferry.Group.dispatch`, with gradients to ``x`` (bf16 or f32) and ``topk_weights``. Collective, and so
    is its backward, which has the same ``num_sms``.

    Returns the received rows [N, H], local expert ids (layout "tokens", else None) and weights. Rows without a token
    are zero.
    """
    return _Dispatch.apply(routing, x, topk_weights, True, num_sms)


def combine(
    routing: Routing[Group], y: torch.Tensor, *, num_sms: int = 0, wire_format: WireFormat | None = None
) -> torch.Tensor:
    """The sum of each token's rows, with a gradient to ``y``. Collective, and so is its backward, which has the same
    ``num_sms``.

    wire_format: see :meth:`ferry.Group.combine`. Gradients are not quantised: they are those of the sum of the rows as
    given, as if quantising were the identity.
    """
    return _Combine.apply(routing, y, None, num_sms, wire_format)[0]


class ExpertParallel(torch.nn.Module):
    """Sends tokens to the experts of all ranks and returns the weighted sum of their outputs.

    group: the ranks; num_experts: E of all ranks together; expert_alignment: rows of each expert are padded (with
    zeros) to a multiple of this, as grouped matrix products require.
    host_offsets: ``experts`` receives Python integers, for which the host waits; otherwise a tensor on the group's
    device, and torch.compile needs no graph break.
    max_recv_rows: see :meth:`ferry.Group.route`; with it and without host_offsets the host never waits, over several
    nodes if max_tokens is given too.
    placement: homes of the experts, if some have several; :attr:`placement` may be set to another one, or None, between
    two steps (after backward, which may run forward again), on all ranks alike. ``experts`` is then about physical
    experts: those of this rank, in ascending order. A compiled function serves all placements with as many physical
    experts on this rank, and is compiled again for no placement.
    """

    def __init__(
        self,
        group: Group,
        num_experts: int,
        *,
        expert_alignment: int = 1,
        host_offsets: bool = True,
        max_recv_rows: int = 0,
        max_tokens: int = 0,
        placement: Placement | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.host_offsets = host_offsets
        self.max_recv_rows = max_recv_rows
        self.max_tokens = max_tokens
        self._group_key = group.key
        self.placement = placement

    @property
    def placement(self) -> Placement | None:
        """Placement of the experts; None: each on one rank, in order."""
        return self._placement

    @placement.setter
    def placement(self, placement: Placement | None) -> None:
        group = self.group
        if placement is not None:
            # Before the first call, so that a compiled one need not look.
            group._calls.check_placement(placement, "ExpertParallel")
            num_local = placement.num_local_experts(group.rank, group.num_ranks)
        else:
            first = group.rank * self.num_experts // group.num_ranks
            num_local = (group.rank + 1) * self.num_experts // group.num_ranks - first
        self._placement = placement
        self._placement_key = None if placement is None else placement.key
        self._num_local_experts = num_local

    def forward(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        experts: Callable[[torch.Tensor, Any], torch.Tensor],
    ) -> torch.Tensor:
        """x: [T, H] bf16 or f32; topk_idx: [T, K] i32 or i64; topk_weights: [T, K] f32.

        ``experts(rows, offsets)`` gets this rank's rows [N, H], grouped by local expert: those of expert ``l`` are
        ``rows[offsets[l]:offsets[l + 1]]``. It returns as many rows. The result is [T, H].

        If ``experts`` raises on one rank, the layer raises that there and InvalidArgument on all others (on GPUs their
        next wait does), and the group stays usable. Not so inside a compiled function: there the others wait for that
        rank until they time out.
        """
        if torch.compiler.is_compiling():
            return self._compiled(x, topk_idx, topk_weights, experts)
        group = self.group
        if not isinstance(topk_weights, torch.Tensor):
            group._calls.refuse_route()
            raise InvalidArgument(
                f"ExpertParallel: topk_weights is a {type(topk_weights).__name__}, expected a torch.Tensor"
            )
        routing = group.route(
            topk_idx,
            topk_weights.detach(),
            num_experts=self.num_experts,
            layout="experts",
            expert_alignment=self.expert_alignment,
            max_recv_rows=self.max_recv_rows,
            max_tokens=self.max_tokens,
            placement=self._placement,
        )
        try:
            rows, _, weights = dispatch(routing, x, topk_weights)
        except Exception:
            if group.device.type != "cpu":  # the other ranks have no report of it yet, and combine
                group._calls.refuse_combine(group, routing)
            raise
        try:
            offsets = routing.expert_row_offsets if self.host_offsets else routing.expert_row_offsets_tensor
            y = experts(rows, offsets)
            weighted = (y * weights.unsqueeze(-1)).to(x.dtype)
        except Exception as error:
            if not _ends_recomputation(error):
                group._calls.refuse_combine(group, routing)
            raise
        return combine(routing, weighted)

    def _compiled(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        experts: Callable[[torch.Tensor, Any], torch.Tensor],
    ) -> torch.Tensor:
        layout, most = "experts", self.max_recv_rows
        handle = ops.route(
            topk_idx,
            topk_weights.detach(),
            self._group_key,
            self.num_experts,
            layout,
            self.expert_alignment,
            most,
            self.max_tokens,
            self._placement_key,
        )
        rows, _, weights = ops.dispatch(handle, x, topk_weights, layout, most)
        offsets = ops.expert_row_offsets(handle, self._num_local_experts)
        y = experts(rows, offsets.tolist() if self.host_offsets else offsets)
        return ops.combine(handle, (y * weights.unsqueeze(-1)).to(x.dtype), x.shape[0], layout, most)
