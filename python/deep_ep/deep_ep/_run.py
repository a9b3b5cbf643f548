"""One native call of a buffer, in order with streams and events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deep_ep._arguments import check_unknown
from deep_ep._ep_handle import EPHandle
from deep_ep._member import Member
from deep_ep._previous_event import event_of
from deep_ep.utils.event import EventHandle, EventOverlap


def run_in_order(
    member: Member,
    operation: str,
    previous_event: Any,
    asynchronous: bool,
    unknown: Mapping[str, Any] | None,
    inputs: tuple,
    call: Callable[..., tuple],
    *arguments: Any,
    problem: Exception | None = None,
) -> Any:
    """Result of a method of :class:`ferry.frontend.BufferCalls`, with the event of the call in it.

    unknown: arguments that this package does not have. inputs: tensors that the GPU reads or writes, and the EPHandle.
    problem: an exception for wrong arguments that the caller has found. The native call raises this exception, or the
    first one found here, after it has refused the operation on all ranks.
    """
    if previous_event is None and not asynchronous and not unknown and problem is None:
        return call(None, *arguments)
    try:
        if unknown:
            check_unknown(operation, unknown)
        previous = event_of(previous_event, f"{operation}: previous_event")
    except Exception as error:
        problem = error
    if problem is not None:
        try:
            return call(problem, *arguments)
        finally:
            # The exception's traceback has this frame: a cycle, which would keep tensors until it is collected.
            del problem
    lane = member.lane
    if not asynchronous:
        lane.wait(previous)
        return call(None, *arguments)
    with lane.beside(previous) as run:
        made = call(None, *arguments)
    run.takes(inputs)
    run.gives(made)
    for one in inputs:
        if isinstance(one, EPHandle) and one.do_expand:
            run.takes((one.recv_src_metadata, one._last_equal))
    for part in made:
        if isinstance(part, EventOverlap):
            part.event = EventHandle._of(run.event)
        elif isinstance(part, EPHandle) and all(part is not one for one in inputs):  # a new one
            run.gives(vars(part).values())
    return made
