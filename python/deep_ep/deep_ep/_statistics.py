"""Statistics that calls add to tensors of the program. The library adds to them (ferry.LoadCounters)."""

from __future__ import annotations

import torch

from deep_ep._arguments import check_table


def check_expert_stats(
    stats: torch.Tensor | None, operation: str, num_local_experts: int, device: torch.device
) -> None:
    """[L] i32, or None."""
    if stats is not None:
        what = f"{operation}: cumulative_local_expert_recv_stats"
        check_table(stats, what, device, torch.int32, (num_local_experts,))


def check_wait_stats(
    stats: torch.Tensor | None, name: str, operation: str, num_ranks: int, device: torch.device
) -> None:
    """[R] i64, or None."""
    if stats is not None:
        check_table(stats, f"{operation}: {name}", device, torch.int64, (num_ranks,))
