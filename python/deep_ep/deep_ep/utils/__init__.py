"""The event types, where clients import them from."""

from deep_ep.utils.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
