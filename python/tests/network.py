"""Whether ranks of different nodes can exchange anything here."""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist
from ranks import run_ranks

import ferry


@functools.cache
def _works() -> bool:
    """Queried in separate processes: the network's library would stay loaded in the ranks forked from this one."""
    try:
        run_ranks(2, lambda rank: ferry.Group(dist.group.WORLD, ranks_per_node=1).destroy())
    except AssertionError as error:
        if "Unsupported" in str(error):
            return False
        raise
    return True


def skip_without_network() -> None:
    if not _works():
        pytest.skip("no network between nodes works here")
