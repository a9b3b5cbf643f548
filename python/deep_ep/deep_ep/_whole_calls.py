"""Calls that the native module makes as a whole: arguments are read, outputs allocated and ferry's calls made in one
step. It takes the common, valid case; None means that nothing was done, and that :mod:`deep_ep._throughput`,
:mod:`deep_ep._elastic_calls` or :mod:`deep_ep._latency_calls` makes the call step by step, which also says what is
wrong with wrong arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deep_ep._ep_handle import EPHandle
from deep_ep._member import Member
from deep_ep._previous_event import event_of
from deep_ep.utils.event import EventHandle, EventOverlap
from ferry import InvalidArgument


def run_in_order(
    member: Member, previous_event: Any, asynchronous: bool, inputs: tuple, method: Callable[..., Any], *arguments: Any
) -> Any:
    """What a method of ``Member.whole`` returns, its event now that of the call. ``inputs``: tensors that the GPU reads
    or writes.
    """
    if previous_event is None and not asynchronous:
        return method(*arguments)
    try:
        previous = event_of(previous_event, "previous_event")
    except InvalidArgument:
        return None
    with member.lane.call(previous, asynchronous) as call:
        made = method(*arguments)
        if isinstance(made, tuple):
            call.takes(*inputs)
            for one in arguments:
                if isinstance(one, EPHandle) and one.do_expand:
                    call.takes(one.recv_src_metadata, one._last_equal)
            call.gives(*(part for part in made if not isinstance(part, list)))  # lists are of counts
            for part in made:
                if isinstance(part, EPHandle) and all(part is not one for one in arguments):  # a new one
                    call.gives(*vars(part).values())
    if call.event is not None and isinstance(made, tuple):
        next(part for part in made if isinstance(part, EventOverlap)).event = EventHandle._of(call.event)
    return made
