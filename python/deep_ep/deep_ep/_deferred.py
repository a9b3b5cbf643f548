"""Calls whose last part runs when their event is waited for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deep_ep._member import Member
from deep_ep.utils.event import EventOverlap
from ferry import InvalidArgument
from ferry.frontend import eager

Deferred = tuple[Callable[[], tuple], tuple[torch.Tensor, ...], EventOverlap]


def deferred(member: Member, operation: str, made: Deferred) -> EventOverlap:
    """The event of a native call that has sent and received, and whose wait returns the results.

    made: the last part of the call, the tensors that this part reads, and the event.
    """
    finish, read, event = made

    @eager
    def epilogue() -> tuple:
        if member.is_destroyed:
            raise InvalidArgument(
                f"{operation}: the buffer was destroyed before the event was waited for; wait for the events of "
                "defer_epilogue=True first"
            )
        member.lane.uses(read)
        return finish()

    event.register_hook_after_wait(epilogue)
    return event


def check_deferred(operation: str, defer_epilogue: bool, asynchronous: bool) -> Exception | None:
    """The exception for a deferred call without an event to wait for."""
    if not defer_epilogue or asynchronous:
        return None
    return InvalidArgument(
        f"{operation}: defer_epilogue is True and async_with_compute_stream False, expected both to be True"
    )
