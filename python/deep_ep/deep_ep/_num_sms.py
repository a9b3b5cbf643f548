"""Numbers that calls and buffers follow only where the client chose them: multiprocessors, chunks, queue pairs."""

from __future__ import annotations

from typing import Any, NamedTuple

from ferry import InvalidArgument


class Suggested(int):
    """A number that this package named, as a default or a recommendation.

    Clients hand it back (in a Config, a handle, or as ``num_sms=``) without having chosen it, so it bounds nothing:
    Ferry then uses as many multiprocessors as were measured to fill the links. Arithmetic makes it an ordinary int,
    which is the client's.
    """


# Number that clients of the second generation reserve for calls.
ELASTIC_NUM_SMS = Suggested(16)


_MOST_PATHS = 16  # kMaxNetworkPaths


class NotAConfig(NamedTuple):
    """Replaces the ``num_sms`` of an argument that is not a Config; the native calls refuse it."""

    shown: str
    """Name of the argument's class."""


def of_config(config: Any) -> Any:
    """The ``num_sms`` of an argument ``config``. Does not raise: a rank that raises here leaves its peers waiting."""
    try:
        return config.num_sms
    except AttributeError:
        return NotAConfig(type(config).__name__)


def chunk_of_config(config: Any) -> Any:
    """Tokens of a chunk between nodes that an argument ``config`` asks for; None if it is no Config."""
    return getattr(config, "num_max_rdma_chunked_send_tokens", None)


def chosen(number: Any, what: str) -> int | None:
    """A number that the client chose; None for a default of this package. Some clients compute floats."""
    if number is None or isinstance(number, Suggested):
        return None
    try:
        return int(number)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"{what} is {number!r}, expected an integer") from None


def paths_of(num_qps: Any, what: str) -> int | None:
    """``network_paths`` of a :class:`ferry.Group` for a client's number of queue pairs; 0 leaves it to the network."""
    number = chosen(num_qps, what)
    return None if not number else min(number, _MOST_PATHS)
