"""Placement of experts that may have more than one home, and counters of their load."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch

from ferry import _native
from ferry._errors import InvalidArgument
from ferry._group_arguments import whole

ReplicaChoice = Literal["nearest", "round_robin"]
_CHOICES: tuple[ReplicaChoice, ...] = ("nearest", "round_robin")
_keys = itertools.count(1)
_placements: weakref.WeakValueDictionary[int, Placement] = weakref.WeakValueDictionary()


def placement_of(key: torch.Tensor | None) -> Placement | None:
    """The placement with this :attr:`Placement.key`."""
    if key is None:
        return None
    placement = _placements.get(int(key))
    if placement is None:
        raise InvalidArgument(
            f"placement is {int(key)}, expected the key of a ferry.Placement of this process that still exists"
        )
    return placement


class Placement:
    """The homes of one layer's experts: P physical experts, each a home of one of E logical experts or of none.

    physical_to_logical: [P] the logical expert of each physical one, -1: none. Every logical expert needs a home,
        unless ``allow_homeless``. A sequence or a tensor on the CPU, which is copied; or a contiguous i32 tensor on the
        group's GPU, which calls read where they run on the stream, so that each replay of a graph may find another
        placement.
    physical_to_rank: [P] ranks; by default contiguous, equally many on each where R divides P.
    choice: which home a token picks. "nearest": one on its own rank, else on its node, else any; "round_robin": any.
        Among several, the one at index (token index + rank) modulo their number, in ascending order.
    allow_homeless: experts may have no home, and P may be below E: for a group that goes on without a lost rank, see
        :func:`surviving_placement`. Calls treat an entry of topk_idx that names such an expert as -1.

    The same on every rank. Making one costs more than using it again.
    """

    __slots__ = ("__weakref__", "_native", "_owners", "_table", "key", "num_physical_experts")

    def __init__(
        self,
        physical_to_logical: Sequence[int] | torch.Tensor,
        physical_to_rank: Sequence[int] | torch.Tensor | None = None,
        choice: ReplicaChoice = "nearest",
        allow_homeless: bool = False,
    ) -> None:
        if choice not in _CHOICES:
            raise InvalidArgument(f"Placement: choice is {choice!r}, expected one of {', '.join(map(repr, _CHOICES))}")
        on_gpu = isinstance(physical_to_logical, torch.Tensor) and physical_to_logical.device.type != "cpu"
        self._table = physical_to_logical if on_gpu else None
        self._owners = [] if physical_to_rank is None else _numbers(physical_to_rank, "physical_to_rank")
        self._native = _native.Placement(
            [] if on_gpu else _numbers(physical_to_logical, "physical_to_logical"),
            self._owners,
            _CHOICES.index(choice),
            bool(allow_homeless),
        )
        self.num_physical_experts: int = len(physical_to_logical)
        """P"""
        number = next(_keys)
        self.key = torch.tensor(number)
        """[] i64 on the CPU: its key for operators, as long as it exists, see :func:`ferry.ops.route`. A tensor, as
        compiled programs are the same for any value of it.
        """
        _placements[number] = self

    def __copy__(self) -> Placement:
        return self  # never changes, and its key names one object

    def __deepcopy__(self, _: dict[int, object]) -> Placement:
        return self

    def num_local_experts(self, rank: int, num_ranks: int) -> int:
        """L: the physical experts of a rank, in use or not."""
        if self._owners:
            return self._owners.count(rank)
        return (rank + 1) * self.num_physical_experts // num_ranks - rank * self.num_physical_experts // num_ranks


def surviving_placement(
    placement: Placement | None, num_experts: int, num_ranks: int, kept_ranks: Sequence[int]
) -> Placement:
    """The placement that is left when only ``kept_ranks`` remain, which are numbered 0, 1, ... in their order.

    placement: the one before, in host memory; None: the default, E experts in order on the ranks.
    kept_ranks: ranks of the numbering before, ascending.

    Physical experts of other ranks are dropped and the others stay in their order: each rank keeps its local experts,
    in the same order, and no weights move. The result has ``allow_homeless``.
    """
    if placement is not None and placement._table is not None:
        raise InvalidArgument(
            "surviving_placement: physical_to_logical is a tensor on a GPU, expected a placement in host memory"
        )
    call = "surviving_placement"
    experts, ranks_before = whole("num_experts", num_experts, call), whole("num_ranks", num_ranks, call)
    kept = [whole(f"kept_ranks[{i}]", rank, call) for i, rank in enumerate(kept_ranks)]
    native = _native.Placement([], [], 0, False) if placement is None else placement._native
    homes, ranks, choice = native.surviving(experts, ranks_before, kept)
    return Placement(homes, ranks, _CHOICES[choice], allow_homeless=True)


class LoadCounters(NamedTuple):
    """Counters that a call adds its counts to, in the memory of the group's device: contiguous, i64 or i32."""

    logical: torch.Tensor | None = None
    """[E]: of this rank's tokens, those that go to each logical expert."""
    physical: torch.Tensor | None = None
    """[P]: of this rank's tokens, those that go to each physical expert; [E] without a placement."""
    received: torch.Tensor | None = None
    """[L]: of all ranks' tokens, those that each local expert of this rank receives."""
    homeless: torch.Tensor | None = None
    """[1]: entries of this rank's topk_idx that name an expert without a home; the other counters leave them out."""


def _numbers(values: Sequence[int] | torch.Tensor, name: str) -> list[int]:
    if isinstance(values, torch.Tensor):
        listed = values.tolist()
    elif isinstance(values, Iterable):
        listed = [whole(f"{name}[{i}]", value, "Placement") for i, value in enumerate(values)]
    else:
        raise InvalidArgument(f"Placement: {name} is {values!r}, expected [P] ids")
    if isinstance(values, torch.Tensor) and (values.dim() != 1 or values.is_floating_point()):
        raise InvalidArgument(f"Placement: {name} has shape {list(values.shape)} and {values.dtype}, expected [P] ids")
    wrong = next((value for value in listed if not -(2**31) <= value < 2**31), None)
    if wrong is not None:
        raise InvalidArgument(f"Placement: {name} has {wrong}, expected numbers of 32 bits")
    return listed
