"""Calls that the native module makes as a whole: arguments are read, outputs allocated and ferry's calls made in one
step. It takes the common, valid case; None means that nothing was done, and that :mod:`deep_ep._throughput` or
:mod:`deep_ep._elastic_calls` makes the call step by step, which also says what is wrong with wrong arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ferry
from deep_ep._ep_handle import EPHandle
from deep_ep._handles import Handle, Link, attach
from deep_ep._member import Asked, Member
from deep_ep._num_sms import Suggested, bound_of
from deep_ep._previous_event import event_of
from deep_ep.utils.event import EventHandle, EventOverlap
from ferry import InvalidArgument, _native

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def run_whole(member: Member, asked: Asked, make: Callable[[int], Any], *inputs: Any) -> tuple[Any, EventOverlap]:
    """What ``make``, given the most multiprocessors, returns, and the event of the call. ``inputs``: tensors that the
    GPU reads or writes.
    """
    try:
        num_sms = bound_of(asked.num_sms, "num_sms")
        previous = event_of(asked.previous_event, "previous_event")
    except InvalidArgument:
        return None, EventOverlap()
    if asked.previous_event is None and not asked.asynchronous:
        return make(num_sms), EventOverlap()
    with member.lane.call(previous, asked.asynchronous) as call:
        made = make(num_sms)
        if made is not None:
            call.takes(*inputs)
            parts = made if isinstance(made, tuple) else (made,)
            call.gives(*(part for part in parts if not isinstance(part, list)))  # lists are of counts
    return made, EventOverlap(EventHandle._of(call.event) if call.event is not None else None)


def layout(
    member: Member, topk_idx: torch.Tensor, num_experts: int, ranks_per_node: int, asked: Asked
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap] | None:
    calls = member.calls
    if calls is None:
        return None
    made, event = run_whole(
        member, asked, lambda _: _native.throughput_layout(calls, topk_idx, num_experts, ranks_per_node), topk_idx
    )
    return None if made is None else (*made, event)


def dispatch(
    member: Member, x: Payload, given: dict[str, Any], numbers: tuple[int, int, int], asked: Asked
) -> tuple | ferry.Routing | None:
    """The routing alone if only the route was made: on CPUs, where choices are counted in an exchange of their own.

    numbers: expert_alignment, num_worst_tokens, num_sms (of which the channels are made, whoever chose it).
    """
    calls, ids, weights = member.calls, given["topk_idx"], given["topk_weights"]
    if calls is None or ids is None or asked.unknown:
        return None
    in_rank = given["is_token_in_rank"]
    layout = given["num_tokens_per_rank"], in_rank, given["num_tokens_per_expert"]
    if isinstance(numbers[2], Suggested):
        numbers = *numbers[:2], int(numbers[2])  # the native module takes no subclass of int
    made, event = run_whole(
        member,
        asked,
        lambda num_sms: _native.throughput_dispatch(calls, x, layout, ids, weights, numbers, num_sms),
        x,
        ids,
        weights,
    )
    if made is None:
        return None
    if isinstance(made, _native.Routing):
        return ferry.Routing(made, member.group, False, numbers[1] > 0)
    recv_x, recv_ids, recv_weights, counts, tables, native = made
    handle = Handle(*tables[:4], in_rank, tables[4])
    attach(handle, Link(ferry.Routing(native, member.group, False, numbers[1] > 0), knows_topk=True))
    return recv_x, recv_ids, recv_weights, counts, tuple(handle), event


def dispatch_again(member: Member, x: Payload, handle: Any, given: dict[str, Any], asked: Asked) -> tuple | None:
    calls = member.calls
    if calls is None or asked.unknown or given["topk_idx"] is not None or given["topk_weights"] is not None:
        return None
    group = member.group
    made, event = run_whole(
        member, asked, lambda num_sms: _native.throughput_dispatch_again(calls, group, x, handle, num_sms), x
    )
    return None if made is None else (made, None, None, None, None, event)


def combine(
    member: Member, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None, bias: Any, asked: Asked
) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap] | None:
    calls = member.calls
    if calls is None or asked.unknown:
        return None
    group = member.group
    made, event = run_whole(
        member,
        asked,
        lambda num_sms: _native.throughput_combine(calls, group, x, handle, topk_weights, bias, num_sms),
        x,
        topk_weights,
        bias,
    )
    return None if made is None else (*made, event)


def _routing_of(member: Member, handle: Any, before_epilogue: Any, asked: Asked) -> ferry.Routing | None:
    """That of a handle which this buffer made, not expanded, for a call that waits for nothing in its middle."""
    if not isinstance(handle, EPHandle) or handle.do_expand or before_epilogue is not None or asked.unknown:
        return None
    routing = handle._routing
    return routing if routing is not None and routing.group is member.runtime else None


def elastic_dispatch_again(
    member: Member,
    x: Payload,
    handle: Any,
    topk_weights: torch.Tensor | None,
    before_epilogue: Any,
    asked: Asked,
    *,
    zero_padding: bool,
) -> tuple | None:
    routing = _routing_of(member, handle, before_epilogue, asked)
    if routing is None:
        return None
    calls, tensors = member.calls, (handle.topk_idx, handle.recv_src_metadata)
    how = routing.is_bounded, bool(zero_padding)
    made, event = run_whole(
        member,
        asked,
        lambda num_sms: _native.elastic_dispatch_again(calls, routing._native, x, topk_weights, tensors, *how, num_sms),
        x,
        topk_weights,
    )
    return None if made is None else (*made, handle, event)


def elastic_combine(
    member: Member,
    x: torch.Tensor,
    handle: Any,
    topk_weights: torch.Tensor | None,
    bias: Any,
    before_epilogue: Any,
    asked: Asked,
) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap] | None:
    routing = _routing_of(member, handle, before_epilogue, asked)
    if routing is None:
        return None
    calls, tensors = member.calls, (handle.topk_idx, handle.recv_src_metadata)
    made, event = run_whole(
        member,
        asked,
        lambda num_sms: _native.elastic_combine(calls, routing._native, x, topk_weights, bias, tensors, num_sms),
        x,
        topk_weights,
        bias,
    )
    return None if made is None else (*made, event)
