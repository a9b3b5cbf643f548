"""Latency mode: the calls exist, so that programs find them, and raise NotImplementedError."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


def not_implemented(call: str, instead: str = "use dispatch and combine") -> NoReturn:
    raise NotImplementedError(f"{call} is not implemented; {instead}")


class LatencyCalls:
    """The first generation's latency mode. Every call raises NotImplementedError with its name."""

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        **unknown: Any,
    ) -> NoReturn:
        not_implemented("low_latency_dispatch")

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        **unknown: Any,
    ) -> NoReturn:
        not_implemented("low_latency_combine")

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> NoReturn:
        not_implemented("clean_low_latency_buffer")

    def get_next_low_latency_combine_buffer(self, handle: tuple) -> NoReturn:
        not_implemented("get_next_low_latency_combine_buffer")

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> NoReturn:
        not_implemented("low_latency_update_mask_buffer", "a lost rank raises an exception")

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> NoReturn:
        not_implemented("low_latency_query_mask_buffer", "a lost rank raises an exception")

    def low_latency_clean_mask_buffer(self) -> NoReturn:
        not_implemented("low_latency_clean_mask_buffer", "a lost rank raises an exception")
