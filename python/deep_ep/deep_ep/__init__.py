"""The deep_ep interface on Ferry: programs written for it run unchanged, on GPUs or on CPU tensors.

:class:`Buffer` is the first generation, :class:`ElasticBuffer` the second. Ferry's docs/deep_ep.md lists the supported
parts, the differences, and the calls that raise NotImplementedError.
"""

from deep_ep._C import topk_idx_t
from deep_ep._config import Config
from deep_ep._domains import get_logical_domain_size, get_physical_domain_size
from deep_ep._version import __version__
from deep_ep.buffers.elastic import ElasticBuffer, EPHandle
from deep_ep.buffers.legacy import Buffer
from deep_ep.utils.event import EventHandle, EventOverlap

__all__ = [
    "Buffer",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "__version__",
    "destroy_all_managed_nccl_comm",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
]

EPBuffer = ElasticBuffer


def destroy_all_managed_nccl_comm() -> None:
    """Does nothing: no NCCL communicator is ever created."""
