"""Checks of clients' arguments, before anything is sent."""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ferry import InvalidArgument

ROW_GRANULE_BYTES = 16
MAX_TOPK = 32

# Parts of the names of arguments that change the numeric results of a call.
_NUMERIC = ("fp4", "logfmt", "global_scale", "low_precision", "quant")

_warned: set[str] = set()
_warned_lock = threading.Lock()


def ignore_unknown(call: str, unknown: Mapping[str, Any]) -> None:
    """Warn once per name about arguments that do not exist here; refuse those that would change results."""
    for name, value in unknown.items():
        if any(part in name for part in _NUMERIC):
            if value is None or value is False:
                continue
            raise NotImplementedError(f"{call}: {name}={value!r} changes results and is not implemented; leave it out")
        with _warned_lock:
            new = name not in _warned
            _warned.add(name)
        if new:
            warnings.warn(f"{call}: argument {name} is unknown to Ferry and is ignored", stacklevel=8)


def check_tensor(tensor: Any, what: str, device: torch.device) -> None:
    """A contiguous tensor on the buffer's device."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"{what} is a {type(tensor).__name__}, expected a torch.Tensor on {device}")
    if tensor.device != device:
        raise InvalidArgument(
            f"{what} is on {tensor.device}, expected {device}, the device of the buffer; move it with .to(), or create "
            "the buffer with device="
        )


def check_contiguous(tensor: torch.Tensor, what: str) -> None:
    if not tensor.is_contiguous():
        raise InvalidArgument(
            f"{what} has shape {list(tensor.shape)} and strides {list(tensor.stride())}, expected a contiguous tensor; "
            "call .contiguous()"
        )


def check_table(tensor: Any, what: str, device: torch.device, dtype: torch.dtype, shape: tuple[int | str, ...]) -> None:
    """A contiguous tensor of this dtype and shape; a shape's letters stand for any size."""
    check_tensor(tensor, what, device)
    if tensor.dtype != dtype:
        raise InvalidArgument(f"{what} has dtype {tensor.dtype}, expected {dtype}; convert it with .to({dtype})")
    sizes = zip(tensor.shape, shape)
    if tensor.dim() != len(shape) or any(isinstance(want, int) and have != want for have, want in sizes):
        expected = ", ".join(map(str, shape))
        raise InvalidArgument(f"{what} has shape {list(tensor.shape)}, expected [{expected}]")
    check_contiguous(tensor, what)


def check_rows(x: Any, what: str, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Payload rows [T, H]."""
    check_tensor(x, what, device)
    if dtype is not None and x.dtype != dtype:
        raise InvalidArgument(f"{what} has dtype {x.dtype}, expected {dtype}; convert it with .to({dtype})")
    if x.dim() != 2:
        raise InvalidArgument(f"{what} has shape {list(x.shape)}, expected [T, H]")
    row_bytes = x.shape[1] * x.element_size()
    if row_bytes == 0 or row_bytes % ROW_GRANULE_BYTES != 0:
        raise InvalidArgument(
            f"{what} has rows of {x.shape[1]} x {x.element_size()} bytes, expected a positive multiple of "
            f"{ROW_GRANULE_BYTES} bytes"
        )
    check_contiguous(x, what)


def check_payload(x: Any, what: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows, or rows and their scales [T, S], of any strides."""
    if not isinstance(x, (tuple, list)):
        check_rows(x, what, device)
        return x, None
    if len(x) != 2:
        raise InvalidArgument(f"{what} is a tuple of {len(x)}, expected (rows, scales)")
    rows, scales = x
    check_rows(rows, f"{what}[0]", device)
    what = f"{what}[1] (scales)"
    check_tensor(scales, what, device)
    if scales.dtype not in (torch.float32, torch.int32):
        raise InvalidArgument(f"{what} has dtype {scales.dtype}, expected torch.float32 or torch.int32")
    if scales.dim() not in (1, 2) or scales.shape[0] != rows.shape[0]:
        raise InvalidArgument(f"{what} has shape {list(scales.shape)}, expected [{rows.shape[0]}, S]")
    return rows, scales


def check_choice(topk_idx: Any, topk_weights: Any, operation: str, num_tokens: int, device: torch.device) -> None:
    """Expert ids [T, K] and, where given, their weights."""
    check_table(topk_idx, f"{operation}: topk_idx", device, torch.int64, (num_tokens, "K"))
    num_topk = topk_idx.shape[1]
    if not 1 <= num_topk <= MAX_TOPK:
        raise InvalidArgument(f"{operation}: topk_idx has K = {num_topk}, expected 1 to {MAX_TOPK}")
    if topk_weights is not None:
        what = f"{operation}: topk_weights"
        check_table(topk_weights, what, device, torch.float32, (num_tokens, num_topk))


def whole(value: Any) -> int:
    """An integer of any library; -1 for anything else, and for what the native module cannot take."""
    try:
        number = operator.index(value)
    except TypeError:
        return -1
    return number if number < 1 << 63 else -1


def check_num_experts(num_experts: Any, operation: str, num_ranks: int) -> int:
    """E, which must be a multiple of the number of ranks."""
    number = whole(num_experts)
    if number < 1 or number % num_ranks != 0:
        raise InvalidArgument(
            f"{operation}: num_experts is {num_experts!r}, expected a multiple of {num_ranks}, the number of ranks"
        )
    return number


def check_size(value: Any, what: str) -> int:
    number = whole(value)
    if number < 1:
        raise InvalidArgument(f"{what} is {value!r}, expected an integer of at least 1")
    return number


def check_alignment(expert_alignment: Any, operation: str) -> int:
    number = whole(expert_alignment)
    if number < 1:
        raise InvalidArgument(
            f"{operation}: expert_alignment is {expert_alignment!r}, expected an integer of at least 1"
        )
    return number


def check_biases(bias: Any, operation: str, num_tokens: int, hidden: int, device: torch.device) -> list[torch.Tensor]:
    """Up to two tensors [T, H] bf16."""
    if bias is None:
        return []
    biases = [bias] if isinstance(bias, torch.Tensor) else list(bias)
    if len(biases) > 2:
        raise InvalidArgument(f"{operation}: {len(biases)} biases, expected at most two; add them first")
    for tensor in biases:
        check_table(tensor, f"{operation}: bias", device, torch.bfloat16, (num_tokens, hidden))
    return biases


def align(value: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that is not less than ``value``."""
    return -(-value // alignment) * alignment
