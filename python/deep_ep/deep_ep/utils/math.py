"""Arithmetic for programs that measure and check: sizes, differences, FP8 rows with a scale for each block."""

from __future__ import annotations

from typing import Any

import torch

from deep_ep._arguments import align

__all__ = [
    "align",
    "calc_diff",
    "ceil_div",
    "count_bytes",
    "hash_tensor",
    "hash_tensors",
    "inplace_unique",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "safe_div",
]

_BLOCK = 128
_LARGEST_FP8 = 448.0
_LEAST_AMPLITUDE = 1e-4
_EXPONENTS_PER_WORD = 4
_MANTISSA_BITS = 23
_WORD_BYTES = 4


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-dividend // divisor)


def safe_div(dividend: float, divisor: float) -> float:
    """The quotient; 0 where the divisor is 0."""
    return dividend / divisor if divisor != 0 else 0.0


def count_bytes(*values: Any) -> int:
    """Bytes of the elements of all tensors in the arguments, which are tensors, tuples and lists of them, or None."""
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
        elif value is not None:
            total += count_bytes(*value)
    return total


def hash_tensor(t: torch.Tensor) -> int:
    """A number made from the bytes of the elements, to see whether two results are the same to the bit.

    It is the sum of the bytes' 32-bit words, signed, with zeros after the last byte: equal bytes have equal numbers,
    and one changed word changes the number. Words in another order do not, nor does the shape. Any dtype and strides;
    waits for the device.
    """
    octets = t.detach().reshape(-1).contiguous().view(torch.uint8)
    num_missing = -octets.numel() % _WORD_BYTES
    if num_missing > 0 or octets.storage_offset() % _WORD_BYTES != 0:
        octets = torch.nn.functional.pad(octets, (0, num_missing)).clone()
    return int(octets.view(torch.int32).sum(dtype=torch.int64))


def hash_tensors(*values: Any) -> int:
    """:func:`hash_tensor` of all tensors in the arguments and in the tuples and lists among them, joined by exclusive
    or, so in any order; an even number of equal tensors leaves no trace. Values other than tensors, such as None, do
    not count.
    """
    joined = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            joined ^= hash_tensor(value)
        elif isinstance(value, (tuple, list)):
            joined ^= hash_tensors(*value)
    return joined


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """Difference of two tensors of the same shape: 0 if equal, small if close.

    One minus twice their product over the sum of their squares, both shifted by 1 so that zeros compare as well.
    """
    if x.numel() == 0:
        return 0.0
    a, b = x.double() + 1, y.double() + 1
    squares = (a.square() + b.square()).sum()
    return float(1 - 2 * (a * b).sum() / squares)


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Keeps one of each value in [0, num_slots) per row, in descending order; the rest becomes -1.

    x: [T, K], integers.
    """
    if x.numel() == 0:
        return
    ordered = x.masked_fill((x < 0) | (x >= num_slots), -1).sort(dim=1, descending=True).values
    repeats = torch.zeros_like(ordered, dtype=torch.bool)
    repeats[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    x.copy_(ordered.masked_fill(repeats, -1).sort(dim=1, descending=True).values)


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H] of any float dtype -> rows [T, H] e4m3 and scales [T, H / 128 rounded up] f32, one for 128 columns.

    A value is its row's element times the scale of its block.
    """
    num_tokens, hidden = x.shape
    num_blocks = ceil_div(hidden, _BLOCK)
    padded = torch.nn.functional.pad(x, (0, num_blocks * _BLOCK - hidden))
    blocks = padded.reshape(num_tokens, num_blocks, _BLOCK).float()
    scales = blocks.abs().amax(dim=2).clamp(min=_LEAST_AMPLITUDE) / _LARGEST_FP8
    # The division rounds and must not exceed the largest value, which would become NaN.
    scaled = (blocks / scales.unsqueeze(2)).clamp(-_LARGEST_FP8, _LARGEST_FP8)
    rows = scaled.reshape(num_tokens, num_blocks * _BLOCK)[:, :hidden]
    return rows.to(torch.float8_e4m3fn).contiguous(), scales


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """Rows [T, H] e4m3 and scales -> [T, H] bf16.

    x_scales: [T, S] f32, or i32 of four bytes each, which are exponents of two with a bias of 127; of any strides. The
    blocks are 128 columns.
    """
    if x_scales.dtype == torch.int32:
        shifts = torch.arange(0, 8 * _EXPONENTS_PER_WORD, 8, dtype=torch.int32, device=x_scales.device)
        exponents = (x_scales.unsqueeze(2) >> shifts) & 0xFF
        x_scales = (exponents << _MANTISSA_BITS).flatten(1).view(torch.float32)
    values = x_fp8.float()
    whole = x_fp8.shape[1] // _BLOCK
    values[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK)).mul_(x_scales[:, :whole].unsqueeze(2))
    values[:, whole * _BLOCK :].mul_(x_scales[:, whole : whole + 1])
    return values.to(torch.bfloat16)
