"""Parts of ferry for packages that give it another interface, as ``deep_ep`` does. Programs use :class:`ferry.Group`.

A front end makes its calls through one native call each, which reads and checks arguments, makes the calls of ferry and
refuses them on all ranks if an argument is wrong: :func:`deep_ep_calls`. The other parts are helpers around those
calls.
"""

from __future__ import annotations

from typing import Any

from ferry import _native
from ferry._eager import eager
from ferry._group import Group
from ferry._group_arguments import check_least, usable_device
from ferry._latency import Sent as SplitCall
from ferry._native import BufferCalls
from ferry._routing import Routing

__all__ = ["BufferCalls", "SplitCall", "check_least", "deep_ep_calls", "eager", "refuse_in_handler", "usable_device"]


def deep_ep_calls(
    group: Group,
    *,
    types: tuple[type, ...],
    steps: Any,
    captured: list[Routing],
    to_all: Routing,
    narrow_ids: bool,
) -> BufferCalls:
    """The native calls of a ``deep_ep`` buffer on ``group``.

    types: the package's classes EventOverlap, Suggested, NotAConfig, Link, EPHandle and LatencyLink, in this order.
    steps: the steps of the calls that are operations of torch, a ``deep_ep._steps.Steps``.
    captured: collects the routings that a graph has captured.
    to_all: a routing of ``group`` that sends a row of each rank to all.
    narrow_ids: expert ids are i32, else i64.
    """
    return _native.BufferCalls(group._calls, group, types, steps, captured, to_all, narrow_ids)


def refuse_in_handler(group: Group, operation: str) -> None:
    """Raise InvalidArgument if this is a signal's handler that runs while a call of ``group`` waits."""
    group._native.refuse_in_handler(operation)
