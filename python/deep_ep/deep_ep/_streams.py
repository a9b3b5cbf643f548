"""Streams and events: everything in the package that differs between CUDA and host tensors.

On host tensors work is done when a call returns, so streams and events are objects with the usual methods that do
nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

__all__ = [
    "BesideCall",
    "HostEvent",
    "HostStream",
    "Lane",
    "current_stream",
    "lane_of",
    "record_event",
    "wait_event",
]


class HostEvent:
    """An event where nothing is ever pending."""

    def wait(self, stream: object = None) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class HostStream:
    """A stream where everything is done at once."""

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        return event if event is not None else HostEvent()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *_: object) -> None: ...


# What torch.cuda.current_stream asks. Not in every torch.
_ids_of_current = getattr(torch._C, "_cuda_getCurrentStream", None)
_known_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current_stream(index: int | None = None) -> torch.cuda.Stream:
    """The current stream of a GPU, by default of the current one. Finding an object again costs far less than having
    torch make another. torch.compile can trace only torch's own function.
    """
    if _ids_of_current is None or torch.compiler.is_compiling():
        return torch.cuda.current_stream() if index is None else torch.cuda.current_stream(index)
    ids = _ids_of_current(torch.cuda.current_device() if index is None else index)
    stream = _known_streams.get(ids)
    if stream is None:
        stream = _known_streams[ids] = torch.cuda.current_stream(index)
    return stream


def record_event() -> Any:
    """An event on the current stream. A process that never used CUDA has nothing to wait for."""
    if not torch.cuda.is_initialized():
        return HostEvent()
    return current_stream().record_event()


def wait_event(event: Any) -> None:
    """The current stream waits for an event of :func:`record_event` or of a :class:`BesideCall`."""
    if not isinstance(event, HostEvent):
        current_stream().wait_event(event)


class Lane:
    """Stream order of the calls of a device's buffers. This class is for host tensors."""

    comm_stream: Any

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.comm_stream = HostStream()

    def beside(self, previous: Any) -> BesideCall:
        """Context of an asynchronous call: work inside waits for ``previous`` (an event), or else for the caller's
        stream, which waits for the call only where it waits for the call's event.
        """
        return _DONE

    def wait(self, event: Any) -> None:
        """Makes later work on the current stream, in a call the rest of it, wait for ``event``, if it is not None."""

    def join(self) -> None:
        """The current stream waits for the asynchronous calls that were made."""

    def uses(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors of a call's stream that work on the current stream reads."""

    def synchronize(self) -> None:
        """Wait on the host for synchronous calls that were made."""

    def read_later(self, tensor: torch.Tensor) -> Callable[[], list[int]]:
        """Inside a call: start copying a small tensor to the host. The result waits for the copy, not for later
        work.
        """
        return tensor.tolist


class BesideCall:
    """An asynchronous call. This class is for host tensors."""

    __slots__ = ()

    event: Any = HostEvent()
    """The end of the call, once its context is left without an error."""

    def __enter__(self) -> BesideCall:
        return self

    def __exit__(self, *_: object) -> None: ...

    def takes(self, values: Iterable[Any]) -> None:
        """After the call: tensors of the caller that the call's stream reads or writes, also in tuples and lists."""

    def gives(self, values: Iterable[Any]) -> None:
        """After the call: tensors made on the call's stream that the caller's stream uses, also in tuples. Lists are of
        counts.
        """


_DONE = BesideCall()


def _use(values: Iterable[Any], stream: torch.cuda.Stream, sequences: type | tuple[type, ...]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            value.record_stream(stream)
        elif isinstance(value, sequences):
            _use(value, stream, sequences)


class _CudaBesideCall(BesideCall):
    """A call on the lane's stream, beside the caller's."""

    __slots__ = ("_comm", "_compute", "_context", "_previous", "event")

    def __init__(self, lane: CudaLane, previous: Any) -> None:
        self.event = None
        self._comm = lane.comm_stream
        self._compute = current_stream(lane.device.index)
        self._previous = previous
        # Far cheaper than the context manager, but it would also change the current device.
        self._context = None
        if torch.cuda.current_device() != lane.device.index:
            self._context = torch.cuda.stream(self._comm)

    def __enter__(self) -> BesideCall:
        if self._previous is None or isinstance(self._previous, HostEvent):
            self._comm.wait_stream(self._compute)
        else:
            self._comm.wait_event(self._previous)
        if self._context is None:
            torch.cuda.set_stream(self._comm)
        else:
            self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.event = self._comm.record_event()
        finally:
            if self._context is None:
                torch.cuda.set_stream(self._compute)
            else:
                self._context.__exit__(kind, error, trace)
            # A failed call must not leave work behind that the caller's stream does not wait for.
            if self.event is None:
                self._compute.wait_stream(self._comm)

    def takes(self, values: Iterable[Any]) -> None:
        _use(values, self._comm, (tuple, list))

    def gives(self, values: Iterable[Any]) -> None:
        _use(values, self._compute, tuple)


class CudaLane(Lane):
    """A high-priority stream, shared by all buffers of one GPU, for asynchronous calls. A call whose results the
    caller's stream may use at once gains nothing from another stream, and runs on the caller's.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.comm_stream = torch.cuda.Stream(device, priority=-1)

    def beside(self, previous: Any) -> BesideCall:
        return _CudaBesideCall(self, previous)

    def wait(self, event: Any) -> None:
        if event is not None and not isinstance(event, HostEvent):
            current_stream(self.device.index).wait_event(event)

    def join(self) -> None:
        current_stream(self.device.index).wait_stream(self.comm_stream)

    def uses(self, tensors: Sequence[torch.Tensor]) -> None:
        stream = current_stream(self.device.index)
        for tensor in tensors:
            tensor.record_stream(stream)

    def synchronize(self) -> None:
        current_stream(self.device.index).synchronize()

    def read_later(self, tensor: torch.Tensor) -> Callable[[], list[int]]:
        on_host = tensor.to("cpu", non_blocking=True)  # torch pins the memory of such copies
        copied = current_stream(self.device.index).record_event()

        def read() -> list[int]:
            copied.synchronize()
            return on_host.tolist()

        return read


_lanes: dict[torch.device, Lane] = {}
_lanes_lock = threading.Lock()


def lane_of(device: torch.device) -> Lane:
    """The lane of a device, which all its buffers share."""
    with _lanes_lock:
        if device not in _lanes:
            _lanes[device] = CudaLane(device) if device.type == "cuda" else Lane(device)
        return _lanes[device]
