"""Rows by token turned into rows by expert and back, on this rank alone, by torch's operators: the native module must
give the same bits.

n received rows, K choices per token, L local experts. A *slot* is the expanded row of (row, choice), -1 where there is
none. Rows without a token may hold anything, including NaN: none of it affects other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812


class Expansion(NamedTuple):
    slots: torch.Tensor
    """[n, K] i32. Of a token's equal choices only the last has a slot."""
    last_equal: torch.Tensor
    """[n, K] i64: the last choice that names the same expert; -1 where the expert is not local."""


def expand_slots(local_idx: torch.Tensor, counts: torch.Tensor, alignment: int) -> Expansion:
    """Give each distinct (row, local expert) its row: by expert, then by row; groups start at multiples of alignment.

    local_idx: [n, K] i64, local experts, -1 for none. counts: [L] i32, distinct rows of each.
    """
    device = local_idx.device
    (num_rows, num_topk), num_local = local_idx.shape, counts.shape[0]
    lanes = torch.arange(num_topk, device=device)
    equal = (local_idx.unsqueeze(2) == local_idx.unsqueeze(1)) & (local_idx >= 0).unsqueeze(2)
    last_equal = torch.where(equal, lanes, -1).amax(dim=2)
    has_slot = last_equal == lanes

    # One cell for each (expert, row), and one for entries without a slot. The sum over the cells up to an entry's own
    # is its position if there were no gaps.
    num_cells = num_local * num_rows
    rows = torch.arange(num_rows, device=device).unsqueeze(1)
    cell = torch.where(has_slot, local_idx * num_rows + rows, num_cells)
    taken = torch.zeros(num_cells + 1, dtype=torch.int32, device=device)
    taken.scatter_(0, cell.view(-1), 1)
    position = taken.cumsum(0, dtype=torch.int32) - 1
    ends = aligned_ends(counts, alignment)
    gaps_before = ends - aligned(counts, alignment) - (counts.cumsum(0, dtype=torch.int32) - counts)
    gap = torch.where(has_slot, gaps_before[local_idx.clamp(min=0)], 0)
    slots = torch.where(has_slot, position[cell] + gap, -1)
    return Expansion(slots.to(torch.int32), last_equal)


def aligned(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """[L] i32, rounded up. For reading."""
    if alignment == 1:
        return counts
    return (counts + (alignment - 1)).div(alignment, rounding_mode="floor") * alignment


def aligned_ends(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """[L] i32: where the aligned groups end."""
    return aligned(counts, alignment).cumsum(0, dtype=torch.int32)


class Origins:
    """The received row that each expanded row copies."""

    def __init__(self, slots: torch.Tensor, num_expanded: int) -> None:
        num_rows = slots.shape[0]
        where = self._where = _or_spare(slots, num_expanded).view(-1)
        rows = torch.arange(num_rows, device=slots.device).unsqueeze(1).expand(slots.shape)
        origin = torch.full((num_expanded + 1,), -1, dtype=torch.int64, device=slots.device)
        origin.scatter_(0, where, rows.reshape(-1))
        self._num_expanded = num_expanded
        self._is_gap = origin[:num_expanded] < 0
        self._origin = origin[:num_expanded].clamp(min=0)

    def rows(self, x: torch.Tensor, *, zero_padding: bool) -> torch.Tensor:
        """[n, ...] -> [expanded, ...], of any dtype. Gaps are zero or unspecified."""
        if x.shape[0] == 0:
            return x.new_zeros(self._num_expanded, *x.shape[1:])
        words = _as_words(x)
        taken = words.index_select(0, self._origin)
        if zero_padding:
            taken.masked_fill_(self._is_gap.view(-1, *[1] * (taken.dim() - 1)), 0)
        return taken.view(x.dtype)

    def weights(self, weights: torch.Tensor, last_equal: torch.Tensor) -> torch.Tensor:
        """[n, K] f32 -> [expanded] f32: the sum over a token's equal choices; 0 in gaps."""
        lanes = torch.arange(weights.shape[1], device=weights.device)
        of_slot = last_equal.unsqueeze(1) == lanes.unsqueeze(1)  # [n, slot's choice, choice]
        summed = torch.where(of_slot, weights.unsqueeze(1), 0.0).sum(dim=2)
        out = torch.zeros(self._num_expanded + 1, dtype=torch.float32, device=weights.device)
        out.scatter_(0, self._where, summed.view(-1))
        return out[: self._num_expanded]


def _or_spare(slots: torch.Tensor, spare: int) -> torch.Tensor:
    """[n, K] i64: the slots, with ``spare`` in place of any that is not in [0, spare)."""
    return torch.where((slots >= 0) & (slots < spare), slots, spare).to(torch.int64)


def _as_words(x: torch.Tensor) -> torch.Tensor:
    """The same bytes as fewer elements of a type that every kernel supports."""
    for dtype in (torch.int64, torch.int32):
        if x.shape[-1] * x.element_size() % dtype.itemsize == 0 and x.is_contiguous():
            return x.view(dtype)
    return x


def slot_weights(weights: torch.Tensor, slots: torch.Tensor, last_equal: torch.Tensor | None) -> torch.Tensor:
    """[expanded] f32 -> [n, K] f32: each choice's weight, the same for equal choices; 0 where there is no slot."""
    num_expanded = weights.shape[0]
    padded = torch.cat([weights, weights.new_zeros(1)])
    table = padded[_or_spare(slots, num_expanded)]
    if last_equal is None:
        return table
    return torch.where(last_equal >= 0, table.gather(1, last_equal.clamp(min=0)), 0.0)


def reduce_slots(x: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[expanded, H] -> [n, H]: each row's slots summed in fp32, in the order of choices, rounded once to ``dtype``."""
    num_rows = slots.shape[0]
    if num_rows == 0 or x.shape[0] == 0:
        return torch.zeros(num_rows, x.shape[1], dtype=dtype, device=x.device)
    valid = (slots >= 0) & (slots < x.shape[0])
    # On the host embedding_bag does not sum bf16 rows in fp32.
    bounds = F.pad(valid.sum(dim=1).cumsum(0), (1, 0))[:-1]
    return F.embedding_bag(slots[valid].long(), x.float(), bounds, mode="sum").to(dtype)
