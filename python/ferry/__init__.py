"""Expert-parallel dispatch and combine on torch tensors.

    group = ferry.Group(torch.distributed.group.WORLD)
    routing = group.route(topk_idx, topk_weights, num_experts=256)
    received = group.dispatch(routing, x)
    y = experts(received.x, received.topk_idx, received.topk_weights)
    combined = group.combine(routing, y)

:mod:`ferry.nn` provides the same with gradients, :mod:`ferry.ops` as operators for torch.compile.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

# First: what follows needs torch.
from ferry import _torch as _torch  # isort: skip
import torch

from ferry import _native
from ferry._balance import Balance, ExpertCopy, MovePlan, balance, plan_moves
from ferry._errors import (
    CapacityExceeded,
    CudaError,
    DataCorrupt,
    FerryError,
    InternalError,
    InvalidArgument,
    PeerLost,
    SystemFailure,
    Timeout,
    TransportError,
    Unsupported,
)
from ferry._group import Group
from ferry._latency import LatencyCombined, LatencyDispatched, TileSignals, latency_bytes_required
from ferry._layout import DispatchLayout, dispatch_layout
from ferry._load import LoadSummary, LoadWindow
from ferry._membership import Membership, MembershipView
from ferry._network import NetworkUsage, RailUsage
from ferry._placement import LoadCounters, Placement, surviving_placement
from ferry._quantize import Quantized, dequantize, quantize
from ferry._routing import ChannelTables, Combined, Received, Routing
from ferry.gating import GatingOptions, select_experts

if TYPE_CHECKING:  # aliases, so that type checkers take them for a part of the package
    from ferry import nn as nn
    from ferry import ops as ops

# Imported when they are first used: together they take nearly as long as the rest.
_SUBMODULES = ("nn", "ops")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"ferry.{name}")
    raise AttributeError(f"module 'ferry' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list({*globals(), *_SUBMODULES})


def empty(*shape: int | Sequence[int], group: Group, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """As :meth:`Group.empty`: an uninitialised tensor in symmetric memory of ``group``."""
    return group.empty(*shape, dtype=dtype)


__version__: str = _native.version()
__commit__: str = _native.commit()

__all__ = [
    "Balance",
    "CapacityExceeded",
    "ChannelTables",
    "Combined",
    "CudaError",
    "DataCorrupt",
    "DispatchLayout",
    "ExpertCopy",
    "FerryError",
    "GatingOptions",
    "Group",
    "InternalError",
    "InvalidArgument",
    "LatencyCombined",
    "LatencyDispatched",
    "LoadCounters",
    "LoadSummary",
    "LoadWindow",
    "Membership",
    "MembershipView",
    "MovePlan",
    "NetworkUsage",
    "PeerLost",
    "Placement",
    "Quantized",
    "RailUsage",
    "Received",
    "Routing",
    "SystemFailure",
    "TileSignals",
    "Timeout",
    "TransportError",
    "Unsupported",
    "balance",
    "dequantize",
    "dispatch_layout",
    "empty",
    "latency_bytes_required",
    "plan_moves",
    "quantize",
    "select_experts",
    "surviving_placement",
]
