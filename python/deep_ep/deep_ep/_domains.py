"""Ranks that reach each other's memory: those of a host, or of a node emulated on one."""

from __future__ import annotations

import operator
import os
from typing import Any

from ferry import InvalidArgument

VARIABLE = "DEEP_EP_RANKS_PER_NODE"
_OF_LAUNCHER = "LOCAL_WORLD_SIZE"


def variable_ranks_per_node() -> int:
    """Number in the environment variable; 0 if it is not set."""
    return _number(os.environ.get(VARIABLE) or "0", VARIABLE)


def choose_ranks_per_node(requested: int | None, num_ranks: int) -> int:
    """For ferry.Group: the requested number, else that of the environment variable; 0: ferry's choice. A group of fewer
    ranks is one node.
    """
    chosen = variable_ranks_per_node() if requested is None else _number(requested, "ranks_per_node")
    return min(chosen, num_ranks)


def _number(value: Any, what: str) -> int:
    try:
        number = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        raise InvalidArgument(f"{what} is {value!r}, expected a number of ranks, or 0")
    return number


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """(hosts, ranks of a host that reach each other's memory) of a torch process group, from the environment variables
    DEEP_EP_RANKS_PER_NODE or LOCAL_WORLD_SIZE (of torchrun); without them one host. Or those of a buffer. Local.
    """
    of_buffer = getattr(group, "get_physical_domain_size", None)
    if of_buffer is not None:
        return of_buffer()
    num_ranks = group.size()
    per_node = choose_ranks_per_node(None, num_ranks) or _launched_ranks_per_node(group)
    if num_ranks % per_node != 0:
        raise InvalidArgument(f"{VARIABLE} is {per_node}, expected a divisor of the group's {num_ranks} ranks")
    return num_ranks // per_node, per_node


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool | None = None) -> tuple[int, int]:
    """(scale-out ranks, scale-up ranks) of a torch process group or a buffer: as :func:`get_physical_domain_size`, for
    any ``allow_hybrid_mode``.
    """
    return get_physical_domain_size(group)


def _launched_ranks_per_node(group: Any) -> int:
    """The group's ranks on each host, if they are consecutive there and equally many; else all of them."""
    num_ranks, on_host = group.size(), _number(os.environ.get(_OF_LAUNCHER) or "0", _OF_LAUNCHER)
    if on_host == 0:
        return num_ranks
    import torch.distributed as dist

    hosts = [rank // on_host for rank in dist.get_process_group_ranks(group)]
    per_node = hosts.count(hosts[0])
    first_of_node = hosts[::per_node]
    is_regular = hosts == [host for host in first_of_node for _ in range(per_node)]
    return per_node if is_regular and len(set(first_of_node)) == len(first_of_node) else num_ranks
