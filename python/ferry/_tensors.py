"""torch tensors to and from the native module."""

from __future__ import annotations

import torch

# Rows move as bytes: where only bytes matter, other types of the same size work as well.
_DTYPES = (
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.bool,
)

# Types of arguments that are not rows.
_DTYPES_OF = {
    "topk_idx": (torch.int32, torch.int64),
    "topk_weights": (torch.float32,),
    "weights": (torch.float32,),
    "scales": (torch.float32, torch.int32, torch.uint8),
}

_MAX_DIMS = 3


def why_unreadable(tensor: object, what: str, device: str) -> str:
    """Text of the error for a tensor that the native module cannot read in memory of ``device``. Called by that
    module.
    """
    if not isinstance(tensor, torch.Tensor):
        return f"{what}: expected a torch.Tensor, got {type(tensor).__name__}"
    if tensor.device != torch.device(device):
        return f"{what}: the tensor is on {tensor.device}, the group on {device}; move it with .to({device!r})"
    if tensor.dtype not in _DTYPES:
        expected = " or ".join(map(str, _DTYPES_OF.get(what.rpartition(" ")[2], ())))
        return f"{what}: dtype is {tensor.dtype}, expected {expected or 'one of ' + ', '.join(map(str, _DTYPES))}"
    if not 0 < tensor.dim() <= _MAX_DIMS:
        return f"{what}: the tensor has {tensor.dim()} dimensions, expected 1 to {_MAX_DIMS}"
    return f"{what}: a {type(tensor).__name__} has no memory of its own, expected a dense tensor; materialise it first"


def tensor_of(array: object) -> torch.Tensor | None:
    """A tensor on memory of the native module, which lives as long as the tensor."""
    return None if array is None else torch.from_dlpack(array)
