"""What a rank has sent to other nodes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RailUsage:
    """Sent to one rail peer: the rank with this rank's index in another node."""

    rank: int
    """The rail peer."""
    sent_bytes: int
    """Payload, tables and notices as given to the network."""
    num_messages: int
    """Puts and notifications."""
    route: str
    """The way there as the engine names it."""


@dataclasses.dataclass(frozen=True)
class NetworkUsage:
    """Sent since the group was made."""

    transport: str
    """The engine in use; empty with one node."""
    rails: tuple[RailUsage, ...]
    """By node, this rank's own left out."""

    @property
    def sent_bytes(self) -> int:
        """To all rail peers together."""
        return sum(rail.sent_bytes for rail in self.rails)
