"""Module of the second generation's native types; here they are Python."""  # noqa: N999

import torch

from deep_ep._config import Config
from deep_ep.utils.event import EventHandle

__all__ = ["Config", "EventHandle", "topk_idx_t"]

topk_idx_t: torch.dtype = torch.int64
"""The dtype of expert ids."""
