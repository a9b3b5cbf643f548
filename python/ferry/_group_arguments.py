"""Arguments of groups and their calls, checked before anything is sent."""

from __future__ import annotations

import datetime
import math
import operator
from typing import Any

import torch

from ferry._bootstrap import is_of_gpus
from ferry._errors import InvalidArgument, Unsupported

DEFAULT_ARENA_BYTES = 32 << 30  # kDefaultArenaBytes: address space, not memory
CALL_TIMEOUT_S = 600.0  # kDefaultCallTimeoutNs
ARRIVAL_TIMEOUT_S = 50.0  # kDefaultTimeoutNs
MASK_TIMEOUT_S = 100.0  # kDefaultMaskTimeoutNs

_NS_PER_S = 1_000_000_000
_MIN_POLL_S = 1e-9
_MAX_POLL_S = 24 * 3600


def _seconds(value: float | datetime.timedelta, what: str) -> float:
    try:
        return value.total_seconds() if isinstance(value, datetime.timedelta) else float(value)
    except (TypeError, ValueError):
        raise InvalidArgument(f"{what} is {value!r}, expected seconds or a datetime.timedelta") from None


def timeout_ns(timeout: float | datetime.timedelta, operation: str = "Group", name: str = "timeout") -> int:
    seconds = _seconds(timeout, f"{operation}: {name}")
    if not 0 < seconds < 2**33:
        raise InvalidArgument(f"{operation}: {name} is {seconds} s, expected more than 0 and less than 2**33")
    return int(seconds * _NS_PER_S)


def check_least(name: str, number: Any, least: int, *, or_none: bool = False, operation: str = "Group") -> None:
    """Refuses an argument of ``operation`` that is not an integer of at least ``least``."""
    if or_none and number is None:
        return
    try:
        is_right = operator.index(number) >= least
    except TypeError:
        is_right = False
    if not is_right:
        kind = "at least" if isinstance(number, int) else "an integer of at least"
        none = ", or None" if or_none else ""
        raise InvalidArgument(f"{operation}: {name} is {number!r}, expected {kind} {least}{none}")


def whole(name: str, number: Any, operation: str) -> int:
    """``int(number)``, as the native calls read numbers too; refuses a fraction, and what is no number."""
    try:
        result = int(number)
        is_right = not isinstance(number, float) or result == number
    except (TypeError, ValueError, OverflowError):
        is_right = False
    if not is_right:
        raise InvalidArgument(f"{operation}: {name} is {number!r}, expected an integer")
    return result


def check_text(name: str, text: Any) -> None:
    """Refuses an argument of Group that is not a str."""
    if not isinstance(text, str):
        raise InvalidArgument(f"Group: {name} is {text!r}, expected a str")


def network_poll_ns(poll: float | datetime.timedelta | None) -> int:
    """Nanoseconds as GroupOptions::network_poll_ns takes them: 0 is the default, -1 always."""
    if poll is None:
        return 0
    seconds = _seconds(poll, "Group: network_poll")
    if seconds == math.inf:
        return -1
    if not _MIN_POLL_S <= seconds <= _MAX_POLL_S:
        raise InvalidArgument(f"Group: network_poll is {seconds} s, expected more than 0, at most a day, or math.inf")
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
