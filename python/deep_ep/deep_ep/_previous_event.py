"""The argument ``previous_event`` of calls."""

from __future__ import annotations

from typing import Any

import torch

from deep_ep._streams import HostEvent
from deep_ep.utils.event import EventHandle, EventOverlap
from ferry import InvalidArgument


def event_of(previous: Any, what: str) -> Any:
    """The torch or host event of an argument ``previous_event``; None if there is none to wait for."""
    if isinstance(previous, EventOverlap):
        previous = previous.event
    if isinstance(previous, EventHandle):
        previous = previous.event
    if previous is None or isinstance(previous, (HostEvent, torch.cuda.Event)):
        return previous
    raise InvalidArgument(
        f"{what} is a {type(previous).__name__}, expected an EventHandle, an EventOverlap, a torch.cuda.Event or None"
    )
