"""What the buffers of the second generation and of its successor have in common."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deep_ep import _domains
from deep_ep._deferred import deferred
from deep_ep._elastic_sizes import check_shape, elastic_bytes
from deep_ep._ep_handle import EPHandle
from deep_ep._member import Member
from deep_ep._num_sms import ELASTIC_NUM_SMS, chosen, paths_of
from deep_ep._run import run_in_order
from deep_ep.utils.event import EventHandle, EventOverlap
from ferry import FerryError, InvalidArgument
from ferry.frontend import check_least

if TYPE_CHECKING:
    import torch.distributed as dist

    import ferry

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_NUM_QPS = 17  # that clients reserve


class ElasticCalls:
    """A buffer, with the methods that both classes have, and the dispatch and combine behind theirs."""

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | None,
        comm: Any,
        device: torch.device | str | int | None,
        ranks_per_node: int | None,
        num_bytes: int | None,
        num_cpu_bytes: int,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        use_fp8_dispatch: bool,
        allow_hybrid_mode: bool,
        allow_multiple_reduction: bool,
        sl_idx: int | None,
        num_allocated_qps: int,
        num_cpu_timeout_secs: int,
        num_gpu_timeout_secs: int,
        explicitly_destroy: bool,
    ) -> None:
        name = type(self).__name__
        check_least("num_bytes", num_bytes, 0, or_none=True, operation=name)
        check_shape(name, num_max_tokens_per_rank, hidden, num_topk)
        if num_bytes is None and (num_max_tokens_per_rank < 1 or hidden < 1):
            raise InvalidArgument(
                f"{name}: num_bytes is None, num_max_tokens_per_rank {num_max_tokens_per_rank} and "
                f"hidden {hidden}, expected num_bytes, or both of the others above 0"
            )
        timeouts = {"cpu": num_cpu_timeout_secs, "cuda": num_gpu_timeout_secs}
        self._member = Member(
            group,
            comm,
            device,
            timeouts,
            ranks_per_node=ranks_per_node,
            service_level=chosen(sl_idx, f"{name}: sl_idx"),
            network_paths=paths_of(num_allocated_qps, f"{name}: num_allocated_qps"),
        )
        self.group = group
        self.device = self._member.device
        self.rank_idx = self._member.rank
        self.num_ranks = self._member.num_ranks
        self.num_scaleout_ranks = self.num_rdma_ranks = self._member.num_nodes
        self.num_scaleup_ranks = self.num_nvlink_ranks = self._member.ranks_per_node
        self.scaleout_rank_idx = self._member.node_idx
        self.scaleup_rank_idx = self._member.rail_idx
        if num_bytes is None:
            num_bytes = num_cpu_bytes + elastic_bytes(
                self.num_scaleout_ranks,
                self.num_scaleup_ranks,
                num_max_tokens_per_rank,
                hidden,
                num_topk,
                use_fp8_dispatch=use_fp8_dispatch,
                allow_hybrid_mode=allow_hybrid_mode,
                allow_multiple_reduction=allow_multiple_reduction,
            )
        self.num_bytes = num_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.allow_multiple_reduction = allow_multiple_reduction
        self.explicitly_destroy = explicitly_destroy
        self.num_allocated_qps = num_allocated_qps or _NUM_QPS
        self.nccl_comm_handle = None

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
            warnings.warn(f"{type(self).__name__}.destroy: {error}", stacklevel=2)

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes that the second generation uses on each rank, a multiple of 2 MiB. num_topk = 0: enough for 32."""
        check_shape("get_buffer_size_hint", num_max_tokens_per_rank, hidden, num_topk)
        return elastic_bytes(
            *_domains.get_logical_domain_size(group, allow_hybrid_mode),
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            use_fp8_dispatch=use_fp8_dispatch,
            allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction,
        )

    @staticmethod
    def capture() -> EventHandle:
        """An event on the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that calls run on, shared by all buffers of a GPU. On the CPU an object that never waits."""
        return self._member.lane.comm_stream

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(nodes, ranks of a node, which reach each other's memory)."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs for this number of multiprocessors, as ``num_qps=`` of calls, which use all that a buffer has."""
        check_least("num_sms", num_sms, 0, operation="get_theoretical_num_qps")
        return max(4, num_sms + num_sms % 2)

    def _dispatch(
        self,
        x: Payload,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        cumulative_local_expert_recv_stats: torch.Tensor | None,
        num_experts: int | None,
        num_max_tokens_per_rank: int | None,
        expert_alignment: int | None,
        num_sms: int,
        previous_event: EventHandle | EventOverlap | None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None,
        asynchronous: bool,
        handle: EPHandle | None,
        do_handle_copy: bool,
        do_cpu_sync: bool | None,
        do_expand: bool,
        do_zero_padding: bool,
        use_tma_aligned_col_major_sf: bool,
        defer_epilogue: bool,
        unknown: Mapping[str, Any],
        problem: Exception | None,
    ) -> Any:
        """problem: of :func:`run_in_order`. The others: of the methods ``dispatch``."""
        member = self._member
        calls = member.calls or member.refuse("dispatch")
        if handle is not None:
            given = None
            if (
                topk_idx is not None
                or cumulative_local_expert_recv_stats is not None
                or num_experts is not None
                or num_max_tokens_per_rank is not None
                or expert_alignment is not None
                or do_cpu_sync
                or (do_expand and not getattr(handle, "do_expand", False))
            ):
                given = {
                    "topk_idx": topk_idx,
                    "cumulative_local_expert_recv_stats": cumulative_local_expert_recv_stats,
                    "num_experts": num_experts,
                    "num_max_tokens_per_rank": num_max_tokens_per_rank,
                    "expert_alignment": expert_alignment,
                    "do_cpu_sync": True if do_cpu_sync else None,
                    "do_expand": True if do_expand else None,
                }
            made = run_in_order(
                member,
                "dispatch",
                previous_event,
                asynchronous,
                unknown,
                (x, topk_weights, handle),
                calls.elastic_dispatch_again,
                x,
                handle,
                topk_weights,
                given,
                bool(do_zero_padding),
                bool(use_tma_aligned_col_major_sf),
                defer_epilogue,
                previous_event_before_epilogue,
                num_sms,
                problem=problem,
            )
            return deferred(member, "dispatch", made) if defer_epilogue else made
        most = self.num_max_tokens_per_rank
        made = run_in_order(
            member,
            "dispatch",
            previous_event,
            asynchronous,
            unknown,
            (x, topk_idx, topk_weights, cumulative_local_expert_recv_stats),
            calls.elastic_dispatch,
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            num_experts,
            most if num_max_tokens_per_rank is None else num_max_tokens_per_rank,
            most,
            1 if expert_alignment is None else expert_alignment,
            bool(do_zero_padding),
            bool(use_tma_aligned_col_major_sf),
            bool(do_handle_copy),
            do_cpu_sync is None or bool(do_cpu_sync),
            bool(do_expand),
            defer_epilogue,
            previous_event_before_epilogue,
            num_sms or ELASTIC_NUM_SMS,
            problem=problem,
        )
        return deferred(member, "dispatch", made) if defer_epilogue else made

    def _combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None,
        bias: torch.Tensor | Sequence[torch.Tensor] | None,
        num_sms: int,
        previous_event: EventHandle | EventOverlap | None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None,
        asynchronous: bool,
        defer_epilogue: bool,
        unknown: Mapping[str, Any],
        problem: Exception | None,
    ) -> Any:
        """problem: of :func:`run_in_order`. The others: of the methods ``combine``."""
        member = self._member
        calls = member.calls or member.refuse("combine")
        made = run_in_order(
            member,
            "combine",
            previous_event,
            asynchronous,
            unknown,
            (x, topk_weights, bias, handle),
            calls.elastic_combine,
            x,
            handle,
            topk_weights,
            bias,
            not self.allow_multiple_reduction,
            defer_epilogue,
            previous_event_before_epilogue,
            num_sms or getattr(handle, "num_sms", 0),
            problem=problem,
        )
        return deferred(member, "combine", made) if defer_epilogue else made
