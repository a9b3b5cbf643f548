"""Buffer: the first generation's class."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from deep_ep import _config
from deep_ep._arguments import RESOURCES, check_unknown
from deep_ep._config import Config
from deep_ep._latency import LatencyCalls
from deep_ep._latency_handles import CombineMemory
from deep_ep._member import Member
from deep_ep._num_sms import Suggested, chunk_of_config, of_config, paths_of
from deep_ep._run import run_in_order
from deep_ep.utils.event import EventHandle, EventOverlap
from ferry import FerryError, InvalidArgument
from ferry.frontend import check_least, eager

if TYPE_CHECKING:
    import torch.distributed as dist

    import ferry

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

# How long the first generation's receivers wait before they consider a rank lost.
_TIMEOUTS_S = {"cpu": 100.0, "cuda": 100.0}

_NUM_QPS = Suggested(24)


class Buffer(LatencyCalls):
    """The ranks of an expert-parallel group, and dispatch and combine among them. Creating one is collective.

    Shapes: T tokens of this rank, H hidden, K experts per token, E experts, R ranks, N received rows.

    group: a torch process group, used only while the buffer is created; or None and ``comm``, an mpi4py communicator.
    num_nvl_bytes, num_rdma_bytes: kept as attributes; they size ``get_local_buffer_tensor``.
    low_latency_mode: whether calls of latency mode may be made; on GPUs they get ``num_rdma_bytes`` of memory, of which
        :meth:`get_low_latency_rdma_size_hint` gives the necessary number. The same on every rank.
    num_qps_per_rank: where network cards connect nodes, connections of a card to each rank of another host, at most 16;
        its default leaves the number to the network.
    allow_nvlink_for_low_latency_mode, allow_mnnvl: accepted, without effect.
    explicitly_destroy: kept as an attribute; :meth:`destroy` may be called either way, but need not be.
    enable_shrink: calls of latency mode continue without lost ranks, see
        :meth:`low_latency_update_mask_buffer`, instead of raising; all other calls still need every rank. Ranks of one
        node; others raise NotImplementedError. The same on every rank.
    device: of all tensors. By default that of the environment variable DEEP_EP_DEVICE, else the current GPU, or the CPU
        if there is none.
    ranks_per_node: ranks that share memory, consecutive ones; ranks of different nodes exchange over the network. By
        default that of the environment variable DEEP_EP_RANKS_PER_NODE; 0, if that is not set either: as of
        :class:`ferry.Group`. A group of fewer ranks is one node.
    Unknown arguments, here and of all calls, raise TypeError, features of forks NotImplementedError.

    Raises :class:`ferry.FerryError` subclasses; wrong arguments are ``ferry.InvalidArgument``, a ValueError, on all
    ranks of a call.
    """

    num_sms: int = _config.DEFAULT_NUM_SMS

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = _NUM_QPS,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        device: torch.device | str | int | None = None,
        ranks_per_node: int | None = None,
        **unknown: Any,
    ) -> None:
        check_unknown("Buffer", unknown, RESOURCES)
        for name, value in (("num_nvl_bytes", num_nvl_bytes), ("num_rdma_bytes", num_rdma_bytes)):
            check_least(name, value, 0, operation="Buffer")
        latency_bytes = num_rdma_bytes if low_latency_mode else 0
        self._member = Member(
            group,
            comm,
            device,
            _TIMEOUTS_S,
            latency_bytes,
            bool(enable_shrink),
            ranks_per_node=ranks_per_node,
            network_paths=paths_of(num_qps_per_rank, "Buffer: num_qps_per_rank"),
        )
        self._combine_memory = CombineMemory()
        self._local_memory: dict[bool, torch.Tensor] = {}
        self.group = group
        self.rank = self._member.rank
        self.group_size = self._member.num_ranks
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self.device = self._member.device

    @property
    def runtime(self) -> ferry.Group | None:
        """The group that does the work; None once the buffer is destroyed."""
        return None if self._member.is_destroyed else self._member.group

    def destroy(self) -> None:
        """Collective: wait until all ranks are done with the buffer, then free its memory.

        Optional (a buffer that is only dropped waits for its own GPU), and a no-op the second time. Ranks must destroy
        several buffers in the same order. A rank that does not take part causes a warning after the timeout.
        """
        try:
            self._member.destroy()
        except FerryError as error:
            warnings.warn(f"Buffer.destroy: {error}", stacklevel=2)
        if self._member.is_destroyed:  # not where a signal's handler asked while a call waits
            self._local_memory.clear()
            self._combine_memory.clear()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: FP8 is supported."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set ``Buffer.num_sms``, for all buffers: the most multiprocessors that a dispatch or combine uses on a GPU.

        The number of channels in handles is half of it. Until it is set, Ferry uses as many as fill the links.
        """
        check_least("new_num_sms", new_num_sms, 2, operation="set_num_sms")
        if new_num_sms % 2 != 0:
            raise InvalidArgument(f"set_num_sms: new_num_sms is {new_num_sms}, expected an even number of at least 2")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """``num_rdma_bytes`` for latency mode on GPUs: the bytes that Ferry needs, far fewer than the first generation;
        on the CPU it needs none. For more than 11 choices a token ask :func:`ferry.latency_bytes_required`.
        """
        return _config.low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """A Config for any number of ranks, in the form of the first generation's; see :class:`Config`."""
        return _config.dispatch_config(Buffer.num_sms, num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """As :meth:`get_dispatch_config`."""
        return _config.combine_config(Buffer.num_sms, num_ranks)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that calls run on, shared by all buffers of a GPU. On the CPU an object that never waits."""
        return self._member.lane.comm_stream

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """Scratch memory of ``num_nvl_bytes`` (or ``num_rdma_bytes``), zeroed on first use; no call uses it.

        offset: bytes, a multiple of the element's. size: shape of the result; by default all of it, in one dimension.
        """
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        what = "get_local_buffer_tensor"
        if self._member.is_destroyed:
            raise InvalidArgument(f"{what}: the buffer was destroyed; create a new one")
        if not isinstance(dtype, torch.dtype):
            raise InvalidArgument(f"{what}: dtype is {dtype!r}, expected a torch.dtype")
        check_least("offset", offset, 0, operation=what)
        if offset > num_bytes or offset % dtype.itemsize != 0:
            raise InvalidArgument(
                f"{what}: offset is {offset} bytes, expected a multiple of {dtype.itemsize} from 0 to {num_bytes}"
            )
        if use_rdma_buffer not in self._local_memory:
            self._local_memory[use_rdma_buffer] = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        num_elements = (num_bytes - offset) // dtype.itemsize
        whole = self._local_memory[use_rdma_buffer][offset : offset + num_elements * dtype.itemsize].view(dtype)
        if size is None:
            return whole
        wanted = torch.Size(size)
        if wanted.numel() > num_elements:
            raise InvalidArgument(f"{what}: size is {list(wanted)}, expected at most {num_elements} elements")
        return whole[: wanted.numel()].view(wanted)

    @eager
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count how many tokens go where. Local: no other rank takes part.

        topk_idx: [T, K] ``deep_ep.topk_idx_t``, contiguous; -1 for no expert, duplicates allowed. Other ids are refused
            on CPU ranks, on GPUs by the dispatch. num_experts: E, a multiple of R.

        Returns tokens for each rank [R] i32; tokens for each node [D] i32 (with one node, for each 8 ranks, or None for
        R <= 8); choices of each expert [E] i32 (a token that names an expert twice counts twice); whether a token goes
        to a rank [T, R] bool; and the event.
        """
        what = "get_dispatch_layout"
        member = self._member
        calls = member.calls or member.refuse(what)
        ranks_per_node = member.counted_ranks_per_node
        return run_in_order(
            member,
            what,
            previous_event,
            async_finish,
            None,
            (topk_idx,),
            calls.layout,
            topk_idx,
            num_experts,
            ranks_per_node,
        )

    @eager
    def dispatch(
        self,
        x: Payload,
        handle: tuple | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        **unknown: Any,
    ) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None, list[int] | None, tuple | None, EventOverlap]:
        """Send each token to the ranks of its experts, once per rank. Collective.

        x: [T, H] contiguous, rows of multiples of 16 bytes, bf16 for instance; or (FP8 rows [T, H], scales [T, S] f32
            or i32 of any strides).
        handle: of an earlier dispatch, whose routing this payload reuses; then no counts, ids or weights are given.
        num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert: of
            :meth:`get_dispatch_layout`.
        topk_idx, topk_weights: [T, K] ``deep_ep.topk_idx_t`` and f32, contiguous; both or neither.
        expert_alignment: the returned counts are rounded up to a multiple of it.
        num_worst_tokens: outputs have this many rows, and the host does not wait; more rows raise CapacityExceeded, on
            GPUs in a later call.
        config: its ``num_sms`` replaces ``Buffer.num_sms``; see :meth:`set_num_sms`. Between nodes its
            ``num_max_rdma_chunked_send_tokens`` counts too.
        previous_event: event that the call waits for instead of the current stream.
        async_finish: the returned event must be waited for. Otherwise the current stream waits.
        allocate_on_comm_stream: accepted; outputs always are, and may be used on the current stream.

        Returns the rows [N, H] (with row-major scales, if any were given) ordered by source rank, then token; local
        expert ids [N, K], -1 where the expert is on another rank and in rows past the last; their weights, 0 there; [L]
        entries for each local expert, or [] with num_worst_tokens; the handle; and the event. With ``handle`` only the
        first and the last are not None.
        """
        num_sms = Buffer.num_sms if config is None else of_config(config)
        member = self._member
        calls = member.calls or member.refuse("dispatch")
        if handle is not None:
            return run_in_order(
                member,
                "dispatch",
                previous_event,
                async_finish,
                unknown,
                (x,),
                calls.dispatch_again,
                x,
                handle,
                topk_idx,
                topk_weights,
                chunk_of_config(config),
                num_sms,
            )
        return run_in_order(
            member,
            "dispatch",
            previous_event,
            async_finish,
            unknown,
            (x, topk_idx, topk_weights),
            calls.dispatch,
            x,
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
            chunk_of_config(config),
            num_sms,
        )

    @eager
    def combine(
        self,
        x: torch.Tensor,
        handle: tuple,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        **unknown: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Return the rows and sum each token's, in fp32 and in the order of ranks, rounded once. Collective.

        x: [N, H] bf16, contiguous. handle: of the dispatch. topk_weights: [N, K] f32, summed in the same way. They do
        not scale x. bias: one or two [T, H] bf16, added first. config and events as in :meth:`dispatch`.

        Returns the sums [T, H] bf16; those of the weights [T, K] f32, or None; and the event.
        """
        num_sms = Buffer.num_sms if config is None else of_config(config)
        member = self._member
        calls = member.calls or member.refuse("combine")
        return run_in_order(
            member,
            "combine",
            previous_event,
            async_finish,
            unknown,
            (x, topk_weights, bias),
            calls.combine,
            x,
            handle,
            topk_weights,
            bias,
            chunk_of_config(config),
            num_sms,
        )

    # Names that programs call on several nodes: the same calls, whatever the group has.
    internode_dispatch = dispatch
    internode_combine = combine
