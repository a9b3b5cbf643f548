"""Arguments of clients that no supported release has, and sizes. The native calls check all other arguments."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from typing import Any

ROW_GRANULE_BYTES = 16
MAX_TOPK = 32

# Features of forks and other releases: accepted while they are off, which is None or False.
_FEATURES = frozenset(
    {
        "comp_signal",
        "overlap",
        "packed_recv_count",
        "use_logfmt",
        "use_low_precision_combine",
        "use_nvfp4",
        "x_global_scale",
    }
)
# Arguments of other releases' constructors about resources, no value of which can change results.
RESOURCES = frozenset({"num_nvl_peers", "use_fabric"})

_PROGRAM_DEPTH = 3  # frames from check_unknown to the one that calls a constructor

_warned: set[str] = set()
_warned_lock = threading.Lock()


def check_unknown(call: str, unknown: Mapping[str, Any], hints: frozenset[str] = frozenset()) -> None:
    """Refuse arguments that do not exist here, except features that are off.

    hints: names, of a constructor, that are ignored with a warning, once for each name.
    """
    for name, value in unknown.items():
        if name in _FEATURES:
            if value is None or value is False:
                continue
            shown = value if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
            raise NotImplementedError(f"{call}: {name} is {shown}, which is not implemented; leave it out")
        if name not in hints:
            raise TypeError(f"{call}: unknown argument {name}; leave it out, since it could change the results")
        with _warned_lock:
            new = name not in _warned
            _warned.add(name)
        if new:
            warnings.warn(f"{call}: {name} has no effect in Ferry", stacklevel=_PROGRAM_DEPTH)


def align(value: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that is not less than ``value``."""
    return -(-value // alignment) * alignment
