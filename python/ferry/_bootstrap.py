"""Ways in which the ranks of a new group find each other."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ferry import _native
from ferry._errors import InvalidArgument

if TYPE_CHECKING:
    import torch.distributed as dist

    from ferry._native import Membership as NativeMembership


class Members(Protocol):
    """A :class:`ferry.Membership`. Here its type is open, so that only memberships import groups."""

    _native: NativeMembership

    @property
    def view(self) -> Any:
        """A :class:`ferry.MembershipView`."""


def _process_group_gather(group: dist.ProcessGroup) -> Callable[[bytes], list[bytes]]:
    """All-gather of bytes by the process group's tensors. ``all_gather_object`` would need numpy, without which torch
    may be installed.
    """
    import torch
    import torch.distributed as dist

    # For example "cpu:gloo,cuda:nccl": the backend for tensors of each kind of device.
    device = torch.device("cpu" if "cpu:" in dist.get_backend_config(group) else "cuda")

    def all_gather(row: torch.Tensor) -> list[list[int]]:
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, row, group=group)
        return [each.tolist() for each in rows]

    def gather(mine: bytes) -> list[bytes]:
        sizes = [size for (size,) in all_gather(torch.tensor([len(mine)], device=device))]
        padded = mine.ljust(max(1, *sizes), b"\0")
        rows = all_gather(torch.tensor(list(padded), dtype=torch.uint8, device=device))
        return [bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    return gather


def address_towards_master() -> str:
    """This host's address on the way to MASTER_ADDR, by which torch.distributed finds rank 0. Empty if it is not set or
    leads nowhere. Sends nothing."""
    host = os.environ.get("MASTER_ADDR", "").removeprefix("[").removesuffix("]")
    if not host:
        return ""
    try:
        # Connecting a datagram socket only looks up the route; any port will do (discard, RFC 863).
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return ""


def is_of_gpus(group: Any) -> bool:
    """Whether it is a process group that supports only GPU tensors."""
    if group is None or "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "nccl"


def bootstrap_of(members: Members, operation: str) -> _native.Bootstrap:
    """Among the members of the present view. Collective over them."""
    native = getattr(members, "_native", None)
    if not isinstance(native, _native.Membership):
        raise InvalidArgument(f"{operation}: members is a {type(members).__name__}, expected a ferry.Membership")
    return native.bootstrap()


def bootstrap_for(
    group: dist.ProcessGroup | None,
    comm: Any,
    timeout_ns: int,
    *,
    members: Members | None = None,
    operation: str = "Group",
) -> _native.Bootstrap:
    """From a torch process group, an mpi4py communicator, a ferry.Membership, or a launcher's environment variables."""
    if sum(one is not None for one in (group, comm, members)) > 1:
        raise InvalidArgument(f"{operation}: give a process group, a communicator or members, not several of them")
    if members is not None:
        return bootstrap_of(members, operation)
    if comm is not None:
        if not all(hasattr(comm, name) for name in ("Get_rank", "Get_size", "allgather")):
            raise InvalidArgument(f"{operation}: comm is a {type(comm).__name__}, expected an mpi4py communicator")
        return _native.callback_bootstrap(comm.Get_rank(), comm.Get_size(), lambda mine: comm.allgather(mine), "")
    if group is None:
        return _native.environment_bootstrap(timeout_ns)
    if "torch.distributed" not in sys.modules or not hasattr(group, "rank") or not hasattr(group, "size"):
        raise InvalidArgument(
            f"{operation}: group is a {type(group).__name__}, expected a torch.distributed.ProcessGroup of which this "
            "process is a member, or comm=an mpi4py communicator"
        )
    return _native.callback_bootstrap(
        group.rank(), group.size(), _process_group_gather(group), address_towards_master()
    )
