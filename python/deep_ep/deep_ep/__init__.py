"""The deep_ep interface on Ferry: programs written for it run unchanged, on GPUs or on CPU tensors.

:class:`Buffer` is the first generation, :class:`ElasticBuffer` the second, :class:`EPBuffer` that of release 2.5.
Ferry's docs/deep_ep.md lists the supported parts, the differences, and what raises NotImplementedError.
"""

from deep_ep import comm
from deep_ep._absent import absent_class
from deep_ep._C import topk_idx_t
from deep_ep._config import Config
from deep_ep._domains import get_logical_domain_size, get_physical_domain_size
from deep_ep._elastic_sizes import get_num_allocation_alignment, get_num_rdma_alignment, get_num_tma_alignment
from deep_ep._version import __version__
from deep_ep.buffers.elastic import ElasticBuffer
from deep_ep.buffers.ep import EPBuffer, EPHandle
from deep_ep.buffers.legacy import Buffer
from deep_ep.comm import destroy_all_managed_nccl_comm
from deep_ep.utils.event import EventHandle, EventOverlap

__all__ = [
    "BucketBuffer",
    "BucketSession",
    "Buffer",
    "BufferAllocator",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EngramBuffer",
    "EventHandle",
    "EventOverlap",
    "PPBuffer",
    "__version__",
    "comm",
    "destroy_all_managed_nccl_comm",
    "get_logical_domain_size",
    "get_num_allocation_alignment",
    "get_num_rdma_alignment",
    "get_num_tma_alignment",
    "get_physical_domain_size",
    "topk_idx_t",
]

# One import line often names several classes, so these can be imported, too.
BucketBuffer = absent_class("BucketBuffer")
BucketSession = absent_class("BucketSession")
BufferAllocator = absent_class("BufferAllocator")
EngramBuffer = absent_class("EngramBuffer")
PPBuffer = absent_class("PPBuffer")
