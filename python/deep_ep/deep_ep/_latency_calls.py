"""Dispatch and combine of latency mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import ferry
from deep_ep import _arguments as arguments
from deep_ep._latency_handles import ReceiveHook, attach, link_of
from deep_ep._member import Asked, Member
from deep_ep._statistics import check_expert_stats, check_wait_stats
from deep_ep._throughput import Payload
from deep_ep.utils.event import EventHandle, EventOverlap
from ferry import InvalidArgument, _native
from ferry._latency import Sent

Hook = Callable[[], None]

_DISPATCH, _COMBINE = "low_latency_dispatch", "low_latency_combine"


class DispatchOptions(NamedTuple):
    num_max_dispatch_tokens_per_rank: int
    num_experts: int
    expert_stats: torch.Tensor | None
    wait_stats: torch.Tensor | None
    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool
    return_recv_hook: bool


class CombineOptions(NamedTuple):
    use_logfmt: bool
    zero_copy: bool
    return_recv_hook: bool
    out: torch.Tensor | None
    wait_stats: torch.Tensor | None


def _end(event: Any) -> EventOverlap:
    return EventOverlap(EventHandle._of(event) if event is not None else None)


def _check_hook(what: str, return_recv_hook: bool, asked: Asked) -> None:
    if return_recv_hook and asked.asynchronous:
        raise InvalidArgument(f"{what}: async_finish and return_recv_hook are both True, expected at most one of them")


def _quantization(how: DispatchOptions) -> Any:
    if not how.use_fp8:
        return None
    if how.use_ue8m0 and not how.round_scale:
        raise InvalidArgument(f"{_DISPATCH}: use_ue8m0 is True and round_scale is False, expected True for both")
    return "fp8_ue8m0" if how.use_ue8m0 else "fp8_power_of_two" if how.round_scale else "fp8"


def dispatch(
    member: Member, x: torch.Tensor, topk_idx: torch.Tensor, how: DispatchOptions, asked: Asked
) -> tuple[Payload, torch.Tensor, tuple, EventOverlap, Hook | None]:
    with member.turn(_DISPATCH, ("latency_dispatch",), asked) as (turn, call):
        _check_hook(_DISPATCH, how.return_recv_hook, asked)
        device, most = member.device, how.num_max_dispatch_tokens_per_rank
        arguments.check_rows(x, f"{_DISPATCH}: x", device, torch.bfloat16)
        arguments.check_choice(topk_idx, None, _DISPATCH, x.shape[0], device)
        num_experts = arguments.check_num_experts(how.num_experts, _DISPATCH, member.num_ranks)
        check_expert_stats(how.expert_stats, _DISPATCH, num_experts // member.num_ranks, device)
        check_wait_stats(how.wait_stats, "dispatch_wait_recv_cost_stats", _DISPATCH, member.num_ranks, device)
        call.takes(x, topk_idx, how.expert_stats, how.wait_stats)
        sent = turn.latency_dispatch(
            x,
            topk_idx,
            num_experts=num_experts,
            max_tokens=most,
            quantize=_quantization(how),
            column_major_scales=True,
            split=bool(how.return_recv_hook),
            counters=ferry.LoadCounters(received=how.expert_stats),
            wait_times_ns=how.wait_stats,
        )
        rows = sent.x if sent.scales is None else (sent.x, sent.scales)
        tables = _native.latency_slab_tables(member.calls, sent.routing._native)
        handle, hook = _finish(member, sent.routing, tables, sent._sent, how, x)
        call.gives(rows, *tables)
    return rows, tables[0], handle, _end(call.event), hook


def _finish(
    member: Member,
    routing: ferry.Routing,
    tables: Sequence[torch.Tensor],
    sent: Sent | None,
    how: DispatchOptions,
    x: torch.Tensor,
) -> tuple[tuple, Hook | None]:
    """The handle and the hook of a dispatch. tables: counts, src_info, layout_range."""
    _, src_info, layout_range = tables
    attach(src_info, routing)
    member.keep_for_graph(routing)
    handle = (src_info, layout_range, how.num_max_dispatch_tokens_per_rank, x.shape[1], how.num_experts)
    if sent is not None:
        return handle, ReceiveHook(sent, routing.group)
    return handle, None


def combine(
    member: Member,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    handle: Any,
    how: CombineOptions,
    asked: Asked,
) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
    with member.turn(_COMBINE, ("latency_combine",), asked) as (turn, call):
        _check_hook(_COMBINE, how.return_recv_hook, asked)
        if how.use_logfmt:
            raise NotImplementedError(f"{_COMBINE}: use_logfmt=True is not implemented; rows are returned as bf16")
        device = member.device
        link = link_of(handle, _COMBINE, member.group)
        routing = link.routing
        shape = slab_shape(member, handle, routing)
        arguments.check_table(x, f"{_COMBINE}: x", device, torch.bfloat16, shape)
        tokens, num_topk = routing.num_tokens, routing.num_topk
        arguments.check_table(topk_idx, f"{_COMBINE}: topk_idx", device, torch.int64, (tokens, num_topk))
        arguments.check_table(topk_weights, f"{_COMBINE}: topk_weights", device, torch.float32, (tokens, num_topk))
        if how.out is not None:
            arguments.check_table(how.out, f"{_COMBINE}: out", device, torch.bfloat16, (tokens, shape[2]))
        check_wait_stats(how.wait_stats, "combine_wait_recv_cost_stats", _COMBINE, member.num_ranks, device)
        rows = x
        if how.zero_copy:
            rows = link.combine_memory
            if rows is None or tuple(rows.shape) != shape:
                raise InvalidArgument(
                    f"{_COMBINE}: zero_copy is True, but get_next_low_latency_combine_buffer was not called with this "
                    "handle; write the rows to what it returns first"
                )
        call.takes(rows, topk_weights, how.out, how.wait_stats)
        combined = turn.latency_combine(
            rows,
            routing,
            topk_weights,
            order="rank_sums",
            split=bool(how.return_recv_hook),
            out=how.out,
            wait_times_ns=how.wait_stats,
        )
        call.gives(combined.x)
    hook = ReceiveHook(combined._sent, member.group) if how.return_recv_hook else None
    return combined.x, _end(call.event), hook


def slab_shape(member: Member, handle: Any, routing: ferry.Routing) -> tuple[int, int, int]:
    """[L, R * M, hidden]; the handle's ``hidden``, which programs replace where rows change their width in between."""
    hidden = arguments.check_size(handle[3], "handle[3] (hidden)")
    num_local = routing.num_experts // member.num_ranks
    return num_local, routing.num_recv_rows // num_local, hidden
