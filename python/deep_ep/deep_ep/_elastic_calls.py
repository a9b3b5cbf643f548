"""Dispatch and combine of the second generation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import ferry
from deep_ep import _arguments as arguments
from deep_ep._ep_handle import EPHandle
from deep_ep._member import Asked, Member, Turn
from deep_ep._previous_event import event_of
from deep_ep._statistics import check_expert_stats
from deep_ep._streams import Call
from deep_ep._throughput import Payload
from deep_ep.utils.event import EventHandle, EventOverlap
from ferry import InvalidArgument, _native

Dispatched = tuple[Payload, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]


class DispatchOptions(NamedTuple):
    """Requested form of the rows of a new or a cached dispatch."""

    topk_weights: torch.Tensor | None
    zero_padding: bool
    column_major_scales: bool
    before_epilogue: Any


class RouteOptions(NamedTuple):
    """Where the tokens of a new dispatch go."""

    topk_idx: torch.Tensor | None
    num_experts: int | None
    num_max_tokens_per_rank: int
    most_tokens_per_rank: int
    """The buffer's bound; 0: none."""
    expert_alignment: int
    expert_stats: torch.Tensor | None
    num_sms: int
    copy_ids: bool
    wait_for_counts: bool
    expand: bool


def _end(call: Call) -> EventOverlap:
    return EventOverlap(EventHandle._of(call.event) if call.event is not None else None)


def _check_new(member: Member, rows: torch.Tensor, how: DispatchOptions, to: RouteOptions) -> None:
    what, device = "dispatch", member.device
    if to.topk_idx is None:
        raise InvalidArgument(f"{what}: topk_idx and handle are None, expected one of them")
    if to.num_experts is None:
        raise InvalidArgument(f"{what}: num_experts is None, expected the number of experts of all ranks")
    num_local = arguments.check_num_experts(to.num_experts, what, member.num_ranks) // member.num_ranks
    arguments.check_choice(to.topk_idx, how.topk_weights, what, rows.shape[0], device)
    arguments.check_alignment(to.expert_alignment, what)
    most, bound = arguments.whole(to.num_max_tokens_per_rank), to.most_tokens_per_rank
    if most < 1 or (bound > 0 and most > bound):
        expected = f"1 to {bound}, the buffer's" if bound > 0 else "at least 1, here or from the buffer"
        raise InvalidArgument(f"{what}: num_max_tokens_per_rank is {to.num_max_tokens_per_rank!r}, expected {expected}")
    if rows.shape[0] > most:
        raise InvalidArgument(
            f"{what}: x has {rows.shape[0]} tokens, expected at most {most} (num_max_tokens_per_rank)"
        )
    check_expert_stats(to.expert_stats, what, num_local, device)


def dispatch(member: Member, x: Payload, how: DispatchOptions, to: RouteOptions, asked: Asked) -> Dispatched:
    """A new route and its first dispatch."""
    what = "dispatch"
    exact = to.wait_for_counts
    with member.turn(what, ("route", "dispatch"), asked, exact_route=exact) as (turn, call):
        rows, scales = arguments.check_payload(x, f"{what}: x", member.device)
        _check_new(member, rows, how, to)
        epilogue_after = event_of(how.before_epilogue, f"{what}: previous_event_before_epilogue")
        call.takes(rows, scales, how.topk_weights, to.topk_idx, to.expert_stats)
        most = 0 if exact else to.num_max_tokens_per_rank
        routing = turn.route(
            to.topk_idx,
            num_experts=to.num_experts,
            max_recv_rows=member.num_ranks * most,
            max_tokens=most,
            expert_stats=to.expert_stats,
        )
        if not to.expand:
            member.lane.wait(epilogue_after)
        # Rows of an exact route are known to it; others dispatch has to mark, past the last.
        table = None if exact else member.source_table(routing)
        received = _dispatch_rows(member, turn, routing, rows, scales, how, source=table, expand=to.expand)
        member.lane.wait(epilogue_after)
        source = routing.source if table is None else table
        handle = _make_handle(member, routing, received.topk_idx, source, to)
        result = _finish(member, received, handle, how)
        call.gives(result, _tensors_of(handle))
    return (*result, handle, _end(call))


def _tensors_of(handle: EPHandle) -> list[torch.Tensor]:
    return [value for value in vars(handle).values() if isinstance(value, torch.Tensor)]


def _dispatch_rows(
    member: Member,
    turn: Turn,
    routing: ferry.Routing,
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    how: DispatchOptions,
    *,
    source: torch.Tensor | None,
    expand: bool,
) -> ferry.Received:
    """A dispatch by token. Where rows are expanded afterwards, that step does the padding and lays out the scales."""
    table = scales.unsqueeze(1) if scales is not None and scales.dim() == 1 else scales
    out_scales = None
    if table is not None and how.column_major_scales and not expand:
        out_scales = column_major(routing.num_recv_rows, table)
    return turn.dispatch(
        routing,
        rows,
        scales=table,
        topk_weights=how.topk_weights,
        out_scales=out_scales,
        out_source=source,
        zero_padding=how.zero_padding and not expand,
    )


def column_major(num_rows: int, like: torch.Tensor) -> torch.Tensor:
    """[rows, S] with strides (1, rows rounded up to 4): as bulk tensor copies of 16 bytes require."""
    stride = arguments.align(num_rows, 4)
    memory = torch.empty(like.shape[1], stride, dtype=like.dtype, device=like.device)
    return memory.t()[:num_rows]


def _make_handle(
    member: Member, routing: ferry.Routing, local_idx: torch.Tensor, source: torch.Tensor, to: RouteOptions
) -> EPHandle:
    num_rows, num_topk = local_idx.shape
    metadata, ends_of_ranks, ends, unaligned, last_equal = _native.describe_arrivals(
        member.calls,
        local_idx,
        source,
        routing.local_expert_counts,
        max_tokens=to.num_max_tokens_per_rank,
        alignment=to.expert_alignment,
        expands=to.expand,
    )
    num_expanded, per_expert = 0, []
    if to.wait_for_counts:
        per_expert = [arguments.align(n, to.expert_alignment) for n in routing.num_rows_per_local_expert]
    if to.expand:
        num_local = to.num_experts // member.num_ranks
        num_expanded = sum(per_expert) if to.wait_for_counts else _most_expanded(num_rows, num_topk, num_local, to)
    handle = EPHandle(
        routing,
        do_expand=to.expand,
        num_experts=to.num_experts,
        expert_alignment=to.expert_alignment,
        num_max_tokens_per_rank=to.num_max_tokens_per_rank,
        num_sms=to.num_sms,
        topk_idx=to.topk_idx.clone() if to.copy_ids else to.topk_idx,
        num_recv_tokens=num_rows,
        num_expanded_tokens=num_expanded,
        num_recv_tokens_per_expert_list=per_expert,
        psum_num_recv_tokens_per_scaleup_rank=ends_of_ranks,
        psum_num_recv_tokens_per_expert=ends,
        num_unaligned_recv_tokens_per_expert=unaligned,
        recv_src_metadata=metadata,
        dst_buffer_slot_idx=routing.slots,
    )
    handle._last_equal = last_equal
    return handle


def _most_expanded(num_rows: int, num_topk: int, num_local: int, to: RouteOptions) -> int:
    gaps = (to.expert_alignment - 1) * num_local
    return arguments.align(num_rows * min(num_topk, num_local) + gaps, to.expert_alignment)


def _finish(
    member: Member, received: ferry.Received, handle: EPHandle, how: DispatchOptions
) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None]:
    """The first three results of a dispatch."""
    idx = received.topk_idx
    rows, scales, weights = received.x, received.scales, received.topk_weights
    if handle.do_expand:
        idx = None
        rows, scales, weights = _native.expand_received(
            member.calls,
            rows,
            scales,
            weights,
            *_slots_of(handle),
            num_rows=handle.num_expanded_tokens,
            zero_padding=how.zero_padding,
            column_major_scales=how.column_major_scales,
        )
    return rows if scales is None else (rows, scales), idx, weights


def _slots_of(handle: EPHandle) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where the copies of each row are, and which choice has the slot of each, as the native module takes them."""
    return handle.recv_src_metadata.contiguous(), handle._last_equal


def _reduced(
    member: Member, x: torch.Tensor, weights: torch.Tensor | None, handle: EPHandle, exact: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sums of each row's slots, fp32 if ``exact``, and what each choice weighs."""
    aligned = x if x.data_ptr() % arguments.ROW_GRANULE_BYTES == 0 else x.clone()
    return _native.reduce_sent(member.calls, aligned, weights, *_slots_of(handle), exact=exact)


def check_handle(member: Member, handle: Any, what: str) -> None:
    """Checks that it is a handle of this kind of buffer, and that its metadata is valid, whatever wrote it."""
    if not isinstance(handle, EPHandle):
        raise InvalidArgument(
            f"{what}: handle is a {type(handle).__name__}, expected the EPHandle that dispatch returned"
        )
    arguments.check_tensor(handle.topk_idx, f"{what}: handle.topk_idx", member.device)
    metadata, num_topk = handle.recv_src_metadata, handle.topk_idx.shape[1]
    name = f"{what}: handle.recv_src_metadata"
    arguments.check_tensor(metadata, name, member.device)
    if metadata.dtype != torch.int32 or metadata.shape != (handle.num_recv_tokens, 2 + num_topk):
        raise InvalidArgument(
            f"{name} is {list(metadata.shape)} {metadata.dtype}, expected "
            f"[{handle.num_recv_tokens}, {2 + num_topk}] torch.int32"
        )


def _needs_route(member: Member, handle: Any) -> bool:
    """Whether the handle was made by another buffer or copied without its routing. The same on all ranks."""
    if member.is_destroyed or not isinstance(handle, EPHandle):
        return False
    return handle._routing is None or handle._routing.group is not member.group


def _knows_counts(handle: EPHandle) -> bool:
    """Whether its dispatch waited for the counts. The same on all ranks."""
    return len(handle.num_recv_tokens_per_expert_list) > 0


def _routing_of(turn: Turn, handle: EPHandle, routes: bool) -> ferry.Routing:
    if routes:
        bounded = not _knows_counts(handle)
        handle._routing = turn.route(
            handle.topk_idx,
            num_experts=handle.num_experts,
            max_recv_rows=handle.num_recv_tokens if bounded else 0,
            max_tokens=handle.num_max_tokens_per_rank if bounded else 0,
        )
    return handle._routing


def dispatch_again(
    member: Member, x: Payload, handle: EPHandle, how: DispatchOptions, given: dict[str, Any], asked: Asked
) -> Dispatched:
    """A cached dispatch. ``given``: arguments that must be None or equal the handle's."""
    what = "dispatch"
    routes = _needs_route(member, handle)
    collectives = ("route", "dispatch") if routes else ("dispatch",)
    exact = routes and _knows_counts(handle)
    with member.turn(what, collectives, asked, exact_route=exact) as (turn, call):
        rows, scales = arguments.check_payload(x, f"{what}: x", member.device)
        check_handle(member, handle, what)
        _check_agrees(handle, given)
        num_tokens = handle.topk_idx.shape[0]
        if rows.shape[0] != num_tokens:
            raise InvalidArgument(f"{what}: x has {rows.shape[0]} tokens, expected the {num_tokens} of the handle")
        if how.topk_weights is not None:
            sizes = tuple(handle.topk_idx.shape)
            arguments.check_table(how.topk_weights, f"{what}: topk_weights", member.device, torch.float32, sizes)
        epilogue_after = event_of(how.before_epilogue, f"{what}: previous_event_before_epilogue")
        call.takes(rows, scales, how.topk_weights, _tensors_of(handle))
        routing = _routing_of(turn, handle, routes)
        if not handle.do_expand:
            member.lane.wait(epilogue_after)
        received = _dispatch_rows(member, turn, routing, rows, scales, how, source=None, expand=handle.do_expand)
        member.lane.wait(epilogue_after)
        result = _finish(member, received, handle, how)
        call.gives(result)
    return (*result, handle, _end(call))


def _check_agrees(handle: EPHandle, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is None:
            continue
        of_handle = getattr(handle, name, None)
        if of_handle is None or isinstance(value, torch.Tensor):
            raise InvalidArgument(f"dispatch: {name} is given together with a handle, expected None")
        if value != of_handle:
            raise InvalidArgument(f"dispatch: {name} is {value}, expected the handle's {of_handle}, or None")


def combine(
    member: Member,
    x: torch.Tensor,
    handle: EPHandle,
    topk_weights: torch.Tensor | None,
    bias: Any,
    before_epilogue: Any,
    *,
    single_rounding: bool,
    asked: Asked,
) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
    """``single_rounding``: sums of a rank and of a node are sent in fp32."""
    what = "combine"
    routes = _needs_route(member, handle)
    collectives = ("route", "combine") if routes else ("combine",)
    exact = routes and _knows_counts(handle)
    with member.turn(what, collectives, asked, exact_route=exact) as (turn, call):
        arguments.check_rows(x, f"{what}: x", member.device, torch.bfloat16)
        check_handle(member, handle, what)
        _check_combined(member, x, handle, topk_weights)
        num_tokens = handle.topk_idx.shape[0]
        biases = arguments.check_biases(bias, what, num_tokens, x.shape[1], member.device)
        epilogue_after = event_of(before_epilogue, f"{what}: previous_event_before_epilogue")
        call.takes(x, topk_weights, biases, _tensors_of(handle))
        y, weights = x, topk_weights
        if handle.do_expand:
            y, weights = _reduced(member, x, topk_weights, handle, single_rounding)
        elif single_rounding and member.num_nodes > 1:
            y = x.to(torch.float32)
        member.lane.wait(epilogue_after)
        combined = turn.combine(
            _routing_of(turn, handle, routes), y, weights=weights, bias=[tensor.to(y.dtype) for tensor in biases]
        )
        out = combined.x.to(x.dtype)
        call.gives(out, combined.weights)
    return out, combined.weights, _end(call)


def _check_combined(member: Member, x: torch.Tensor, handle: EPHandle, topk_weights: torch.Tensor | None) -> None:
    what = "combine"
    num_rows = handle.num_recv_tokens
    if not handle.do_expand:
        if x.shape[0] != num_rows:
            raise InvalidArgument(f"{what}: x has {x.shape[0]} rows, expected the {num_rows} that were received")
    elif member.device.type == "cpu" and handle.recv_src_metadata.numel() > 0:
        # On a GPU the host cannot check this; slots past the end are ignored there.
        largest = int(handle.recv_src_metadata[:, 2:].max())
        if largest >= x.shape[0]:
            raise InvalidArgument(f"{what}: x has {x.shape[0]} rows, but handle.recv_src_metadata names row {largest}")
    if topk_weights is not None:
        shape = (x.shape[0],) if handle.do_expand else (num_rows, handle.topk_idx.shape[1])
        arguments.check_table(topk_weights, f"{what}: topk_weights", member.device, torch.float32, shape)
