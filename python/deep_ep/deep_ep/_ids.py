"""The dtype of expert ids. In the original it is chosen when its native module is built, here by the same variables
when this package is imported.
"""

from __future__ import annotations

import os

import torch

from ferry import InvalidArgument

# The variable of the second generation and later, then that of the first.
VARIABLES = ("EP_NUM_TOPK_IDX_BITS", "TOPK_IDX_BITS")
_OF_BITS = {"64": torch.int64, "32": torch.int32}


def _chosen() -> torch.dtype:
    for name in VARIABLES:
        bits = os.environ.get(name)
        if not bits:
            continue
        if bits not in _OF_BITS:
            raise InvalidArgument(f"the environment variable {name} is {bits!r}, expected 32 or 64")
        return _OF_BITS[bits]
    return torch.int64


topk_idx_t: torch.dtype = _chosen()
"""The dtype of expert ids that calls take and return. Buffers keep that of their creation."""
