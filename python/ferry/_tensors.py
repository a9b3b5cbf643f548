"""torch tensors to and from the native module."""

from __future__ import annotations

import torch

from ferry._errors import InvalidArgument

# Numbers of ferry::DType. Rows move as bytes: other types of an element's size do as well where only bytes matter.
_DTYPES = {
    torch.uint8: 0,
    torch.int32: 1,
    torch.int64: 2,
    torch.float32: 3,
    torch.float16: 4,
    torch.bfloat16: 5,
    torch.float8_e4m3fn: 6,
    torch.int8: 0,
}

View = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def view_of(tensor: torch.Tensor | None, what: str, device: torch.device) -> View | None:
    """What the native module takes for a tensor."""
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"{what}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device.type != device.type:
        raise InvalidArgument(
            f"{what}: the tensor is on {tensor.device}, the group on {device}; move it with .to({str(device)!r})"
        )
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidArgument(f"{what}: dtype is {tensor.dtype}, expected one of {', '.join(map(str, _DTYPES))}")
    if tensor.dim() not in (1, 2, 3):
        raise InvalidArgument(f"{what}: the tensor has {tensor.dim()} dimensions, expected 1 to 3")
    return tensor.data_ptr(), dtype, tuple(tensor.shape), tensor.stride()


def tensor_of(array: object) -> torch.Tensor | None:
    """A tensor on memory of the native module, which lives as long as the tensor."""
    return None if array is None else torch.from_dlpack(array)
