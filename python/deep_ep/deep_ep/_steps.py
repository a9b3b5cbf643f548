"""Steps of the native calls that are operations of torch. The native calls make them, on the stream of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ferry
from deep_ep import _masks, _node_tables
from deep_ep._arguments import MAX_TOPK, align
from deep_ep._ep_handle import EPHandle
from deep_ep._node_tables import Nodes
from deep_ep._previous_event import event_of
from deep_ep._streams import Lane, current_stream
from ferry import InvalidArgument

_I32_PER_ROW_GRANULE = 4


def ids_of_all(num_ranks: int) -> torch.Tensor:
    """Ids of tokens that together go to each rank once."""
    width = min(num_ranks, MAX_TOPK)
    ids = torch.full((align(num_ranks, width),), -1, dtype=torch.int64)
    ids[:num_ranks] = torch.arange(num_ranks)
    return ids.view(-1, width)


def rows_for_all(row: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """[W] i32 as the row of each token of :func:`ids_of_all`, padded to whole granules."""
    width = row.shape[0]
    num_tokens = -(-num_ranks // min(num_ranks, MAX_TOPK))
    padded = row.new_zeros(num_tokens, max(align(width, _I32_PER_ROW_GRANULE), _I32_PER_ROW_GRANULE))
    padded[:, :width] = row
    return padded


class Steps:
    """Steps of the calls of one buffer."""

    def __init__(self, group: ferry.Group, lane: Lane) -> None:
        self._group = group
        self._lane = lane
        self._nodes = Nodes(group.rank, group.num_ranks, group.ranks_per_node)

    def event_of(self, given: Any, what: str) -> Any:
        return event_of(given, what)

    def wait(self, event: Any) -> None:
        """Makes the rest of the call wait for ``event``."""
        self._lane.wait(event)

    def follow(self, stream: int) -> None:
        """Makes the current stream wait for another one of its GPU, given by its handle."""
        device = self._lane.device
        other = torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device)
        torch.cuda.current_stream(device).wait_stream(other)

    def reads(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor that an asynchronous call reads, although most calls do not read it."""
        if tensor.is_cuda:
            stream = current_stream(tensor.device.index)
            if stream == self._lane.comm_stream:
                tensor.record_stream(stream)

    # Routes by a mask, also of handles that are copies.

    def check_mask(self, is_token_in_rank: torch.Tensor, what: str) -> None:
        _masks.check_mask(is_token_in_rank, what)

    def ids_of_mask(self, is_token_in_rank: torch.Tensor) -> torch.Tensor:
        self.reads(is_token_in_rank)
        return _masks.ids_of_mask(is_token_in_rank)

    # Counts of choices, which all ranks exchange.

    def rows_to_gather(self, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        self.reads(num_tokens_per_expert)
        return rows_for_all(num_tokens_per_expert, self._nodes.num_ranks)

    def counts_of(self, gathered: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> Callable[[], list[int]]:
        """Starts to copy the choices of each local expert on all ranks to the host."""
        num_local = num_tokens_per_expert.shape[0] // self._nodes.num_ranks
        first = self._nodes.rank * num_local
        return self._lane.read_later(gathered[:, first : first + num_local].sum(0, dtype=torch.int32))

    # Handles over several nodes.

    def rail_inputs(self, is_token_in_rank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads(is_token_in_rank)
        return _node_tables.rail_inputs(self._nodes, is_token_in_rank)

    def with_masks(self, scales: torch.Tensor | None, is_token_in_rank: torch.Tensor) -> torch.Tensor:
        table = scales.unsqueeze(1) if scales is not None and scales.dim() == 1 else scales
        return _node_tables.with_masks(table, _node_tables.node_masks(self._nodes, is_token_in_rank))

    def without_masks(self, received: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return _node_tables.without_masks(received, self._nodes.num_nodes, scales.dtype)

    def nodes_handle(
        self,
        routing: ferry.Routing,
        is_token_in_rank: torch.Tensor,
        rail_routing: ferry.Routing,
        flags: torch.Tensor,
        received_scales: torch.Tensor,
        num_channels: int,
    ) -> tuple[torch.Tensor, ...]:
        return tuple(
            _node_tables.make_handle(
                self._group,
                self._nodes,
                routing,
                is_token_in_rank,
                rail_routing,
                flags,
                received_scales,
                num_channels,
            )
        )

    # Rows and weights in the form that ferry's combine takes.

    @torch.no_grad()
    def zero_rows(self, like: torch.Tensor, num_rows: int) -> torch.Tensor:
        return like.new_zeros(num_rows, like.shape[1])

    @torch.no_grad()
    def padded_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Weights as rows, whose sums are those of ferry's own weights, for any width."""
        num_topk = weights.shape[1]
        padded = weights.new_zeros(weights.shape[0], align(num_topk, 4))
        padded[:, :num_topk] = weights
        return padded

    def first_columns(self, rows: torch.Tensor, num_columns: int) -> torch.Tensor:
        return rows[:, :num_columns].contiguous()

    @torch.no_grad()
    def copy_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows where memory of a new tensor starts, which is aligned."""
        return rows.clone()

    @torch.no_grad()
    def as_f32(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(torch.float32)

    def as_bf16(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(torch.bfloat16)

    @torch.no_grad()
    def biases_as_f32(self, biases: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(torch.float32) for tensor in biases]

    # Handles of the second generation.

    def check_agrees(self, handle: EPHandle, given: dict[str, Any]) -> None:
        """given: arguments of a cached dispatch that must be None or equal the handle's."""
        for name, value in given.items():
            if value is None:
                continue
            of_handle = getattr(handle, name, None)
            if of_handle is None or isinstance(value, torch.Tensor):
                raise InvalidArgument(f"dispatch: {name} is given together with a handle, expected None")
            if value != of_handle:
                raise InvalidArgument(f"dispatch: {name} is {value}, expected the handle's {of_handle}, or None")
