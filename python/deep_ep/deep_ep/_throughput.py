"""The calls of the first generation's throughput mode."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import ferry
from deep_ep import _arguments as arguments
from deep_ep._handles import (
    AnyHandle,
    Form,
    Handle,
    Link,
    NodesHandle,
    attach,
    attached,
    check_mask,
    ids_of_mask,
    is_copy,
    unpack,
)
from deep_ep._member import Asked, Member, Turn
from deep_ep._node_tables import forward, make_handle, node_masks, with_masks, without_masks
from deep_ep.utils.event import EventHandle, EventOverlap
from ferry import InvalidArgument

# A node of the first generation, whose get_dispatch_layout counts such nodes also where they share memory.
_RANKS_PER_NODE = 8

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _end(event: Any) -> EventOverlap:
    return EventOverlap(EventHandle._of(event) if event is not None else None)


def counted_ranks_per_node(member: Member) -> int:
    """What get_dispatch_layout takes for a node."""
    return member.ranks_per_node if member.num_nodes > 1 else _RANKS_PER_NODE


def dispatch_layout(
    member: Member, topk_idx: torch.Tensor, num_experts: int, asked: Asked
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
    """Local: no other rank takes part."""
    what = "get_dispatch_layout"
    with member.turn(what, (), asked) as (_, call):
        arguments.check_table(topk_idx, f"{what}: topk_idx", member.device, torch.int64, ("T", "K"))
        whole = arguments.check_num_experts(num_experts, what, member.num_ranks)
        call.takes(topk_idx)
        layout = ferry.dispatch_layout(
            topk_idx, num_experts=whole, num_ranks=member.num_ranks, ranks_per_node=counted_ranks_per_node(member)
        )
        per_rank, per_node, per_expert, in_rank = layout
        call.gives(per_rank, per_node, per_expert, in_rank)
    return per_rank, per_node if len(per_node) > 1 else None, per_expert, in_rank, _end(call.event)


def _sum_over_ranks(member: Member, turn: Turn, per_expert: torch.Tensor) -> torch.Tensor:
    """[L] i32: choices of each local expert on all ranks, a token's equal choices included. An exchange of its own."""
    turn.adds("gather")
    num_local = per_expert.shape[0] // member.num_ranks
    first = member.rank * num_local
    return member.gather(turn, per_expert)[:, first : first + num_local].sum(0, dtype=torch.int32)


def _check_new(member: Member, rows: torch.Tensor, given: dict[str, Any]) -> None:
    what, device, num_ranks, tokens = "dispatch", member.device, member.num_ranks, rows.shape[0]
    for name in ("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert"):
        if given[name] is None:
            raise InvalidArgument(f"{what}: {name} is None, expected what get_dispatch_layout returned, or a handle")
    for name, dtype, shape in (
        ("num_tokens_per_rank", torch.int32, (num_ranks,)),
        ("is_token_in_rank", torch.bool, (tokens, num_ranks)),
        ("num_tokens_per_expert", torch.int32, ("E",)),
    ):
        arguments.check_table(given[name], f"{what}: {name}", device, dtype, shape)
    if member.num_nodes > 1 and given["num_tokens_per_rdma_rank"] is not None:
        name = f"{what}: num_tokens_per_rdma_rank"
        arguments.check_table(given["num_tokens_per_rdma_rank"], name, device, torch.int32, (member.num_nodes,))
    arguments.check_num_experts(given["num_tokens_per_expert"].shape[0], what, num_ranks)
    ids, weights = given["topk_idx"], given["topk_weights"]
    if (ids is None) != (weights is None):
        raise InvalidArgument(f"{what}: topk_idx and topk_weights: one of them is None, expected both or neither")
    if ids is not None:
        arguments.check_choice(ids, weights, what, tokens, device)
    else:
        check_mask(given["is_token_in_rank"], f"{what}: is_token_in_rank")


def dispatch(
    member: Member,
    x: Payload,
    given: dict[str, Any],
    *,
    expert_alignment: int,
    num_worst_tokens: int,
    num_sms: int,
    made: ferry.Routing | None,
    asked: Asked,
) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None, list[int], tuple[torch.Tensor, ...], EventOverlap]:
    """A new route and its first dispatch. ``made``: the route, if it was made already."""
    what = "dispatch"
    exact = num_worst_tokens == 0
    rails = ("rail_route", "rail_dispatch") if member.num_nodes > 1 else ()
    collectives = (*rails, "route", "dispatch") if made is None else ("dispatch",)
    with member.turn(what, collectives, asked, exact_route=exact) as (turn, call):
        rows, scales = arguments.check_payload(x, f"{what}: x", member.device)
        _check_new(member, rows, given)
        arguments.check_alignment(expert_alignment, what)
        num_channels = _num_channels(num_sms)
        ids, weights, in_rank = given["topk_idx"], given["topk_weights"], given["is_token_in_rank"]
        per_expert = given["num_tokens_per_expert"]
        if not exact and (arguments.whole(num_worst_tokens) < 0 or ids is None):
            raise InvalidArgument(
                f"{what}: num_worst_tokens is {num_worst_tokens!r}, expected 0, or rows for all tokens that may arrive "
                "and topk_idx"
            )
        call.takes(rows, scales, in_rank, per_expert, ids, weights)
        forwarded = forward(member, turn, in_rank) if rails else None
        if made is not None:
            routing = turn.goes_on_with(made)
        elif ids is None:
            routing = turn.route(ids_of_mask(in_rank), num_experts=member.num_ranks)
        else:
            routing = turn.route(ids, num_experts=per_expert.shape[0], max_recv_rows=num_worst_tokens)
        read_counts = None
        if exact and (ids is None or routing.may_repeat_experts):
            read_counts = member.lane.read_later(_sum_over_ranks(member, turn, per_expert))
        tables = ids is not None
        masks = node_masks(member, in_rank) if forwarded is not None else None
        received, recv_x = _dispatch_rows(turn, routing, rows, scales, weights, tables=tables, masks=masks)
        handle: AnyHandle
        if forwarded is not None:
            handle = make_handle(member, routing, in_rank, forwarded, received.scales, num_channels)
        else:
            by_channel = member.group.channel_tables(routing, num_channels)
            handle = Handle(*by_channel[:4], in_rank, by_channel.send_index)
        attach(handle, Link(routing, knows_topk=tables))
        call.gives(recv_x, received.topk_idx, received.topk_weights, handle)
        per_local_expert: list[int] = []
        if exact:
            counts = read_counts() if read_counts is not None else routing.num_rows_per_local_expert
            per_local_expert = [arguments.align(count, expert_alignment) for count in counts]
    return recv_x, received.topk_idx, received.topk_weights, per_local_expert, tuple(handle), _end(call.event)


def _num_channels(num_sms: int) -> int:
    if num_sms < 2 or num_sms % 2 != 0:
        raise InvalidArgument(f"dispatch: config.num_sms is {num_sms}, expected an even number of at least 2")
    return num_sms // 2


def _dispatch_rows(
    turn: Turn,
    routing: ferry.Routing,
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    weights: torch.Tensor | None,
    *,
    tables: bool,
    masks: torch.Tensor | None = None,
) -> tuple[ferry.Received, Payload]:
    """A dispatch, and its rows in the form in which they were passed. masks: sent as further scales."""
    table = scales.unsqueeze(1) if scales is not None and scales.dim() == 1 else scales
    sent = table if masks is None else with_masks(table, masks)
    received = turn.dispatch(routing, rows, scales=sent, topk_weights=weights, tables=tables)
    if scales is None:
        return received, received.x
    came = received.scales if masks is None else without_masks(received.scales, masks.shape[1], scales.dtype)
    return received, (received.x, came.squeeze(1) if scales.dim() == 1 else came)


class _Plan(NamedTuple):
    """What a call with a handle will do.

    All ranks decide the same: the tensor that carries the link has the same shape on all of them, so code that copies
    it on one rank (offloading, for example) copies it on every rank. If it does not, the ranks' calls differ, which
    ferry refuses.
    """

    link: Link | None
    routes: bool

    def collectives(self, *then: str) -> tuple[str, ...]:
        return ("route", *then) if self.routes else then

    @property
    def knows_topk(self) -> bool:
        return self.link.knows_topk if self.link is not None else not self.routes


def _form(member: Member) -> Form:
    return NodesHandle if member.num_nodes > 1 else Handle


def _plan(member: Member, handle: Any) -> _Plan:
    if member.is_destroyed:
        return _Plan(None, False)
    form = _form(member)
    link = attached(handle, form, member.group)
    return _Plan(link, link is None and is_copy(handle, form, member.device))


def _routing_of(member: Member, turn: Turn, plan: _Plan, handle: AnyHandle) -> ferry.Routing:
    if plan.link is not None:
        return plan.link.routing
    # There cannot be more rows than these, so the host need not wait for the counts.
    num_rows = max(1, handle.num_rows)  # 0 would mean unbounded
    ids = ids_of_mask(handle.is_token_in_rank)
    routing = turn.route(ids, num_experts=member.num_ranks, max_recv_rows=num_rows)
    attach(handle, Link(routing, knows_topk=False))
    return routing


def dispatch_again(member: Member, x: Payload, handle: Any, given: dict[str, Any], asked: Asked) -> tuple:
    """A cached dispatch: only rows and scales."""
    what = "dispatch"
    plan = _plan(member, handle)
    collectives = plan.collectives("dispatch")
    with member.turn(what, collectives, asked, exact_route=False) as (turn, call):
        for name in ("topk_idx", "topk_weights"):
            if given[name] is not None:
                raise InvalidArgument(f"{what}: {name} is given together with a handle, expected one of the two")
        rows, scales = arguments.check_payload(x, f"{what}: x", member.device)
        tensors = unpack(handle, what, _form(member), member.num_ranks, member.device)
        _check_tokens(what, rows, tensors)
        call.takes(rows, scales, tensors)
        _, recv_x = _dispatch_rows(turn, _routing_of(member, turn, plan, tensors), rows, scales, None, tables=False)
        recv_x = _first_rows(recv_x, tensors.num_rows)
        call.gives(recv_x)
    return recv_x, None, None, None, None, _end(call.event)


def _first_rows(payload: Payload, num_rows: int) -> Payload:
    """Without the one row that a bounded route of no rows has."""
    if isinstance(payload, tuple):
        return payload[0][:num_rows], payload[1][:num_rows]
    return payload[:num_rows]


def _check_tokens(what: str, rows: torch.Tensor, handle: AnyHandle) -> None:
    if rows.shape[0] != handle.is_token_in_rank.shape[0]:
        raise InvalidArgument(
            f"{what}: x has {rows.shape[0]} tokens, expected the {handle.is_token_in_rank.shape[0]} of the handle"
        )


def combine(
    member: Member,
    x: torch.Tensor,
    handle: Any,
    topk_weights: torch.Tensor | None,
    bias: Any,
    asked: Asked,
) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
    what = "combine"
    plan = _plan(member, handle)
    # If ferry does not know K, weights are sent as rows.
    as_rows = topk_weights is not None and not plan.knows_topk
    collectives = plan.collectives("combine", "combine") if as_rows else plan.collectives("combine")
    with member.turn(what, collectives, asked, exact_route=False) as (turn, call):
        arguments.check_rows(x, f"{what}: x", member.device, torch.bfloat16)
        tensors = unpack(handle, what, _form(member), member.num_ranks, member.device)
        num_rows, num_tokens = tensors.num_rows, tensors.is_token_in_rank.shape[0]
        if x.shape[0] != num_rows:
            raise InvalidArgument(f"{what}: x has {x.shape[0]} rows, expected the {num_rows} that were received")
        if topk_weights is not None:
            name = f"{what}: topk_weights"
            num_topk = plan.link.routing.num_topk if plan.link is not None and not as_rows else "K"
            arguments.check_table(topk_weights, name, member.device, torch.float32, (num_rows, num_topk))
        biases = arguments.check_biases(bias, what, num_tokens, x.shape[1], member.device)
        call.takes(x, topk_weights, biases, tensors)
        routing = _routing_of(member, turn, plan, tensors)
        if num_rows < routing.num_recv_rows:
            x = x.new_zeros(routing.num_recv_rows, x.shape[1])
            topk_weights = None if topk_weights is None else topk_weights.new_zeros(len(x), topk_weights.shape[1])
        combined = turn.combine(routing, x, weights=None if as_rows else topk_weights, bias=biases)
        weights = _sum_as_rows(turn, routing, topk_weights) if as_rows else combined.weights
        call.gives(combined.x, weights)
    return combined.x, weights, _end(call.event)


def _sum_as_rows(turn: Turn, routing: ferry.Routing, weights: torch.Tensor) -> torch.Tensor:
    """The sums that ferry's own weights would be, each rank's in ascending order, for any width."""
    num_topk = weights.shape[1]
    padded = weights.new_zeros(weights.shape[0], arguments.align(num_topk, 4))
    padded[:, :num_topk] = weights
    return turn.combine(routing, padded).x[:, :num_topk].contiguous()
