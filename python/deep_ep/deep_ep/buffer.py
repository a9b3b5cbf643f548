"""The former module of the first generation."""

from deep_ep._config import Config
from deep_ep.buffers.legacy import Buffer
from deep_ep.utils.event import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
