"""Streams and events: everything in the package that differs between CUDA and host tensors.

On host tensors work is done when a call returns, so streams and events are objects with the usual methods that do
nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

__all__ = ["Call", "HostEvent", "HostStream", "Lane", "lane_of", "record_event", "wait_event"]


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


def record_event() -> Any:
    """An event on the current stream. A process that never used CUDA has nothing to wait for."""
    if not torch.cuda.is_initialized():
        return HostEvent()
    return torch.cuda.current_stream().record_event()


def wait_event(event: Any) -> None:
    """The current stream waits for an event of :func:`record_event` or of a :class:`Call`."""
    if not isinstance(event, HostEvent):
        torch.cuda.current_stream().wait_event(event)


class Call:
    """One call on a lane: the tensors it takes and returns, and the event at its end if one was requested."""

    def __init__(self) -> None:
        self.event: Any = None
        """Set when the call ends, if it is asynchronous."""
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def takes(self, *values: Any) -> None:
        """Tensors (or tuples and lists of them, or None) of the caller that the call's stream reads or writes."""
        self.inputs.extend(_tensors_in(values))

    def gives(self, *values: Any) -> None:
        """Tensors made on the call's stream that the caller's stream uses afterwards."""
        self.outputs.extend(_tensors_in(values))


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_in(value)


class Lane:
    """Stream order of the calls of a device's buffers. This class is for host tensors."""

    comm_stream: Any

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.comm_stream = HostStream()

    def call(self, previous: Any, asynchronous: bool) -> contextlib.AbstractContextManager[Call]:
        """Work inside waits for ``previous`` (an event), or else for the caller's stream. The caller's stream then
        waits for the call, or if ``asynchronous`` only where it waits for the call's event.
        """
        return _HostCall(asynchronous)

    def wait(self, event: Any) -> None:
        """Inside a call: makes the rest of it also wait for ``event``."""

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


class _HostCall(contextlib.AbstractContextManager):
    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous

    def __enter__(self) -> Call:
        self.call = Call()
        return self.call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.asynchronous:
            self.call.event = HostEvent()


class _InlineCall(contextlib.AbstractContextManager):
    """A call on the caller's stream."""

    def __init__(self, lane: CudaLane, previous: Any) -> None:
        if previous is not None and not isinstance(previous, HostEvent):
            torch.cuda.current_stream(lane.device).wait_event(previous)

    def __enter__(self) -> Call:
        return Call()

    def __exit__(self, *_: object) -> None: ...


class _BesideCall(contextlib.AbstractContextManager):
    """A call on the lane's stream, beside the caller's."""

    def __init__(self, lane: CudaLane, previous: Any) -> None:
        self._comm = lane.comm_stream
        self._compute = torch.cuda.current_stream(lane.device)
        self._previous = previous
        # Far cheaper than the context manager, but it would also change the current device.
        self._context = None
        if torch.cuda.current_device() != lane.device.index:
            self._context = torch.cuda.stream(self._comm)

    def __enter__(self) -> Call:
        if self._previous is None or isinstance(self._previous, HostEvent):
            self._comm.wait_stream(self._compute)
        else:
            self._comm.wait_event(self._previous)
        self._call = Call()
        if self._context is None:
            torch.cuda.set_stream(self._comm)
        else:
            self._context.__enter__()
        return self._call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        call, comm, compute = self._call, self._comm, self._compute
        try:
            if kind is None:
                call.event = comm.record_event()
        finally:
            if self._context is None:
                torch.cuda.set_stream(compute)
            else:
                self._context.__exit__(kind, error, trace)
            # A failed call must not leave work behind that the caller's stream does not wait for.
            if call.event is None:
                compute.wait_stream(comm)
        for tensor in call.outputs:
            tensor.record_stream(compute)
        for tensor in call.inputs:
            tensor.record_stream(comm)


class CudaLane(Lane):
    """A high-priority stream, shared by all buffers of one GPU, for asynchronous calls. A call whose results the
    caller's stream may use at once gains nothing from another stream, and runs on the caller's.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.comm_stream = torch.cuda.Stream(device, priority=-1)

    def call(self, previous: Any, asynchronous: bool) -> contextlib.AbstractContextManager[Call]:
        return (_BesideCall if asynchronous else _InlineCall)(self, previous)

    def wait(self, event: Any) -> None:
        if event is not None and not isinstance(event, HostEvent):
            torch.cuda.current_stream(self.device).wait_event(event)

    def join(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.comm_stream)

    def uses(self, tensors: Sequence[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self.device)
        for tensor in tensors:
            tensor.record_stream(stream)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def read_later(self, tensor: torch.Tensor) -> Callable[[], list[int]]:
        on_host = tensor.to("cpu", non_blocking=True)  # torch pins the memory of such copies
        copied = torch.cuda.current_stream(self.device).record_event()

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
