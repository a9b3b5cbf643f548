"""Module of the second generation's native types; here they are Python."""  # noqa: N999

from deep_ep._config import Config
from deep_ep._ids import topk_idx_t
from deep_ep.utils.event import EventHandle

__all__ = ["Config", "EventHandle", "topk_idx_t"]
