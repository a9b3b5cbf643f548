"""Exceptions: one class per error code of the C++ library, each also derived from the usual Python exception."""

from __future__ import annotations

import re


class FerryError(Exception):
    """Base class of all failures of Ferry.

    ``code`` is the name of the C++ error code, e.g. ``"kTimeout"``; ``peer`` the rank at fault, or None.
    """

    code = "kInternal"

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class InvalidArgument(FerryError, ValueError):
    """A shape, dtype, stride, id or tensor is wrong, here or on another rank. Nothing was sent, nothing was changed."""

    code = "kInvalidArgument"


class Unsupported(FerryError, NotImplementedError):
    """Valid, but this build, backend or machine cannot do it."""

    code = "kUnsupported"


class CapacityExceeded(FerryError):
    """More rows, tokens or bytes than there is room for. Nothing was sent."""

    code = "kCapacity"


class Timeout(FerryError, TimeoutError):
    """A wait outlasted its deadline; ``peer`` is the rank that was waited for. The group is broken."""

    code = "kTimeout"


class PeerLost(FerryError, ConnectionError):
    """The rank ``peer`` died or left. The group is broken."""

    code = "kPeerLost"


class TransportError(FerryError, ConnectionError):
    """The network or the process group's own all-gather failed."""

    code = "kTransport"


class CudaError(FerryError, RuntimeError):
    """A CUDA call failed."""

    code = "kCuda"


class SystemFailure(FerryError, OSError):
    """A system call failed: out of memory, too many open files, …"""

    code = "kSystem"


class InternalError(FerryError, RuntimeError):
    """A bug in Ferry; please report it."""


class DataCorrupt(FerryError, RuntimeError):
    """Rows that ``peer`` sent arrived with other bytes (``Group(verify=True)``). The group is broken."""

    code = "kDataCorrupt"


_BY_NUMBER = (
    None,
    InvalidArgument,
    Unsupported,
    CapacityExceeded,
    Timeout,
    PeerLost,
    TransportError,
    CudaError,
    SystemFailure,
    InternalError,
    DataCorrupt,
)


# The library's text for a view whose data is at 0, and the advice that fits tensors.
_NULL = " is a null pointer, expected memory of "
_VIEW_ADVICE = "; leave the view empty if it is not used"
_TENSOR_ADVICE = (
    "; the tensor has no memory of its own: of a DTensor pass .to_local(); a FakeTensor, or one whose storage was "
    "resized to 0, cannot be read"
)


# Names of C++ in the library's texts. Options of these classes are arguments of their constructors; those of a call are
# arguments of the call that the text begins with.
_WITH_OPTIONS = ("Group", "Membership")
_OPTION = re.compile(r"\b([A-Z]\w*)Options::([a-z]\w*)")
_METHOD = re.compile(r"\b([A-Z][a-z]\w*)::([a-z]\w*)")
_OF_ONE_SIDED = re.compile(r" \(of a OneSided: \w+\)")  # a class that Python does not have
_OF_BALANCE = re.compile(r"\b(balance|plan_moves): options\.")  # whose options are arguments here
# Options that are no arguments here, and where their values come from.
_NO_ARGUMENTS = {"interrupted": "a signal's handler", "present_ranks": "view.ids of members="}


def _argument(option: re.Match[str]) -> str:
    owner, name = option.groups()
    if name in _NO_ARGUMENTS:
        return _NO_ARGUMENTS[name]
    argument = f"{name.removesuffix('_ns')}="
    return f"{argument} of ferry.{owner}" if owner in _WITH_OPTIONS else argument


def _method(method: re.Match[str]) -> str:
    owner, name = method.groups()
    return owner if name == "create" else f"{owner}.{name}"


def _in_python(message: str) -> str:
    """The text with options and methods of C++ as programs in Python write them."""
    message = _OF_BALANCE.sub(r"\1: ", message)
    return _METHOD.sub(_method, _OPTION.sub(_argument, _OF_ONE_SIDED.sub("", message)))


def from_status(code: int, message: str, peer: int) -> FerryError:
    """The exception for a C++ Status that is not ok. Called by the native module."""
    if _NULL in message:
        message = message.replace(_VIEW_ADVICE, "") + _TENSOR_ADVICE
    return _BY_NUMBER[code](_in_python(message), peer if peer >= 0 else None)
