"""Chains of latency mode for ``beside_rank``: dispatch, combine, and the next dispatch on the combined tokens.

The output of expert e is base * factor(e) for each row, so that a token's sum follows from its experts and weights.
Before a chain, untimed, experts multiply the rows that they have received by that factor instead.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from beside_layer import BF16_TOLERANCE, BLOCK, Batch, Shape, base_row, compare, expert_factors, reached_ranks, values
from latency_exchanges import LatencyExchange

_FP8_TOLERANCE = 2.0**-4 + BF16_TOLERANCE  # E4M3 has three bits behind the first


class LatencyChain:
    """One rank's chain. The batch is at most as large as the exchange was created for."""

    def __init__(self, exchange: LatencyExchange, batch: Batch, shape: Shape, dtype: str) -> None:
        self._exchange, self._batch, self._shape = exchange, batch, shape
        self._is_fp8 = dtype == "fp8"
        self._base = base_row(shape.hidden, batch.x.device)
        num_local = shape.num_experts // dist.get_world_size()
        first = dist.get_rank() * num_local
        self._factors = expert_factors(torch.arange(first, first + num_local, device=batch.x.device))[:, None, None]

    def use(self, split: bool) -> None:
        self._exchange.use(len(self._batch.x), split)

    def check_experts(self) -> None:
        """Compares a pair whose experts work with the reference, and writes the outputs of the timed ones."""
        ids, weights = self._batch.ids[0], self._batch.weights
        slab = self._exchange.dispatch(self._batch.x, ids, weights)
        outputs = (values(slab.rows) * self._factors).to(torch.bfloat16)
        combined = self._exchange.combine(outputs, ids, weights, slab)
        expected = self._batch.x.float() * (weights * expert_factors(ids)).sum(1, keepdim=True)
        compare("latency mode", combined, expected, _FP8_TOLERANCE if self._is_fp8 else BF16_TOLERANCE)
        self._exchange.outputs.copy_(self._base * self._factors)

    def begin(self) -> torch.Tensor:
        return self._batch.x

    def step(self, x: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Dispatches and combines. Returns the sums twice: they are the tokens of the next step."""
        ids, weights = self._batch.ids[step % len(self._batch.ids)], self._batch.weights
        slab = self._exchange.dispatch(x, ids, weights)
        combined = self._exchange.combine(self._exchange.outputs, ids, weights, slab)
        return combined, combined

    def check(self, combined: torch.Tensor, step: int) -> None:
        ids = self._batch.ids[step % len(self._batch.ids)]
        sums = (self._batch.weights * expert_factors(ids)).sum(1, keepdim=True)
        compare("a chain of latency mode", combined, sums * self._base)

    def num_bytes(self) -> tuple[int, int]:
        """As `LayerChain.num_bytes`."""
        ids, hidden = self._batch.ids[0], self._shape.hidden
        reached = reached_ranks(ids, self._shape.num_experts)
        num_local = self._shape.num_experts // dist.get_world_size()
        num_chosen = int((ids // num_local != dist.get_rank()).sum())
        back_bytes = 2 * hidden
        out_bytes = hidden + hidden // BLOCK * 4 if self._is_fp8 else back_bytes
        num_out, num_back = self._exchange.num_wire_rows(reached, num_chosen)
        logical = int(reached.sum()) * (out_bytes + back_bytes)
        return logical, num_out * out_bytes + num_back * back_bytes
