"""Which ranks reach each other's memory. This package works on one host, where all do."""

from __future__ import annotations

from typing import Any


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """(hosts, ranks of a host that reach each other's memory) of a torch process group."""
    return 1, group.size()


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """(scale-out ranks, scale-up ranks) of a torch process group."""
    return 1, group.size()
