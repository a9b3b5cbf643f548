"""EPBuffer: the class of release 2.5, for experts alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from deep_ep._absent import AbsentReplicas, refusal
from deep_ep._arguments import RESOURCES, check_unknown
from deep_ep._deferred import check_deferred
from deep_ep._elastic_calls import ElasticCalls, Payload
from deep_ep._ep_handle import EPHandle
from deep_ep._num_sms import ELASTIC_NUM_SMS
from deep_ep.utils.event import EventHandle, EventOverlap
from ferry import InvalidArgument
from ferry.frontend import eager

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["EPBuffer", "EPHandle"]


class EPBuffer(AbsentReplicas, ElasticCalls):
    """The ranks of an expert-parallel group, and dispatch and combine among them. Creating one is collective.

    Shapes and arguments are those of :class:`deep_ep.ElasticBuffer`, in the order of release 2.5, but for these:

    lb_allocation_plan_or_num_bytes: anything but 0 raises NotImplementedError, as do ``lb_*``: memory for replicas of
        experts, and the calls that fill it, do not exist here.
    deterministic (results always are), allow_hybrid_mode, prefer_overlap_with_compute: accepted, without effect.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: Any = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
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
        check_unknown("EPBuffer", unknown, RESOURCES)
        if not isinstance(lb_allocation_plan_or_num_bytes, int) or lb_allocation_plan_or_num_bytes != 0:
            raise refusal("EPBuffer: lb_allocation_plan_or_num_bytes")
        super().__init__(
            group=group,
            comm=comm,
            device=device,
            ranks_per_node=ranks_per_node,
            num_bytes=num_bytes,
            num_cpu_bytes=0,
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
        self.allow_hybrid_mode = allow_hybrid_mode
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.deterministic = deterministic
        self.num_lb_bytes = 0

    def get_logical_domain_size(self, allow_hybrid_mode: bool | None = None) -> tuple[int, int]:
        """(scale-out ranks, scale-up ranks): the nodes, and the ranks of a node, for any ``allow_hybrid_mode``."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        """Multiprocessors to leave for calls, a constant. As ``num_sms=`` of a call it leaves the choice to Ferry."""
        return ELASTIC_NUM_SMS

    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
        context_idx: int | None = None,
    ) -> None:
        """Collective: later work on the current stream waits until all ranks have reached this point, and with
        ``wait_comm_stream`` until this rank's asynchronous calls are over. With ``with_cpu_sync`` the host waits, too.

        sequential: accepted, without effect. context_idx: None, since a buffer has one process group.
        """
        if context_idx is not None:
            raise InvalidArgument(f"barrier: context_idx is {context_idx!r}, expected None")
        self._member.wait_for_all(with_cpu_sync, joins_lane=wait_comm_stream)

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
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
        **unknown: Any,
    ) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap] | EventOverlap:
        """Send each token to the ranks of its experts, once per rank. Collective.

        Arguments and results are those of :meth:`deep_ep.ElasticBuffer.dispatch`, but for these:

        do_handle_copy: True is refused. The handle keeps ``topk_idx`` itself, which must not change while the handle,
            or a copy of it, is in use.
        defer_epilogue: return the event alone, whose ``wait()`` (or ``current_stream_wait()``) returns (rows, ids,
            weights, handle). Expanded rows, and the tables of a new handle, are made then, on the stream that is
            current then. The exchange itself, and the host's wait for its counts, are part of this call. Needs
            async_with_compute_stream=True. Rows and scales must not change before the wait. Wait on every rank before
            the buffer is destroyed; the ranks may wait for their events in any order.
        """
        problem = check_deferred("dispatch", defer_epilogue, async_with_compute_stream)
        if do_handle_copy:
            problem = InvalidArgument(
                "dispatch: do_handle_copy is True, expected False; the handle keeps topk_idx itself, so pass "
                "topk_idx.clone() if yours changes"
            )
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
            None,
            async_with_compute_stream,
            handle,
            False,
            do_cpu_sync,
            do_expand,
            do_zero_padding,
            use_tma_aligned_col_major_sf,
            bool(defer_epilogue),
            unknown,
            problem,
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
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
        **unknown: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap] | EventOverlap:
        """Return the rows and sum each token's, in fp32 and in a fixed order. Collective.

        Arguments and results are those of :meth:`deep_ep.ElasticBuffer.combine`, but for this:

        defer_epilogue: return the event alone, whose ``wait()`` (or ``current_stream_wait()``) returns (sums, sums of
            the weights or None). The sums are made with the exchange, in this call; where they are rounded once, they
            are converted to bf16 at the wait. As for :meth:`dispatch` otherwise.
        """
        return self._combine(
            x,
            handle,
            topk_weights,
            bias,
            num_sms,
            previous_event,
            None,
            async_with_compute_stream,
            bool(defer_epilogue),
            unknown,
            check_deferred("combine", defer_epilogue, async_with_compute_stream),
        )
