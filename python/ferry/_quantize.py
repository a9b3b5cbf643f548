"""Rows of one byte per channel, with a scale for every 128 channels; without a group."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ferry import _native
from ferry._eager import eager
from ferry._errors import InvalidArgument
from ferry._memory import current_stream_of

Quantization = Literal["fp8", "fp8_power_of_two", "fp8_ue8m0", "int8"]
WireFormat = Literal["fp8"]

_NUMBERS = {"fp8": 1, "fp8_power_of_two": 2, "fp8_ue8m0": 3, "int8": 4}  # of ferry::Quantization
_BLOCK = 128  # kQuantBlockSize
_BLOCK_OF_WORDS = 512  # four exponents in an i32

_Wanted = tuple[tuple[int, int], torch.dtype]


class Quantized(NamedTuple):
    """Quantised rows."""

    x: torch.Tensor
    """[T, H] float8_e4m3fn or int8."""
    scales: torch.Tensor
    """[T, H / 128] f32, of "fp8_ue8m0" [T, H / 512] i32 (or the u8 [T, H / 128] that was given); rounded up."""


def number_of(mode: str | None, operation: str) -> int:
    """Number of the mode in the native module."""
    if mode is None:
        return 0
    number = _NUMBERS.get(mode) if isinstance(mode, str) else None
    if number is None:
        raise InvalidArgument(
            f"{operation}: quantize is {mode!r}, expected None or one of {', '.join(map(repr, _NUMBERS))}"
        )
    return number


def wanted_rows(mode: Quantization, num_rows: int, hidden: int) -> tuple[_Wanted, _Wanted]:
    """Shapes and dtypes of quantised rows and their scales."""
    block, scales = (_BLOCK_OF_WORDS, torch.int32) if mode == "fp8_ue8m0" else (_BLOCK, torch.float32)
    rows = torch.int8 if mode == "int8" else torch.float8_e4m3fn
    return ((num_rows, hidden), rows), ((num_rows, -(-hidden // block)), scales)


@eager
def quantize(
    x: torch.Tensor,
    mode: Quantization,
    *,
    out: torch.Tensor | None = None,
    out_scales: torch.Tensor | None = None,
) -> Quantized:
    """Quantise rows, with the bits that ``Group.dispatch(quantize=mode)`` gives. Local: no other rank takes part.

    x: [T, H] bf16 or f32, on the CPU or a GPU.
    mode: "fp8": e4m3, f32 scales amax / 448; "fp8_power_of_two": those scales rounded up to powers of two; "fp8_ue8m0":
        the exponents of these, four in an i32; "int8": -127 to 127, f32 scales amax / 127.
    out, out_scales: where to write, by default new contiguous tensors. Scales may have any strides.

    On a GPU one kernel on the current stream; the host does not wait, and a graph may capture it.
    """
    number = number_of(mode, "quantize")
    if number == 0:
        raise InvalidArgument(f"quantize: mode is None, expected one of {', '.join(map(repr, _NUMBERS))}")
    _check_matrix(x, "quantize: x")
    rows, scales = wanted_rows(mode, *x.shape)
    if out is None:
        out = torch.empty(rows[0], dtype=rows[1], device=x.device)
    if out_scales is None:
        out_scales = torch.empty(scales[0], dtype=scales[1], device=x.device)
    _native.quantize(x, out, out_scales, number, *_place_of(x))
    return Quantized(out, out_scales)


@eager
def dequantize(
    x: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The values of quantised rows: each channel times its scale in f32, rounded to ``dtype``. Local.

    x: [T, H] float8_e4m3fn or int8. scales: as :class:`Quantized` has them, with any strides; on a GPU as
    :func:`quantize`. dtype: bf16 or f32. out: where to write, by default a new tensor.
    """
    _check_matrix(x, "dequantize: x")
    if out is None:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _native.dequantize(x, scales, out, *_place_of(x))
    return out


def _check_matrix(x: object, what: str) -> None:
    if not isinstance(x, torch.Tensor) or x.dim() != 2:
        kind = f"of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
        raise InvalidArgument(f"{what} is {kind}, expected a tensor [T, H]")


def _place_of(x: torch.Tensor) -> tuple[int, int]:
    """Index of the GPU, -1 on the host, and its current stream."""
    return (x.device.index, current_stream_of(x.device)) if x.device.type == "cuda" else (-1, 0)
