"""A rank of a buffer's group, which both generations share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

import ferry
from deep_ep import _ids
from deep_ep._device import choose_device
from deep_ep._domains import choose_ranks_per_node
from deep_ep._ep_handle import EPHandle
from deep_ep._handles import Link
from deep_ep._latency_handles import LatencyLink
from deep_ep._num_sms import NotAConfig, Suggested
from deep_ep._steps import Steps, ids_of_all, rows_for_all
from deep_ep._streams import lane_of
from deep_ep.utils.event import EventOverlap
from ferry import InvalidArgument
from ferry.frontend import BufferCalls, deep_ep_calls, refuse_in_handler

_RANKS_PER_NODE = 8  # of the first generation

# Classes that native calls create or accept.
_TYPES = (EventOverlap, Suggested, NotAConfig, Link, EPHandle, LatencyLink)


def _size_of(group: Any, comm: Any) -> int:
    """R; 0 if it is no group, which ferry.Group refuses."""
    size = getattr(group, "size", None) if group is not None else comm.Get_size
    return size() if callable(size) else 0


class Member:
    """This rank of a buffer's ferry group. Creating one is collective."""

    def __init__(
        self,
        group: Any,
        comm: Any,
        device: torch.device | str | int | None,
        timeouts_s: Mapping[str, float],
        latency_bytes: int = 0,
        mask_lost_ranks: bool = False,
        ranks_per_node: int | None = None,
        service_level: int | None = None,
        network_paths: int | None = None,
    ) -> None:
        """timeouts_s: bounds of a wait for another rank, by type of device. ranks_per_node: as of
        :func:`choose_ranks_per_node`. service_level: ``network_service_level`` of ferry.Group. The others: as of
        ferry.Group.
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
            network_service_level=service_level,
            network_paths=network_paths,
        )
        self.rank = self._group.rank
        self.num_ranks = self._group.num_ranks
        self.ranks_per_node = self._group.ranks_per_node
        # Done here, so that no later call is the first to allocate memory or load kernels, possibly during capture.
        ids = ids_of_all(self.num_ranks).to(self.device)
        self._to_all: ferry.Routing | None = self._group.route(ids, num_experts=self.num_ranks)
        self._nothing = rows_for_all(torch.zeros(1, dtype=torch.int32, device=self.device), self.num_ranks)
        self._captured: list[ferry.Routing] = []
        self.calls: BufferCalls | None = deep_ep_calls(
            self._group,
            types=_TYPES,
            steps=Steps(self._group, self.lane),
            captured=self._captured,
            to_all=self._to_all,
            narrow_ids=_ids.topk_idx_t == torch.int32,
        )
        """The native calls; None once destroyed."""
        self.counted_ranks_per_node = self.ranks_per_node if self.num_nodes > 1 else _RANKS_PER_NODE
        """Ranks of a node as get_dispatch_layout counts them: those of the first generation where all share memory."""
        self._group.poll()

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

    def refuse(self, operation: str) -> NoReturn:
        """Refuse a call of a buffer that was destroyed: ``calls or refuse(...)``."""
        raise InvalidArgument(f"{operation}: the buffer was destroyed; create a new one")

    def wait_for_all(self, on_host: bool, joins_lane: bool = False) -> None:
        """A barrier of all ranks: on the stream, or on the host too. joins_lane: asynchronous calls are over first."""
        if self._group is None:
            self.refuse("barrier")
        if joins_lane:
            self.lane.join()
        self._group.dispatch(self._to_all, self._nothing, tables=False)
        self._group.poll()
        if on_host:
            self.lane.synchronize()

    def destroy(self) -> None:
        """Collective, and only the first time: wait until all ranks are done, then free the memory."""
        if self._group is not None:
            refuse_in_handler(self._group, "destroy")
        group, self._group = self._group, None
        self._to_all = None
        self.calls = None
        self._captured.clear()
        if group is not None:
            group.destroy()
