"""Groups, and their calls on torch tensors."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ferry import _native
from ferry._bootstrap import Members, bootstrap_for, bootstrap_of
from ferry._eager import eager
from ferry._errors import InvalidArgument, PeerLost
from ferry._group_arguments import (
    ARRIVAL_TIMEOUT_S,
    CALL_TIMEOUT_S,
    DEFAULT_ARENA_BYTES,
    MASK_TIMEOUT_S,
    check_least,
    check_text,
    device_of,
    network_poll_ns,
    timeout_ns,
    whole,
)
from ferry._latency import InFlight, LatencyCalls
from ferry._memory import memory_of
from ferry._network import NetworkUsage, RailUsage
from ferry._placement import LoadCounters, Placement
from ferry._quantize import Quantization, WireFormat
from ferry._routing import ChannelTables, Combined, Layout, Received, Routing, check_routing

if TYPE_CHECKING:
    import torch.distributed as dist

_keys = itertools.count(1)
_groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()


def group_of(key: int) -> Group:
    """The group with this :attr:`Group.key`."""
    group = _groups.get(key)
    if group is None:
        raise InvalidArgument(f"group is {key}, expected the key of a ferry.Group of this process that still exists")
    return group


class Group(LatencyCalls):
    """The ranks that exchange tokens. Creating one is collective, and so are route, dispatch and combine.

    Parameters
    ----------
    group: a ``torch.distributed`` process group: its ranks are the ranks of this group.
    comm: an mpi4py communicator instead (only ``Get_rank``, ``Get_size`` and ``allgather`` are used).
    members: a :class:`ferry.Membership` instead: its present view has the ranks.
        With none of these, the variables of torchrun, mpirun or srun define the ranks.
    device: where the tensors of all calls are: the CPU or a GPU. By default the current GPU for an nccl process group,
        else the CPU. Calls on GPU tensors put work on torch's current stream and return; only a route whose rows are
        not bounded waits for its counts.
    timeout: seconds (or a timedelta) that any call waits for another rank before it raises :class:`ferry.Timeout`, and
        that a launcher's ranks have to arrive. By default 600 for calls and 50 to arrive. A rank that dies or leaves
        its group is noticed within a second, whatever the timeout.
    arena_bytes: most symmetric memory that this rank can use; address space only, memory is taken as needed.
    ranks_per_node: ranks that share memory, consecutive ones; 0: those of each host. Fewer than a host has emulate
        nodes on it. The same on every rank. Calls that do not yet support GPU tensors over several nodes raise
        :class:`ferry.Unsupported`.
    transport: the network between nodes: "auto" (the best one available) or "ucx". The same on every rank.
    ring_memory: memory of the rings between nodes, for ranks with GPUs: "host", "gpu" (GPUDirect; has not run on a
        card) or "auto" (the variable FERRY_RING_MEMORY if it is set, else "gpu" where all ranks can, else "host").
        The same on every rank.
    net_devices: devices through which ranks of other hosts may reach this rank, separated by commas ("eth0",
        "mlx5_0:1,mlx5_1:1"). By default the variable FERRY_NET_DEVICES, else the port of an RDMA card nearest to the
        GPU (for CPU tensors every active port) and the one interface that leads to rank 0.
    tuning_file: on GPUs, kernel settings that ``ferry tune --out`` wrote; may differ by rank. By default the file that
        the variable FERRY_TUNING names, if it is set; "builtin": none.
    latency_bytes: on GPUs, memory for :meth:`latency_dispatch` and :meth:`latency_combine`, at least
        :func:`ferry.latency_bytes_required`; 0: the group makes no such calls. The same on every rank.
    mask_lost_ranks: calls of latency mode continue without lost ranks, see :meth:`latency_update_mask`, instead of
        raising; all other calls still need every rank. Ranks of one node only. The same on every rank.
    mask_timeout: seconds (or a timedelta) that such a call waits for a rank that lives before it masks it. By default
        100. The same on every rank.
    num_reserved_sms: multiprocessors of the GPU on which Ferry's kernels do not wait for other ranks, so that NCCL's,
        which wait too, always get to run beside them; 0: none. A call with ``num_sms`` takes that number instead. By
        default the variable FERRY_RESERVED_SMS if it is set, else 32, as many as an NCCL kernel takes, or 0 where ranks
        share a GPU. May differ by rank.
    network_poll: on GPUs of several nodes, seconds (or a timedelta) that the thread which drives the network polls
        after the last movement; later a replayed graph waits up to 20 ms until it is awake. ``math.inf``: it never
        sleeps and takes a core from the first call on. By default the variable FERRY_NETWORK_POLL (seconds, or
        "always") if it is set, else 1. May differ by rank.
    network_service_level: InfiniBand service level, 0 to 15, of what this rank sends to other hosts by a network card;
        on RoCE v2 the Ethernet priority. By default UCX's choice. It has no effect without a card, see
        :meth:`network_usage`. May differ by rank.
    network_paths: connections of a card to each rank of another host, 1 to 16. By default UCX's choice; as
        network_service_level otherwise.
    num_ranks: with ``members``, the number of ranks of a group of which some may be absent: the ids of the view are the
        ranks that are present. The others are absent until :meth:`renew` brings them in: calls of latency mode are made
        without them, others raise InvalidArgument. For a process that takes a lost one's place while the others renew
        their group; also for all processes from the beginning. By default as many ranks as there are members, whatever
        their ids. The same on every rank that creates the group.
    verify: rows carry checksums from their source to their final row, and each row that is summed is checked: a wrong
        one raises :class:`ferry.DataCorrupt`, which names the hop. Calls take longer. Where it is not covered,
        :class:`ferry.Unsupported` is raised. The same on every rank.

    Raises :class:`ferry.FerryError` subclasses; the process group is used only while the group is created.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        comm: Any = None,
        members: Members | None = None,
        device: torch.device | str | int | None = None,
        timeout: float | datetime.timedelta | None = None,
        arena_bytes: int = DEFAULT_ARENA_BYTES,
        ranks_per_node: int = 0,
        transport: str = "auto",
        ring_memory: str = "auto",
        net_devices: str = "",
        tuning_file: str = "",
        latency_bytes: int = 0,
        mask_lost_ranks: bool = False,
        mask_timeout: float | datetime.timedelta = MASK_TIMEOUT_S,
        num_reserved_sms: int | None = None,
        network_poll: float | datetime.timedelta | None = None,
        network_service_level: int | None = None,
        network_paths: int | None = None,
        num_ranks: int | None = None,
        verify: bool = False,
    ) -> None:
        self.device = device_of(device, group)
        check_least("arena_bytes", arena_bytes, 1)
        check_least("ranks_per_node", ranks_per_node, -1)
        check_least("latency_bytes", latency_bytes, 0)
        check_least("num_reserved_sms", num_reserved_sms, 0, or_none=True)
        check_least("network_service_level", network_service_level, 0, or_none=True)
        check_least("network_paths", network_paths, 1, or_none=True)
        check_least("num_ranks", num_ranks, 1, or_none=True)
        check_text("transport", transport)
        check_text("ring_memory", ring_memory)
        check_text("net_devices", net_devices)
        check_text("tuning_file", tuning_file)
        poll_ns = network_poll_ns(network_poll)
        if num_ranks is not None and members is None:
            raise InvalidArgument(f"Group: num_ranks is {num_ranks} without members=, whose ids are the present ranks")
        call_timeout_ns = timeout_ns(CALL_TIMEOUT_S if timeout is None else timeout)
        arrival_timeout_ns = timeout_ns(ARRIVAL_TIMEOUT_S if timeout is None else timeout)
        bootstrap = bootstrap_for(group, comm, arrival_timeout_ns, members=members)
        on_gpu = self.device.type == "cuda"
        self._native = _native.create_group(
            bootstrap,
            self.device.type,
            self.device.index if on_gpu else -1,
            call_timeout_ns,
            arena_bytes,
            ranks_per_node,
            transport,
            ring_memory,
            net_devices,
            tuning_file,
            latency_bytes,
            bool(mask_lost_ranks),
            timeout_ns(mask_timeout, name="mask_timeout"),
            -1 if num_reserved_sms is None else num_reserved_sms,
            poll_ns,
            -1 if network_service_level is None else network_service_level,
            0 if network_paths is None else network_paths,
            num_ranks or 0,
            list(members.view.ids) if members is not None and num_ranks is not None else [],
            bool(verify),
        )
        self._in_flight = InFlight()
        self._memory = memory_of(self._native, self.device)
        self._calls = self._native.calls(self._memory, (Routing, Received, Combined, Placement, LoadCounters))
        self.key = next(_keys)
        """A number that identifies this group to :mod:`ferry.ops` in this process."""
        _groups[self.key] = self

    def __del__(self) -> None:
        memory = getattr(self, "_memory", None)
        if memory is not None:
            with contextlib.suppress(Exception):  # an exception here would only be printed
                memory.close()

    @property
    def rank(self) -> int:
        """This rank, 0 to ``num_ranks - 1``."""
        return self._native.rank

    @property
    def num_ranks(self) -> int:
        """R."""
        return self._native.num_ranks

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share memory: rank r is in node ``r // ranks_per_node``."""
        return self._native.ranks_per_node

    @property
    def backend(self) -> str:
        """Name of the backend that moves the bytes, e.g. "cpu"."""
        return self._native.backend

    def network_usage(self) -> NetworkUsage:
        """Bytes that this rank has sent to other nodes so far, and the network. No rails with one node. Local."""
        transport, rails, net_devices, ring_memory, level, paths, why_host = self._native.network_usage()
        return NetworkUsage(
            transport,
            tuple(RailUsage(*rail) for rail in rails),
            net_devices,
            ring_memory,
            None if level < 0 else level,
            paths or None,
            why_host,
        )

    @property
    def wait_times_ns(self) -> list[int]:
        """[R] nanoseconds that calls of this rank have waited so far for each rank: a slow rank shows in the other
        ranks' numbers for it. On GPUs kernels count, and this property does not wait for them.
        """
        return self._native.wait_times_ns()

    @eager
    def trim(self) -> None:
        """Free the staging memory of earlier calls; later calls allocate it again as needed. Local: ranks need not
        agree on when.

        On CPUs the system gets the memory. On a GPU it goes back to this rank's arena, for ``empty`` and later calls,
        once the calls that use it have finished. Raises ``FerryError`` if the group was destroyed or is broken.
        """
        self._native.trim()

    def __repr__(self) -> str:
        return f"ferry.Group(rank {self.rank} of {self.num_ranks}, {self.device})"

    @eager
    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """An uninitialised tensor in symmetric memory, which peers access without a staging copy. Local, not
        collective.

        Speeds up outputs of dispatch and inputs of combine. The memory is freed with the last tensor that uses it; on a
        GPU in stream order, by torch's own allocator, which honours ``record_stream``.
        """
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self._memory.empty(tuple(int(size) for size in sizes), dtype)

    @eager
    def route(
        self,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        num_experts: int,
        layout: Layout = "tokens",
        expert_alignment: int = 1,
        slab_capacity: int = 0,
        max_recv_rows: int = 0,
        max_tokens: int = 0,
        num_sms: int = 0,
        expert_to_rank: Sequence[int] | None = None,
        placement: Placement | None = None,
        counters: LoadCounters | None = None,
    ) -> Routing[Group]:
        """Exchange counts and determine where every token goes. Collective.

        topk_idx: [T, K] i32 or i64, contiguous: global expert ids, -1 for none; duplicates are allowed.
        topk_weights: [T, K] f32, contiguous; sent with the tokens.
        layout: "tokens": one row per token that picked any expert here; "experts": one per (token, local expert),
            grouped by expert, groups starting at multiples of ``expert_alignment``; "slab": ``slab_capacity`` rows for
            each local expert.
        max_recv_rows: outputs have this many rows instead of as many as arrive; if more arrive, CapacityExceeded is
            raised.
        max_tokens: bound on T of any rank, the same on every rank, for routes whose rows are bounded on all of them.
            Over several nodes GPUs then route without the host, so that a graph may capture it. More tokens raise
            CapacityExceeded. Changes no result.
        num_sms: on a GPU, the most multiprocessors that its kernels use; 0: all, over several nodes 24.
        expert_to_rank: the owner of each expert; by default contiguous blocks of experts, evenly distributed.
        placement: replaces ``expert_to_rank`` if experts have several homes or some places are empty. The Routing and
            the results of dispatch then refer to physical experts. It may differ in each call.
        counters: this call adds its counts to them, without a wait.
        """
        routing = self._calls.route(
            self,
            topk_idx,
            topk_weights,
            num_experts,
            layout,
            expert_alignment,
            slab_capacity,
            max_recv_rows,
            max_tokens,
            num_sms,
            expert_to_rank,
            placement,
            counters,
        )
        if self._in_flight.calls_dropped:
            self._in_flight.made_whole()
        return routing

    @eager
    def dispatch(
        self,
        routing: Routing,
        x: torch.Tensor,
        *,
        scales: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        out_scales: torch.Tensor | None = None,
        out_source: torch.Tensor | None = None,
        tables: bool = True,
        zero_padding: bool = False,
        num_sms: int = 0,
        quantize: Quantization | None = None,
    ) -> Received:
        """Send each token to the ranks of its experts. Collective; may be called many times with one Routing.

        x: [T, H] of any dtype whose rows are whole multiples of 16 bytes. scales: [T, S] f32, i32 or u8, any strides.
        topk_weights: [T, K] f32 to send in place of those given to route.
        out, out_scales: where to receive ([N, H] and [N, S]); by default new tensors, ``out`` in symmetric memory. They
        share no memory with each other or with tensors that are sent.
        out_source: [N, 2] i32, contiguous: receives the source rank and token of each row, -1 where there is none;
        given on all ranks or on none.
        tables: False omits ids and weights; the same on every rank.
        zero_padding: clear rows that hold no token; otherwise they are unchanged in ``out``.
        num_sms: on a GPU, the most multiprocessors to use; 0: the number measured to saturate the links.
        quantize: turn bf16 rows into FP8 or INT8 on their way, as :func:`ferry.quantize` would; then no ``scales`` are
        given and ``Received.scales`` has those of each row. The same on every rank.
        """
        received = self._calls.dispatch(
            self,
            routing,
            x,
            scales,
            topk_weights,
            out,
            out_scales,
            out_source,
            bool(tables),
            bool(zero_padding),
            num_sms,
            quantize,
        )
        if self._in_flight.calls_dropped:
            self._in_flight.made_whole()
        return received

    @eager
    def combine(
        self,
        routing: Routing,
        x: torch.Tensor,
        *,
        weights: torch.Tensor | None = None,
        bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
        weighted: bool = False,
        topk_weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        num_sms: int = 0,
        wire_format: WireFormat | None = None,
    ) -> Combined:
        """Return the rows to their source ranks and sum each token's, in fp32 and in a fixed order. Collective.

        x: [N, H] bf16 or f32, one row per received row. weights: f32, shaped as ``Received.topk_weights``, to sum back.
        bias: one or two [T, H] tensors of x's dtype, added to this rank's tokens.
        weighted: False sums each row once; True sums weight * row over the token's experts, with the weights given to
        route or, in their place, ``topk_weights`` [T, K] f32.
        out: [T, H] of x's dtype for the sums; by default a new tensor. It may be a tensor of ``bias``, otherwise it
        shares no memory with the inputs.
        num_sms: as for dispatch.
        wire_format: "fp8" quantises every row on its way, as :func:`ferry.quantize` would, and sums the values that
        result: about half the bytes of bf16. H is a multiple of 128, and all ranks are on one node. The same on every
        rank. None: rows travel as they are.
        """
        combined = self._calls.combine(
            self, routing, x, weights, bias, bool(weighted), topk_weights, out, num_sms, wire_format
        )
        if self._in_flight.calls_dropped:
            self._in_flight.made_whole()
        return combined

    @eager
    def channel_tables(self, routing: Routing, num_channels: int) -> ChannelTables:
        """Describe a routing of layout "tokens" by channels, as other libraries hand it to their users. Local.

        num_channels: C; a channel has ceil(T / C) tokens, the last ones fewer.
        """
        check_routing(routing, "channel_tables")
        channels, ranks, device = whole("num_channels", num_channels, "channel_tables"), self.num_ranks, self.device
        if channels < 1:
            raise InvalidArgument(f"channel_tables: num_channels is {channels}, expected at least 1")
        shapes = (
            (ranks, ranks),
            (ranks, channels),
            (ranks, channels),
            (routing.num_recv_rows,),
            (routing.num_tokens, ranks),
        )
        tables = ChannelTables(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))
        self._native.channel_tables(routing._native, channels, tuple(tables), self._memory.stream())
        return tables

    @eager
    def wait(self) -> None:
        """Wait until the current stream is idle, and raise errors of calls so far: on a GPU, a call itself can only
        report wrong arguments of this rank. Local.
        """
        self._native.wait(self._memory.stream())

    @eager
    def poll(self) -> None:
        """Raise the error that :meth:`wait` would raise for calls that have run by now, without waiting for any.
        Local.
        """
        self._native.poll()

    @eager
    def suspend(self) -> tuple[int, ...]:
        """End this rank's part in the group until :meth:`renew`. Local, for groups of one node.

        For a rank that has lost another one and calls :meth:`Membership.next_view`: calls of ranks that still wait for
        it raise PeerLost soon, or mask it at once where the group masks lost ranks, so a step that they are in does not
        count. Other calls raise InvalidArgument until renew, but the group may be destroyed. Waits until this rank's
        calls have run; replays of captured graphs must be done.

        Returns the silent ranks, for the ``silent_ids`` of next_view, ascending, without absent ones. If the group
        masks lost ranks and is not broken: those that this rank has masked and that did not mask it. Else those whose
        processes have ended and, after a Timeout, the one that it named. Raises InvalidArgument if the group is
        suspended or was destroyed, and Unsupported over several nodes; then nothing has changed.
        """
        return self._native.suspend()

    @eager
    def renew(self, members: Members) -> None:
        """Go on with the members that are there now, whose ids are their ranks in this group. Collective over them.

        Ranks that stay call it, suspended or between calls, while no replay of a graph runs. Processes that take the
        place of lost ones call :meth:`Membership.group` with this group's options and its ``num_ranks``. One node only.

        What stays: rank and options, tensors of ``empty``, and on a GPU all memory at its addresses, so captured graphs
        of latency mode remain valid with their routings; a new process makes the calls of such a graph with the same
        arguments. What ends: other routings, split calls that were not received, an error that broke the group, and all
        masks. Then calls of latency mode are made without the absent ranks: those are masked on every rank, and no
        others, if the group masks lost ranks. On CPUs tensors of ``empty`` are ordinary
        memory from then on.

        members: a :class:`ferry.Membership` that began with the ranks of this group.

        Raises PeerLost soon after a member has died or has asked for the next view; InvalidArgument also if an id is no
        rank of this group; Unsupported over several nodes; otherwise as the constructor. The group makes no calls then,
        until it is renewed for the members' next view.
        """
        bootstrap = bootstrap_of(members, "renew")
        self._native.refuse_in_handler("renew")
        self._native.renew(bootstrap, list(members.view.ids))
        self._in_flight.clear()

    @eager
    def destroy(self) -> None:
        """Collective and optional: wait until all ranks are done with the group, then free its memory.

        Tensors and routings keep the memory that they use. Later calls raise InvalidArgument.
        """
        self._native.refuse_in_handler("destroy")
        try:
            self._native.destroy()
        except PeerLost as error:
            if error.peer != self.rank:  # else a signal's handler raised here, and its error is on its way
                raise
        finally:
            self._in_flight.clear()
            self._memory.close()
