"""Setting up the ranks of a program that starts one process for each device of a host."""

from __future__ import annotations

import os
import random

import torch
import torch.distributed as dist

from deep_ep._domains import get_logical_domain_size, get_physical_domain_size

__all__ = ["dist_print", "get_logical_domain_size", "get_physical_domain_size", "init_dist", "init_seed"]

_local_rank: int | None = None


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
    """Create the default process group, select GPU ``local_rank``, and seed the generators.

    One process per device. Environment variables give the address of rank 0 (MASTER_ADDR, by default this host, and
    MASTER_PORT), the number of hosts (WORLD_SIZE) and the index of this one (RANK). NCCL, or gloo if there is no GPU.
    torch's default device and dtype are not changed.

    Returns the rank, the number of ranks, and a group of all of them.
    """
    global _local_rank
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29517")
    num_hosts, host = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    options = {"backend": "gloo"}
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        options = {"backend": "nccl", "device_id": torch.device("cuda", local_rank)}
    dist.init_process_group(
        init_method=f"tcp://{address}:{port}",
        world_size=num_hosts * num_local_ranks,
        rank=host * num_local_ranks + local_rank,
        **options,
    )
    _local_rank = local_rank
    init_seed(seed)
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(dist.get_world_size())))


def init_seed(seed: int) -> None:
    """Seed Python's generator and torch's, each rank's differently."""
    own = seed * 1_000_003 + (dist.get_rank() if dist.is_initialized() else 0)
    random.seed(own)
    torch.manual_seed(own)


def dist_print(*values: object, once_in_node: bool = False, **options: object) -> None:
    """``print`` with a flush. ``once_in_node``: only on the first rank of each host. Local: no rank waits for
    another.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0")) if _local_rank is None else _local_rank
    if not once_in_node or local_rank == 0:
        print(*values, **{"flush": True, **options})
