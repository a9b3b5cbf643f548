"""The load of experts over a window of calls: counters for every layer, and their sum over the ranks on demand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ferry._errors import InvalidArgument
from ferry._placement import LoadCounters

if TYPE_CHECKING:
    from ferry._group import Group


class LoadSummary(NamedTuple):
    """The load of all ranks in a window. All i64, on the CPU."""

    logical: torch.Tensor
    """[layers, E] tokens that chose each expert."""
    physical: torch.Tensor | None
    """[layers, P] tokens that picked each physical expert; None if they were not collected."""
    wait_times_ns: torch.Tensor
    """[R, R] nanoseconds for which rank i has waited for rank j in the window."""

    def to_json(self) -> str:
        """The same text as ``ferry::LoadSummary::to_json``."""
        values: dict[str, Any] = {
            "experts": self.logical.shape[1],
            "layers": self.logical.shape[0],
            "logical": self.logical.tolist(),
        }
        values["physical_experts"] = 0 if self.physical is None else self.physical.shape[1]
        if self.physical is not None:
            values["physical"] = self.physical.tolist()
        values["wait_times_ns"] = self.wait_times_ns.tolist()
        return json.dumps(values, separators=(",", ":"), sort_keys=True)


class LoadWindow:
    """Counters of a model's layers on this rank, in the memory of the group's device.

    group.route(topk_idx, num_experts=E, counters=window.counters(layer))

    num_physical_experts: P, to also count the physical experts that tokens pick.
    """

    def __init__(self, group: Group, num_layers: int, num_experts: int, num_physical_experts: int = 0) -> None:
        if num_layers < 1 or num_experts < 1 or num_physical_experts < 0:
            raise InvalidArgument(
                f"LoadWindow: {num_layers} layers of {num_experts} experts, {num_physical_experts} of them physical, "
                "expected at least one layer and one expert"
            )
        self._group = group
        self.logical = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=group.device)
        self.physical = torch.zeros(num_layers, num_physical_experts, dtype=torch.int64, device=group.device)
        self._waits = torch.tensor(group.wait_times_ns)

    def counters(self, layer: int) -> LoadCounters:
        """Counters for calls of ``layer``."""
        return LoadCounters(self.logical[layer], self.physical[layer] if self.physical.shape[1] > 0 else None)

    def reset(self) -> None:
        """Begins a new window: sets all counts to zero."""
        self.logical.zero_()
        self.physical.zero_()
        self._waits = torch.tensor(self._group.wait_times_ns)

    def sum(self, process_group: dist.ProcessGroup | None = None) -> LoadSummary:
        """The load of all ranks. Collective over ``process_group``, whose ranks are the group's (by default torch's
        default group); resets nothing.
        """
        logical, physical = self.logical.clone(), self.physical.clone()
        dist.all_reduce(logical, group=process_group)
        if physical.numel() > 0:
            dist.all_reduce(physical, group=process_group)
        waits = torch.zeros(self._group.num_ranks, self._group.num_ranks, dtype=torch.int64)
        waits[self._group.rank] = torch.tensor(self._group.wait_times_ns) - self._waits
        waits = waits.to(self.logical.device)
        dist.all_reduce(waits, group=process_group)
        return LoadSummary(logical.cpu(), physical.cpu() if physical.numel() > 0 else None, waits.cpu())
