"""Arguments of clients that no release had, and sizes. The native calls check all other arguments."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from typing import Any

ROW_GRANULE_BYTES = 16
MAX_TOPK = 32

# Parts of the names of arguments that change the numeric results of a call.
_NUMERIC = ("fp4", "logfmt", "global_scale", "low_precision", "quant")

_warned: set[str] = set()
_warned_lock = threading.Lock()


def ignore_unknown(call: str, unknown: Mapping[str, Any], depth: int) -> None:
    """Warn once per name about arguments that do not exist here; refuse those that would change results.

    depth: of the program's frame, whose line the warning names; 1 is that of this function.
    """
    for name, value in unknown.items():
        if any(part in name for part in _NUMERIC):
            if value is None or value is False:
                continue
            raise NotImplementedError(f"{call}: {name}={value!r} changes results and is not implemented; leave it out")
        with _warned_lock:
            new = name not in _warned
            _warned.add(name)
        if new:
            warnings.warn(f"{call}: argument {name} is unknown to Ferry and is ignored", stacklevel=depth)


def align(value: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that is not less than ``value``."""
    return -(-value // alignment) * alignment
