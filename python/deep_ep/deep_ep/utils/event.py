"""Points in stream order, which calls return and can wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deep_ep import _streams

__all__ = ["EventHandle", "EventOverlap"]


class EventHandle:
    """A point on the stream that is current at creation. On CPU buffers, where nothing is ever pending, a no-op."""

    def __init__(self) -> None:
        self.event: Any = _streams.record_event()
        """The torch.cuda.Event, or an object with its methods if CUDA is not in use."""

    @classmethod
    def _of(cls, event: Any) -> EventHandle:
        handle = cls.__new__(cls)
        handle.event = event
        return handle

    def current_stream_wait(self) -> None:
        """Later work on the current stream waits for this point."""
        _streams.wait_event(self.event)


class EventOverlap:
    """The end of a call: wait for it, or let other work overlap with it first.

        with event:              # work in the block overlaps with the call,
            other_work()
        use(results)             # what follows the block waits for it

    event: an EventHandle, or None if there is nothing to wait for (a call that was not asynchronous).
    extra_tensors: kept alive as long as this object.
    """

    # Most calls are not asynchronous: for those the native module makes objects without attributes of their own.
    event: EventHandle | None = None
    extra_tensors: Sequence[torch.Tensor] | None = None
    _hooks: Sequence[Callable[[], object]] = ()
    _release_at_exit = False

    def __init__(self, event: EventHandle | None = None, extra_tensors: Sequence[torch.Tensor] | None = None) -> None:
        if event is not None:
            self.event = event
        if extra_tensors is not None:
            self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """The current stream waits for the event, then the hooks run. ``release_handle``: forget the event and
        ``extra_tensors`` afterwards. Without an event there is nothing to wait for.

        Returns what the first hook returns, which is the deferred results of a call with ``defer_epilogue=True``; None
        without a hook.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        result = None
        if self._hooks:
            hooks, self._hooks = self._hooks, ()
            result, *_ = [hook() for hook in hooks]
        if release_handle:
            self.event = None
            self.extra_tensors = None
        return result

    def wait(self) -> Any:
        """:meth:`current_stream_wait`, and what it returns."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """``hook_after_wait()`` runs once, at the next wait, on the stream that waits."""
        self._hooks = [*self._hooks, hook_after_wait]

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """For ``with event(release_handle=True):``."""
        self._release_at_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        release, self._release_at_exit = self._release_at_exit, False
        if self.event is not None:
            self.current_stream_wait(release)
