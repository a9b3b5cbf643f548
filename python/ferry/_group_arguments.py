"""Arguments of groups and their calls, checked before anything is sent."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch

from ferry._bootstrap import is_of_gpus
from ferry._errors import InvalidArgument, Unsupported

DEFAULT_ARENA_BYTES = 32 << 30  # kDefaultArenaBytes: address space, not memory
CALL_TIMEOUT_S = 600.0  # kDefaultCallTimeoutNs
ARRIVAL_TIMEOUT_S = 50.0  # kDefaultTimeoutNs
MASK_TIMEOUT_S = 100.0  # kDefaultMaskTimeoutNs

_NS_PER_S = 1_000_000_000
_MAX_BIASES = 2
_MOST = (1 << 31) - 1


def timeout_ns(timeout: float | datetime.timedelta) -> int:
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)
    if not 0 < seconds < 2**33:
        raise InvalidArgument(f"Group: timeout is {seconds} s, expected more than 0 and less than 2**33")
    return int(seconds * _NS_PER_S)


def device_of(device: torch.device | str | int | None, group: Any) -> torch.device:
    """The device of a group's tensors. By default the current GPU for a process group of GPUs, else the CPU."""
    if device is None:
        device = "cuda" if is_of_gpus(group) else "cpu"
    return usable_device(device, "Group: device")


def usable_device(device: torch.device | str | int, what: str) -> torch.device:
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidArgument(f"{what} is {device!r}, expected cpu or cuda") from None
    if chosen.type == "cpu":
        return torch.device("cpu")  # tensors are on "cpu", not on "cpu:0"
    if chosen.type != "cuda":
        raise Unsupported(f"{what} is {chosen}, expected cpu or cuda")
    if not torch.cuda.is_available():
        raise Unsupported(f"{what} is {chosen}, but torch finds no GPU on this machine; use device='cpu'")
    num_devices = torch.cuda.device_count()
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    if index >= num_devices:
        raise InvalidArgument(f"{what} is {chosen}, expected cuda:0 to cuda:{num_devices - 1}")
    return torch.device("cuda", index)


def width_of(tensor: torch.Tensor, what: str) -> int:
    """The size of a row."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 1:
        raise InvalidArgument(f"{what}: expected a torch.Tensor of rows, got {type(tensor).__name__}")
    return tensor.shape[-1]


def two_biases(bias: torch.Tensor | Sequence[torch.Tensor] | None) -> list[torch.Tensor | None]:
    """Both biases of a combine, None where there is none."""
    try:
        biases = [bias] if isinstance(bias, torch.Tensor) else list(bias or [])
    except TypeError:
        raise InvalidArgument(f"combine: bias is a {type(bias).__name__}, expected one or two tensors") from None
    if len(biases) > _MAX_BIASES:
        raise InvalidArgument(f"combine: {len(biases)} biases, expected at most two; add them first")
    return biases + [None] * (_MAX_BIASES - len(biases))


def whole(value: Any, operation: str, name: str, bits: int = 32) -> int:
    """An integer that fits the native module's, which raises TypeError for others: too late to tell the peers."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"{operation}: {name} is {value!r}, expected an integer") from None
    if not -(1 << (bits - 1)) < number < 1 << (bits - 1):
        raise InvalidArgument(f"{operation}: {name} is {number}, expected less than 2**{bits - 1}")
    return number


def owners_of(expert_to_rank: Sequence[int] | None, operation: str) -> list[int]:
    """Empty where none are given."""
    if expert_to_rank is None:
        return []
    try:
        owners = [int(rank) for rank in expert_to_rank]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"{operation}: expert_to_rank: expected the rank of each expert; {error}") from None
    for expert, rank in enumerate(owners):
        if not -_MOST <= rank <= _MOST:
            raise InvalidArgument(f"{operation}: expert_to_rank[{expert}] is {rank}, expected less than 2**31")
    return owners


def kernel_options(num_sms: int, operation: str) -> tuple[int, int, int]:
    """KernelOptions, of which Python sets one."""
    return whole(num_sms, operation, "num_sms"), 0, 0
