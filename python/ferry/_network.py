"""Bytes that a rank has sent to other nodes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RailUsage:
    """Data sent to one rail peer: the rank with this rank's index in another node."""

    rank: int
    """The rail peer."""
    sent_bytes: int
    """Payload, tables and call headers handed to the network."""
    num_messages: int
    """Puts and notifications."""
    route: str
    """Path to the peer as the engine names it."""


@dataclasses.dataclass(frozen=True)
class NetworkUsage:
    """Data sent since the group was created."""

    transport: str
    """The engine in use; empty with one node."""
    rails: tuple[RailUsage, ...]
    """By node, without this rank's own."""
    net_devices: str = ""
    """Devices that ranks of other hosts may reach this rank through; empty if all its rail peers are on its host."""
    ring_memory: str = ""
    """Memory of the rings between nodes: "host" or "gpu"; empty with one node."""
    service_level: int | None = None
    """``network_service_level`` of the group if a network card was given it, else None."""
    num_paths: int | None = None
    """``network_paths`` of the group if a network card was given it, else None."""
    why_host_memory: str = ""
    """Why rings are not in GPU memory, in one clause; empty if they are, or with one node."""

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to all rail peers together."""
        return sum(rail.sent_bytes for rail in self.rails)
