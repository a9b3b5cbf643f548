"""The buffers of both generations."""

from deep_ep.buffers.elastic import ElasticBuffer, EPHandle
from deep_ep.buffers.legacy import Buffer

__all__ = ["Buffer", "EPHandle", "ElasticBuffer"]
