"""Chains of layers for ``beside_rank``: dispatch, combine, and the next dispatch on the combined tokens.

Experts are stood in for by constants, so that only the exchange takes time: each rank r returns rows of base * (r + 1),
from ordinary memory, and the sums of a token then follow from the ranks that it reaches. bf16 tokens of the next
dispatch are those sums; fp8 tokens stay, and take their scales from the sums. Before a chain, untimed, experts multiply
each row by a factor of their own and the router's weights, so that a row in a wrong place shows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from exchanges import Exchange, Rows, random_ids

BLOCK = 128
_LARGEST_E4M3 = 448.0
_SMALLEST_AMAX = 1e-4
# A bf16 number is within 2^-9 of what it stands for. Some are added and rounded again.
BF16_TOLERANCE = 2.0**-6


class Shape(NamedTuple):
    """The layer of a measurement."""

    hidden: int
    num_topk: int
    num_experts: int
    num_routings: int
    """Sets of ids, which steps of a chain take in turn."""


class Batch(NamedTuple):
    """One rank's tokens and choices, the same for every way. ``ids`` has those of each routing, [T, K] i64."""

    x: torch.Tensor
    ids: list[torch.Tensor]
    weights: torch.Tensor
    """[T, K] f32, of sum 1 for each token."""


def draw(shape: Shape, num_tokens: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = random_ids(generator, shape.num_routings, num_tokens, shape.num_experts, shape.num_topk, device)
    x = torch.randn(num_tokens, shape.hidden, generator=generator).to(device, torch.bfloat16)
    weights = torch.rand(num_tokens, shape.num_topk, generator=generator).softmax(1).to(device)
    return Batch(x, ids, weights)


def base_row(hidden: int, device: torch.device) -> torch.Tensor:
    """[H] f32: numbers that bf16 has exactly, also twice and thrice."""
    return 1 + torch.arange(hidden, device=device) % 8 / 8


def expert_factors(ids: torch.Tensor) -> torch.Tensor:
    """The factor of each expert, f32, 1 to 1.75."""
    return 1 + ids % 4 / 4


def quantised(x: torch.Tensor) -> Rows:
    """fp8 rows with a scale for each block of channels."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2).clamp(min=_SMALLEST_AMAX) / _LARGEST_E4M3
    return Rows((blocks / scales[:, :, None]).flatten(1).to(torch.float8_e4m3fn), scales)


def values(rows: Rows) -> torch.Tensor:
    """f32 numbers that rows [.., H] stand for."""
    if rows.scales is None:
        return rows.x.float()
    return (rows.x.float().unflatten(-1, (-1, BLOCK)) * rows.scales[..., None]).flatten(-2)


def reached_ranks(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[T, R] bool: whether a token has an expert of a rank."""
    num_ranks = dist.get_world_size()
    reached = torch.zeros(len(ids), num_ranks, dtype=torch.bool, device=ids.device)
    return reached.scatter_(1, ids // (num_experts // num_ranks), True)


def compare(what: str, result: torch.Tensor, expected: torch.Tensor, tolerance: float = BF16_TOLERANCE) -> None:
    """Raises RuntimeError if an element differs by more than the tolerance, relative to it or a thousandth of the
    largest.
    """
    difference = (result.float() - expected).abs()
    allowed = tolerance * expected.abs() + 1e-3 * expected.abs().max()
    is_close = result.shape == expected.shape and bool((difference <= allowed).all())  # false for NaN
    if not is_close:
        raise RuntimeError(
            f"{what} on rank {dist.get_rank()}: differs from the reference by up to {difference.max().item():g}, whose "
            f"largest element is {expected.abs().max().item():g}; times of wrong results say nothing"
        )


class LayerChain:
    """One rank's chain through an exchange.

    is_cached: dispatches repeat the first routing; else nothing is cached, and each step has a routing of its own.
    reaches_all: every rank returns a row for every token, whatever its ids.
    """

    def __init__(
        self, exchange: Exchange, batch: Batch, shape: Shape, dtype: str, *, is_cached: bool, reaches_all: bool
    ) -> None:
        self._exchange, self._batch, self._shape, self._is_cached = exchange, batch, shape, is_cached
        self._rows = quantised(batch.x) if dtype == "fp8" else Rows(batch.x)
        self._reaches_all = reaches_all
        self._base = base_row(shape.hidden, batch.x.device)
        self._outputs = (self._base * (dist.get_rank() + 1)).to(torch.bfloat16)
        self._outputs = self._outputs.repeat(len(batch.x) * dist.get_world_size(), 1)

    def check_experts(self) -> None:
        """Compares a new and a repeated dispatch, and a combine of experts that work, with the reference. Leaves the
        first routing for steps that repeat it.
        """
        ids, weights = self._batch.ids[0], self._batch.weights
        received = self._exchange.new(self._rows, ids, weights)
        first = dist.get_rank() * (self._shape.num_experts // dist.get_world_size())
        chosen = torch.where(received.topk_idx >= 0, expert_factors(received.topk_idx + first), 0)
        factors = (chosen * received.topk_weights).sum(1, keepdim=True)
        again = self._exchange.again(self._rows)
        compare("a repeated dispatch", values(again.rows), values(received.rows), 0)
        combined = self._exchange.combine((values(received.rows) * factors).to(torch.bfloat16))
        expected = values(self._rows) * (weights * expert_factors(ids)).sum(1, keepdim=True)
        compare("a layer", combined, expected)

    def begin(self) -> Rows:
        return self._rows

    def _ids(self, step: int) -> torch.Tensor:
        return self._batch.ids[0 if self._is_cached else step % len(self._batch.ids)]

    def step(self, rows: Rows, step: int) -> tuple[Rows, torch.Tensor]:
        """Dispatches and combines. Returns the rows of the next step, and the sums."""
        if self._is_cached:
            received = self._exchange.again(rows)
        else:
            received = self._exchange.new(rows, self._ids(step), self._batch.weights)
        combined = self._exchange.combine(self._outputs[: len(received.rows.x)])
        is_fp8 = self._rows.scales is not None
        return Rows(self._rows.x, combined[:, ::BLOCK].float()) if is_fp8 else Rows(combined), combined

    def check(self, combined: torch.Tensor, step: int) -> None:
        """Compares the sums of a step with the reference."""
        reached = reached_ranks(self._ids(step), self._shape.num_experts)
        if self._reaches_all:
            reached = torch.ones_like(reached)
        ranks = torch.arange(1, reached.shape[1] + 1, device=reached.device)
        compare("a chain of layers", combined, (reached * ranks).sum(1, keepdim=True) * self._base)

    def num_bytes(self) -> tuple[int, int]:
        """Logical bytes and those on the wire, of a step with the first routing on this rank: rows and scales alone."""
        reached = reached_ranks(self._batch.ids[0], self._shape.num_experts)
        out_bytes = self._rows.x.element_size() * self._shape.hidden
        if self._rows.scales is not None:
            out_bytes += self._rows.scales.element_size() * self._rows.scales.shape[1]
        row_bytes = out_bytes + self._outputs.element_size() * self._shape.hidden
        return int(reached.sum()) * row_bytes, self._exchange.num_wire_rows(reached) * row_bytes
