"""ElasticBuffer: the second generation's class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from deep_ep._absent import AbsentFamilies
from deep_ep._arguments import RESOURCES, check_unknown
from deep_ep._elastic_calls import ElasticCalls, Payload
from deep_ep._ep_handle import EPHandle
from deep_ep._num_sms import ELASTIC_NUM_SMS, Suggested
from deep_ep.utils.event import EventHandle, EventOverlap
from ferry.frontend import eager

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["EPHandle", "ElasticBuffer"]


_SERVICE_LEVEL = Suggested(3)


class ElasticBuffer(AbsentFamilies, ElasticCalls):
    """The ranks of an expert-parallel group, and dispatch and combine among them. Creating one is collective.

    Shapes: T tokens of this rank, H hidden, K experts per token, E experts, L local experts, R ranks, M
    ``num_max_tokens_per_rank``, N received rows.

    group: a torch process group, used only while the buffer is created; or None and ``comm``, an mpi4py communicator.
    num_bytes: kept as an attribute; by default :meth:`get_buffer_size_hint` of the shape. Memory is taken as needed.
    num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch: the shape. M bounds later calls.
    allow_multiple_reduction: False: combine sums in fp32 over all ranks and rounds once; True: it rounds on each rank
        first, if the handle is expanded, and on each node, if there are several, and sends half the bytes.
    num_cpu_timeout_secs, num_gpu_timeout_secs: bounds every wait for another rank, on the CPU or on GPUs.
    sl_idx, num_allocated_qps: where network cards connect nodes, the InfiniBand service level (RoCE v2: Ethernet
        priority) of 0 to 15, and connections of a card to each rank of another host, at most 16. Their defaults leave
        both to the network.
    num_cpu_bytes, deterministic (results always are), allow_hybrid_mode, prefer_overlap_with_compute: accepted, without
        effect.
    explicitly_destroy: kept as an attribute; :meth:`destroy` may be called either way, but need not be.
    device: of all tensors. By default that of the environment variable DEEP_EP_DEVICE, else the current GPU, or the CPU
        if there is none.
    ranks_per_node: as of :class:`deep_ep.Buffer`.
    Unknown arguments, here and of all calls, raise TypeError, features of forks NotImplementedError.

    Raises :class:`ferry.FerryError` subclasses; wrong arguments are ``ferry.InvalidArgument``, a ValueError, on all
    ranks of a call.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = _SERVICE_LEVEL,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        device: torch.device | str | int | None = None,
        comm: Any = None,
        ranks_per_node: int | None = None,
        **unknown: Any,
    ) -> None:
        check_unknown("ElasticBuffer", unknown, RESOURCES)
        super().__init__(
            group=group,
            comm=comm,
            device=device,
            ranks_per_node=ranks_per_node,
            num_bytes=num_bytes,
            num_cpu_bytes=num_cpu_bytes,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            use_fp8_dispatch=use_fp8_dispatch,
            allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction,
            sl_idx=sl_idx,
            num_allocated_qps=num_allocated_qps,
            num_cpu_timeout_secs=num_cpu_timeout_secs,
            num_gpu_timeout_secs=num_gpu_timeout_secs,
            explicitly_destroy=explicitly_destroy,
        )

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(scale-out ranks, scale-up ranks): the nodes, and the ranks of a node."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Multiprocessors to leave for calls, a constant. As ``num_sms=`` of a call it leaves the choice to Ferry."""
        return ELASTIC_NUM_SMS

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Collective: later work on the current stream waits until all ranks have reached this point; with
        ``with_cpu_sync`` the host waits, too. The other arguments are accepted, without effect.
        """
        self._member.wait_for_all(with_cpu_sync)

    @eager
    def dispatch(
        self,
        x: Payload,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        **unknown: Any,
    ) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send each token to the ranks of its experts, once per rank. Collective.

        x: [T, H] contiguous, rows of multiples of 16 bytes, T <= M; or (FP8 rows [T, H], scales [T, S] f32 or i32 of
            any strides).
        topk_idx: [T, K] ``deep_ep.topk_idx_t``, contiguous, -1 for no expert; topk_weights: [T, K] f32, optional.
        cumulative_local_expert_recv_stats: [L] i32, to which the tokens of each local expert are added.
        num_experts: E, a multiple of R. num_max_tokens_per_rank: M, the same on all ranks; at most the buffer's, which
            is the default. expert_alignment: by default 1.
        previous_event: event to wait for instead of the current stream. previous_event_before_epilogue: event for which
            the last part of the call waits in addition. async_with_compute_stream: the returned event must be waited
            for.
        handle: of an earlier dispatch, whose routing this payload reuses, expanded or not as before. Only x, weights
            and the form of the output are new; tokens are not counted again.
        do_handle_copy: False keeps ``topk_idx`` itself in the handle.
        do_cpu_sync: by default True: outputs have as many rows as arrive. False: the host does not wait, outputs have R
            * M rows (expanded: R * M * min(K, L), and room for the gaps), ids are -1 past the last.
        do_expand: one row per (token, local expert), grouped by expert, each group at a multiple of expert_alignment,
            and inside a group by source. A token that names an expert twice has one row, and its weights are added.
        do_zero_padding: clear rows without a token.
        use_tma_aligned_col_major_sf: scales are returned with strides (1, rows rounded up to 4).
        num_sms: the most multiprocessors to use on a GPU; 0: as many as fill the links. num_qps,
            allocate_on_comm_stream: accepted, without effect.

        Returns the rows (with their scales, if any were given) ordered by source rank, then token; local expert ids
        [N, K], or None if expanded; weights [N, K], 0 where the expert is on another rank, or [rows] if expanded; the
        handle; and the event.
        """
        return self._dispatch(
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            num_sms,
            previous_event,
            previous_event_before_epilogue,
            async_with_compute_stream,
            handle,
            do_handle_copy,
            do_cpu_sync,
            do_expand,
            do_zero_padding,
            use_tma_aligned_col_major_sf,
            False,
            unknown,
            None,
        )

    @eager
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        **unknown: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Return the rows and sum each token's, in fp32 and in a fixed order. Collective.

        x: bf16, contiguous: [N, H]; with an expanded handle any number of rows, of which those are summed that
            ``handle.recv_src_metadata[:, 2:]`` names at the time of the call. Other rows may hold anything.
        topk_weights: f32, [N, K], or [rows of x] if expanded, summed in the same way. They do not scale x.
        bias: one or two [T, H] bf16, added first. num_sms: as in :meth:`dispatch`; 0: the handle's. Events as there.

        Returns the sums [T, H] bf16; those of the weights [T, K] f32, or None; and the event.
        """
        return self._combine(
            x,
            handle,
            topk_weights,
            bias,
            num_sms,
            previous_event,
            previous_event_before_epilogue,
            async_with_compute_stream,
            False,
            unknown,
            None,
        )
