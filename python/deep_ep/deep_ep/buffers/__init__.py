"""The buffers of all generations."""

from deep_ep.buffers.elastic import ElasticBuffer, EPHandle
from deep_ep.buffers.ep import EPBuffer
from deep_ep.buffers.legacy import Buffer

__all__ = ["Buffer", "EPBuffer", "EPHandle", "ElasticBuffer"]
