"""A rank of a buffer's group: what both generations share, and calls that leave no rank waiting when they fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import ferry
from deep_ep._arguments import MAX_TOPK, align, ignore_unknown
from deep_ep._device import choose_device
from deep_ep._domains import choose_ranks_per_node
from deep_ep._ep_handle import EPHandle
from deep_ep._handles import Link
from deep_ep._latency_handles import LatencyLink, ReceiveHook
from deep_ep._num_sms import Suggested, bound_of
from deep_ep._previous_event import event_of
from deep_ep._streams import Call, lane_of
from deep_ep.utils.event import EventOverlap
from ferry import FerryError, InvalidArgument, _native

_I32_PER_ROW_GRANULE = 4

_ROUTES = ("route", "rail_route")
# Which route a collective's routing comes from.
_ROUTE_OF = {"dispatch": "route", "combine": "route", "rail_dispatch": "rail_route"}

# Classes that native calls make or know.
_TYPES = (EventOverlap, Suggested, Link, EPHandle, LatencyLink, ReceiveHook)


class Asked(NamedTuple):
    """The arguments that determine when a call runs and on how much of a GPU, and those unknown to this package."""

    previous_event: Any = None
    asynchronous: bool = False
    unknown: Mapping[str, Any] = {}
    num_sms: Any = 0


class Turn:
    """The collectives that one operation makes, in order.

    If the operation fails before it has made all of them, its peers must not be left waiting in the next: it makes the
    remaining calls without arguments, which refuses them on every rank.

    Collectives: "route"; "dispatch" and "combine" with the operation's own routing; "rail_route" and "rail_dispatch",
    a second pair; "gather", a dispatch with the member's own, which does not depend on a route of the operation;
    "latency_dispatch" and "latency_combine".
    """

    def __init__(self, member: Member, collectives: Sequence[str], exact_route: bool) -> None:
        self._group = member.group
        self._lane = member.lane
        self._left = list(collectives)
        self._exact_route = exact_route
        self._all_know = False
        self._failed_routes: set[str] = set()
        self._routing: ferry.Routing | None = None
        self._rail_routing: ferry.Routing | None = None
        self.num_sms = 0
        """The most multiprocessors of each collective; 0: ferry's own choice."""

    def adds(self, collective: str) -> None:
        """One more, next. All ranks must know that it comes."""
        self._left.insert(0, collective)

    def _ends_here(self, collective: str) -> bool:
        """Whether all ranks learn at once that this collective was refused, and stop there."""
        return (
            self._lane.reports_at_once
            or (collective == "route" and self._exact_route)
            or collective == "rail_route"  # always exact
        )

    @contextlib.contextmanager
    def _making(self, collective: str) -> Iterator[None]:
        if not self._left or self._left.pop(0) != collective:
            raise AssertionError(f"{collective} is not the collective that this operation announced next")
        try:
            yield
        except Exception:
            self._all_know = self._ends_here(collective)
            self._failed_routes.add(collective)
            raise

    def goes_on_with(self, routing: ferry.Routing) -> ferry.Routing:
        """The operation's own route was made before this turn."""
        self._routing = routing
        return routing

    def route(
        self,
        topk_idx: torch.Tensor,
        *,
        num_experts: int,
        max_recv_rows: int = 0,
        max_tokens: int = 0,
        expert_stats: torch.Tensor | None = None,
    ) -> ferry.Routing:
        """One row per token and rank; without weights, which each dispatch takes itself. ``expert_stats``: to it the
        rows of each local expert are added.
        """
        counters = None if expert_stats is None else ferry.LoadCounters(received=expert_stats)
        with self._making("route"):
            self._routing = self._group.route(
                topk_idx,
                num_experts=num_experts,
                max_recv_rows=max_recv_rows,
                max_tokens=max_tokens,
                num_sms=self.num_sms,
                counters=counters,
            )
            return self._routing

    def rail_route(self, topk_idx: torch.Tensor, *, num_experts: int) -> ferry.Routing:
        with self._making("rail_route"):
            self._rail_routing = self._group.route(topk_idx, num_experts=num_experts, num_sms=self.num_sms)
            return self._rail_routing

    def rail_dispatch(self, x: torch.Tensor) -> torch.Tensor:
        with self._making("rail_dispatch"):
            return self._group.dispatch(self._rail_routing, x, tables=False, num_sms=self.num_sms).x

    def gather(self, routing: ferry.Routing, x: torch.Tensor) -> torch.Tensor:
        """``routing``: the member's own."""
        with self._making("gather"):
            return self._group.dispatch(routing, x, tables=False, num_sms=self.num_sms).x

    def dispatch(self, routing: ferry.Routing, x: torch.Tensor, **options: Any) -> ferry.Received:
        with self._making("dispatch"):
            return self._group.dispatch(routing, x, num_sms=self.num_sms, **options)

    def combine(self, routing: ferry.Routing, x: torch.Tensor, **options: Any) -> ferry.Combined:
        with self._making("combine"):
            return self._group.combine(routing, x, num_sms=self.num_sms, **options)

    def latency_dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, **options: Any) -> ferry.LatencyDispatched:
        with self._making("latency_dispatch"):
            return self._group.latency_dispatch(x, topk_idx, num_sms=self.num_sms, **options)

    def latency_combine(
        self, x: torch.Tensor, routing: ferry.Routing, topk_weights: torch.Tensor, **options: Any
    ) -> ferry.LatencyCombined:
        with self._making("latency_combine"):
            return self._group.latency_combine(x, routing, topk_weights, num_sms=self.num_sms, **options)

    def give_up(self) -> None:
        """Refuse the remaining collectives on all ranks that would otherwise wait for them."""
        if self._all_know:
            return
        for collective in self._left:
            if _ROUTE_OF.get(collective) in self._failed_routes:
                continue  # no rank takes part in these, since their routing was refused
            with contextlib.suppress(FerryError):
                self._refuse(collective)
            if self._ends_here(collective):
                break

    def _refuse(self, collective: str) -> None:
        if collective in _ROUTES:
            self._failed_routes.add(collective)
            self._group.route(None, num_experts=1)
        elif collective == "combine":
            self._group.combine(self._routing, None)
        elif collective == "latency_dispatch":
            self._group.latency_dispatch(None, None, num_experts=1, max_tokens=1)
        elif collective == "latency_combine":
            self._group.latency_combine(None, None)
        else:
            routing = {"dispatch": self._routing, "rail_dispatch": self._rail_routing}.get(collective)
            self._group.dispatch(routing, None)


def _size_of(group: Any, comm: Any) -> int:
    """R; 0 if it is no group, which ferry.Group refuses."""
    size = getattr(group, "size", None) if group is not None else comm.Get_size
    return size() if callable(size) else 0


class Member:
    """This rank of a buffer's ferry group. Creating one is collective; so is every turn that announces collectives."""

    def __init__(
        self,
        group: Any,
        comm: Any,
        device: torch.device | str | int | None,
        timeouts_s: Mapping[str, float],
        latency_bytes: int = 0,
        mask_lost_ranks: bool = False,
        ranks_per_node: int | None = None,
    ) -> None:
        """timeouts_s: bounds of a wait for another rank, by type of device. ranks_per_node: as of
        :func:`choose_ranks_per_node`. The others: as of ferry.Group.
        """
        if group is None and comm is None:
            raise InvalidArgument("group is None, expected a torch process group, or comm=an mpi4py communicator")
        self.device = choose_device(device)
        self.lane = lane_of(self.device)
        self._group: ferry.Group | None = ferry.Group(
            group,
            comm=comm if group is None else None,
            device=self.device,
            timeout=timeouts_s[self.device.type],
            ranks_per_node=choose_ranks_per_node(ranks_per_node, _size_of(group, comm)),
            latency_bytes=latency_bytes,
            mask_lost_ranks=mask_lost_ranks,
            mask_timeout=timeouts_s[self.device.type],
        )
        self._captured: list[ferry.Routing] = []
        self._whole: _native.BufferCalls | None = _native.BufferCalls(
            self._group._calls, self._group, _TYPES, self._captured
        )
        self.rank = self._group.rank
        self.num_ranks = self._group.num_ranks
        self.ranks_per_node = self._group.ranks_per_node
        # Done here, so that no later call is the first to allocate memory or load kernels, possibly during capture.
        with self.turn("create a buffer", ("route",), Asked()) as (turn, _):
            self._to_all = turn.route(self._ids_of_all(), num_experts=self.num_ranks)

    @property
    def num_nodes(self) -> int:
        """D."""
        return self.num_ranks // self.ranks_per_node

    @property
    def node_idx(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def rail_idx(self) -> int:
        """This rank's index in its node."""
        return self.rank % self.ranks_per_node

    @property
    def group(self) -> ferry.Group:
        if self._group is None:
            raise InvalidArgument("the buffer was destroyed; create a new one")
        return self._group

    @property
    def is_destroyed(self) -> bool:
        return self._group is None

    @property
    def runtime(self) -> ferry.Group | None:
        """The group; None once destroyed."""
        return self._group

    @property
    def calls(self) -> Any:
        """The native module's calls of the group; None once destroyed."""
        return None if self._group is None else self._group._calls

    @property
    def whole(self) -> _native.BufferCalls | None:
        """Throughput mode's calls as the native module makes them, of common, valid arguments; None once destroyed."""
        return self._whole

    def _ids_of_all(self) -> torch.Tensor:
        """Tokens that together go to each rank once."""
        width = min(self.num_ranks, MAX_TOPK)
        ids = torch.full((align(self.num_ranks, width),), -1, dtype=torch.int64)
        ids[: self.num_ranks] = torch.arange(self.num_ranks)
        return ids.view(-1, width).to(self.device)

    @contextlib.contextmanager
    def turn(
        self,
        operation: str,
        collectives: Sequence[str],
        asked: Asked,
        *,
        exact_route: bool = True,
    ) -> Iterator[tuple[Turn, Call]]:
        """Run an operation in order with streams and other ranks: everything that can fail belongs inside."""
        try:
            turn = Turn(self, collectives, exact_route)
        except InvalidArgument as error:
            raise InvalidArgument(f"{operation}: {error}") from None
        try:
            ignore_unknown(operation, asked.unknown)
            previous = event_of(asked.previous_event, f"{operation}: previous_event")
            turn.num_sms = bound_of(asked.num_sms, operation)
            with torch.no_grad(), self.lane.call(previous, asked.asynchronous) as call:
                yield turn, call
        except Exception:
            turn.give_up()
            raise
        # Only after this rank's part in the operation, so that all ranks make the same collectives.
        self.group.poll()

    def gather(self, turn: Turn, row: torch.Tensor) -> torch.Tensor:
        """[W] i32 of each rank -> [R, W] i32 on all of them. A dispatch."""
        width = row.shape[0]
        padded = row.new_zeros(self._to_all.num_tokens, max(align(width, _I32_PER_ROW_GRANULE), _I32_PER_ROW_GRANULE))
        padded[:, :width] = row
        return turn.gather(self._to_all, padded)[:, :width]

    def source_table(self, routing: ferry.Routing) -> torch.Tensor:
        """Memory for ``out_source`` of a dispatch."""
        return torch.empty(routing.num_recv_rows, 2, dtype=torch.int32, device=self.device)

    def keep_for_graph(self, routing: ferry.Routing) -> None:
        """Replays of a graph use the routings of its capture, and nobody tells when the last one was."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured.append(routing)

    def wait_for_all(self, on_host: bool) -> None:
        """A barrier of all ranks: on the stream, or on the host too."""
        with self.turn("barrier", ("gather",), Asked()) as (turn, _):
            self.gather(turn, torch.zeros(1, dtype=torch.int32, device=self.device))
        if on_host:
            self.lane.synchronize()

    def destroy(self) -> None:
        """Collective, and only the first time: wait until all ranks are done, then free the memory."""
        if self._group is not None:
            self._group._native.refuse_in_handler("destroy")
        group, self._group = self._group, None
        self._to_all = None
        self._whole = None
        self._captured.clear()
        if group is not None:
            group.destroy()
