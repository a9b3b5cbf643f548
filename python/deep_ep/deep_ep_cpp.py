"""The old name of :mod:`deep_ep._C`."""

from deep_ep._C import Config, EventHandle, topk_idx_t

__all__ = ["Config", "EventHandle", "topk_idx_t"]
