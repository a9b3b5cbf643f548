"""torch tensors to and from the native module."""

from __future__ import annotations

import torch

from ferry._errors import InvalidArgument

# Numbers of ferry::DType. Rows move as bytes: where only bytes matter, other types of the same size work as well.
_DTYPES = {
    torch.uint8: 0,
    torch.int32: 1,
    torch.int64: 2,
    torch.float32: 3,
    torch.float16: 4,
    torch.bfloat16: 5,
    torch.float8_e4m3fn: 6,
    torch.int8: 7,
    torch.bool: 0,
}

_MAX_DIMS = 3

View = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def view_of(tensor: torch.Tensor | None, operation: str, name: str, device: torch.device) -> View | None:
    """A tensor in the form that the native module takes if it cannot read the tensor itself (``BadTensor``)."""
    if tensor is None:
        return None
    try:
        shape = tensor.shape
        if tensor.device == device and 0 < len(shape) <= _MAX_DIMS:
            return tensor.data_ptr(), _DTYPES[tensor.dtype], shape, tensor.stride()
    except (AttributeError, KeyError, RuntimeError):
        pass
    raise _wrong(tensor, f"{operation}: {name}", device)


def _wrong(tensor: object, what: str, device: torch.device) -> InvalidArgument:
    if not isinstance(tensor, torch.Tensor):
        return InvalidArgument(f"{what}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device != device:
        return InvalidArgument(
            f"{what}: the tensor is on {tensor.device}, the group on {device}; move it with .to({str(device)!r})"
        )
    if tensor.dtype not in _DTYPES:
        return InvalidArgument(f"{what}: dtype is {tensor.dtype}, expected one of {', '.join(map(str, _DTYPES))}")
    if not 0 < tensor.dim() <= _MAX_DIMS:
        return InvalidArgument(f"{what}: the tensor has {tensor.dim()} dimensions, expected 1 to {_MAX_DIMS}")
    return InvalidArgument(
        f"{what}: a {type(tensor).__name__} has no memory of its own, expected a dense tensor; materialise it first"
    )


def tensor_of(array: object) -> torch.Tensor | None:
    """A tensor on memory of the native module, which lives as long as the tensor."""
    return None if array is None else torch.from_dlpack(array)
