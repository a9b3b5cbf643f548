"""How many multiprocessors of a GPU a call may use: only a number that the client chose is a bound."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from ferry import InvalidArgument

_MOST = (1 << 31) - 1


class Suggested(int):
    """A number that this package named, as a default or a recommendation.

    Clients hand it back (in a Config, a handle, or as ``num_sms=``) without having chosen it, so it bounds nothing:
    Ferry then uses as many multiprocessors as were measured to fill the links. Arithmetic makes it an ordinary int,
    which is the client's.
    """


class _OfNoConfig(NamedTuple):
    """In place of a ``num_sms``: :func:`bound_of` refuses it."""

    shown: str


def of_config(config: Any) -> Any:
    """The ``num_sms`` of an argument ``config``. Does not raise, as nobody would tell the other ranks."""
    try:
        return config.num_sms
    except AttributeError:
        return _OfNoConfig(type(config).__name__)


def bound_of(num_sms: Any, operation: str) -> int:
    """``num_sms`` for ferry's dispatch and combine: the client's choice; 0, ferry's own, if there was none."""
    if num_sms is None or isinstance(num_sms, Suggested):
        return 0
    if isinstance(num_sms, _OfNoConfig):
        raise InvalidArgument(f"{operation}: config is a {num_sms.shown}, expected a deep_ep.Config or None")
    try:
        whole = operator.index(num_sms)
    except TypeError:
        whole = -1
    if not 0 <= whole <= _MOST:
        raise InvalidArgument(
            f"{operation}: num_sms is {num_sms!r}, expected a number of multiprocessors, or 0 for Ferry's own choice"
        )
    return whole
