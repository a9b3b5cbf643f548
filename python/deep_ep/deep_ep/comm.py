"""Functions of release 2.5 that take a buffer or a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep_ep._device import choose_device
from deep_ep._domains import get_logical_domain_size, get_physical_domain_size
from deep_ep._streams import lane_of

if TYPE_CHECKING:
    import torch

    from deep_ep.buffers.ep import EPBuffer

__all__ = [
    "barrier",
    "destroy_all_managed_nccl_comm",
    "get_comm_stream",
    "get_logical_domain_size",
    "get_physical_domain_size",
]


def barrier(
    buffer: EPBuffer,
    wait_comm_stream: bool = True,
    with_cpu_sync: bool = False,
    sequential: bool = True,
    context_idx: int | None = None,
) -> None:
    """:meth:`deep_ep.EPBuffer.barrier`."""
    buffer.barrier(wait_comm_stream, with_cpu_sync, sequential, context_idx)


def get_comm_stream(buffer: Any) -> torch.cuda.Stream:
    """The stream that asynchronous calls of ``buffer`` run on; without a buffer that of the device that a new one
    would have.
    """
    return lane_of(choose_device(None)).comm_stream if buffer is None else buffer.get_comm_stream()


def destroy_all_managed_nccl_comm() -> None:
    """Does nothing: no NCCL communicator is ever created."""
