"""Multiprocessors of a GPU that a call may use: only a number that the client chose is a bound."""

from __future__ import annotations

from typing import Any, NamedTuple


class Suggested(int):
    """A number that this package named, as a default or a recommendation.

    Clients hand it back (in a Config, a handle, or as ``num_sms=``) without having chosen it, so it bounds nothing:
    Ferry then uses as many multiprocessors as were measured to fill the links. Arithmetic makes it an ordinary int,
    which is the client's.
    """


# Number that clients of the second generation reserve for calls.
ELASTIC_NUM_SMS = Suggested(16)


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
