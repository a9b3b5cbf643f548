"""The ranks of a program as a set that shrinks when processes are lost, and grows when others take their place."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ferry import _native
from ferry._bootstrap import bootstrap_for
from ferry._errors import Timeout
from ferry._group import Group
from ferry._group_arguments import ARRIVAL_TIMEOUT_S, check_least, timeout_ns

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class MembershipView:
    """The members at one time, as all of them know it."""

    epoch: int
    """0 for the first view, one more for each later one."""
    rank: int
    """This process's index in ``ids``, and its rank in groups of this view; -1: it has left."""
    ids: tuple[int, ...]
    """[R] numbers of the members, ascending. A member keeps its number in all views; a process that takes a lost one's
    place has that one's number."""
    kept_ranks: tuple[int, ...]
    """Ranks that members of this view had in the one before, ascending. Empty in the first view, and for a process that
    has just joined."""
    lost_ids: tuple[int, ...]
    """Members of the view before that are not in this one."""
    joined_ids: tuple[int, ...]
    """Members of this view that were not in the one before, as processes."""
    num_complete_steps: int
    """Steps that all members that come from the view before have completed: all go on from there."""

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.ids)


class Membership:
    """A process's part in a changing set of members. Creating one is collective over the ranks.

    When a call of a group has failed, the members that are left agree on the next view and make a group of it::

        members = ferry.Membership(dist.group.WORLD, secret=secret)
        group = members.group()
        ...
        except (ferry.PeerLost, ferry.Timeout, ferry.TransportError) as error:
            view = members.next_view(error)  # collective over the members that live
            group = members.group()
            step = view.num_complete_steps

    Parameters
    ----------
    group, comm: as for :class:`ferry.Group`: the first view has its ranks, with the ids 0 to R - 1. Used only during
        this call.
    secret: known to all members; each proves that it knows it, it is never sent. Empty: a random one; then no other
        process can join. The same on every rank.
    host: numeric address of this host at which the other members reach this process. By default the one that leads to
        ``MASTER_ADDR``, or 127.0.0.1 if all ranks are on one host.
    timeout: seconds (or a timedelta) that :meth:`next_view` and :meth:`group` wait for a member whose process lives and
        which does not come; by default 50. Longer than members come apart, as when one computes while a call of
        another has failed already. The same on every rank.

    It has a listening socket and connects only while a view changes; it has no thread. Once it is garbage, this process
    has ended for the others. A forked child holds copies of the sockets: as long as it lives, its parent's death looks
    like silence, and the others wait for ``timeout``. Calls of several threads run one after the other.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        comm: Any = None,
        secret: str = "",
        host: str = "",
        timeout: float | datetime.timedelta | None = None,
    ) -> None:
        wait_ns = timeout_ns(ARRIVAL_TIMEOUT_S if timeout is None else timeout, "Membership")
        bootstrap = bootstrap_for(group, comm, wait_ns, operation="Membership")
        self._begin(_native.create_membership(bootstrap, secret, host, wait_ns))

    def _begin(self, native: _native.Membership) -> None:
        self._native = native
        self._view = MembershipView(*native.first_view())

    @classmethod
    def join(
        cls,
        contacts: str | Sequence[str],
        *,
        secret: str,
        id: int | None = None,
        host: str = "",
        admission_timeout: float | datetime.timedelta | None = None,
        timeout: float | datetime.timedelta | None = None,
    ) -> Membership:
        """Ask members to be let in, and wait until they have made their next view, with this process in it. They do so
        when they all call :meth:`next_view` for any reason.

        contacts: :attr:`address` of one or more members, tried in turn.
        secret: that of the members.
        id: the number to take: that of a lost member, or a new one. By default the lowest free one.
        host: as for the constructor; by default the address that leads to the contact.
        admission_timeout: seconds (or a timedelta) until the members have let it in, by default 50.
        timeout: as for the constructor, once it is a member.

        Raises :class:`ferry.Timeout` if no contact answered, if the secret is another one, or if the members did not
        let it in: they did not call next_view, or a living member has that id.
        """
        check_least("id", id, 0, or_none=True, operation="Membership.join")
        admission = ARRIVAL_TIMEOUT_S if admission_timeout is None else admission_timeout
        admission_ns = timeout_ns(admission, "Membership.join", "admission_timeout")
        wait_ns = timeout_ns(ARRIVAL_TIMEOUT_S if timeout is None else timeout, "Membership.join")
        addresses = [contacts] if isinstance(contacts, str) else list(contacts)
        members = cls.__new__(cls)
        number = -1 if id is None else id
        members._begin(_native.join_membership(addresses, secret, number, host, admission_ns, wait_ns))
        return members

    @property
    def view(self) -> MembershipView:
        """The present view."""
        return self._view

    @property
    def address(self) -> str:
        """Where this process listens, as "host:port", for the ``contacts`` of :meth:`join`."""
        return self._native.address

    @property
    def num_waiting(self) -> int:
        """Processes that ask this one to be let in. Local, never waits; other members may know of others."""
        return self._native.num_waiting()

    @property
    def num_awaiting(self) -> int:
        """Members that wait for this one in :meth:`next_view`. Local, never waits."""
        return self._native.num_awaiting()

    def complete_steps(self, num_steps: int) -> None:
        """This process has completed the steps 0 to ``num_steps - 1``, by the program's own count. Sends nothing:
        the next view's ``num_complete_steps`` is the lowest of such numbers.
        """
        check_least("num_steps", num_steps, 0, operation="Membership.complete_steps")
        self._native.complete_steps(num_steps)

    def next_view(
        self, reason: Exception | None = None, *, leave: bool = False, silent_ids: Sequence[int] = ()
    ) -> MembershipView:
        """Agree on the next view with all members that live. Collective.

        Called on every member when a call of a group has failed with PeerLost, Timeout or TransportError (their calls
        fail too), or at any step at which all members call it, to let others in or to leave. Returns as soon as each
        member has come, or has been found dead, or has kept the others waiting for ``timeout``.

        reason: the error, of a group of the present view. If it is a :class:`ferry.Timeout`, the rank that it names
            counts as lost unless it comes before the others are complete. Others are evidence of nothing: members find
            out themselves which processes have ended.
        leave: the next view is without this process.
        silent_ids: members that this one has waited for in vain, such as the ranks that :meth:`Group.suspend` returns:
            they too count as lost unless they come before the others are complete. Other ids are ignored. The ``peer``
            of a Timeout of a group with absent ranks is such an id, and belongs here, not in ``reason``.

        Raises :class:`ferry.PeerLost` if the others have left this process out, and :class:`ferry.Timeout` if too few
        have come: unless all that may live are there, more than half of the view's members are needed, or half of them
        with the lowest id. The view stays as it was, and after a Timeout it may be called again.
        """
        late_rank = reason.peer if isinstance(reason, Timeout) else None
        self._view = MembershipView(*self._native.next_view(late_rank, list(silent_ids), bool(leave)))
        return self._view

    def group(self, *, num_ranks: int | None = None, **options: Any) -> Group:
        """A group of the members of the present view: ``ferry.Group(members=self, **options)``. Collective.

        It has ranks as in the view. With ``num_ranks`` it has so many ranks, of which the ids of the view are present:
        a process that takes a lost one's place makes such a group while the others :meth:`Group.renew` theirs.

        Raises :class:`ferry.PeerLost` soon after a member has died or has asked for the next view; after an error call
        :meth:`next_view`.
        """
        return Group(members=self, num_ranks=num_ranks, **options)

    def __repr__(self) -> str:
        view = self._view
        if view.rank < 0:
            return "ferry.Membership(has left)"
        return f"ferry.Membership(id {view.ids[view.rank]} of {list(view.ids)}, view {view.epoch})"
