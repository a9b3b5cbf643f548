"""Placement of experts on ranks by their loads; without a group."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, SupportsFloat

import torch

from ferry import _native
from ferry._eager import eager
from ferry._errors import InvalidArgument
from ferry._tensors import tensor_of

if TYPE_CHECKING:
    import numpy

    Table = torch.Tensor | numpy.ndarray

BalancePolicy = Literal["auto", "hierarchical", "global"]

_POLICIES = {"auto": 0, "hierarchical": 1, "global": 2}  # of ferry::BalancePolicy
_CPU = torch.device("cpu")


class Balance(NamedTuple):
    """Placements of all layers, in host memory."""

    physical_to_logical: torch.Tensor
    """[layers, P] i32: the expert of each physical expert; rank r has P / R of them from r * P / R on."""
    logical_to_physical: torch.Tensor
    """[layers, E, M] i32, M the most replicas of an expert: its physical experts, ascending, then -1."""
    replica_counts: torch.Tensor
    """[layers, E] i32."""
    max_load: torch.Tensor
    """[layers] f64: load of the busiest rank."""
    mean_load: torch.Tensor
    """[layers] f64: load of a rank on average."""
    num_moves: torch.Tensor
    """[layers] i64: experts that arrive on a rank where they were not; 0 without a previous placement."""
    policy: str
    """That was used: "hierarchical" or "global"."""


class ExpertCopy(NamedTuple):
    """One copy of one expert's weights."""

    layer: int
    expert: int
    source: int
    """Physical expert; with ``from_staging`` a staging place of ``from_rank``."""
    target: int
    """Physical expert; with ``to_staging`` a staging place of ``to_rank``."""
    from_rank: int
    to_rank: int
    from_staging: bool
    to_staging: bool


class MovePlan(NamedTuple):
    """Copies that turn one placement into another, one layer after another."""

    waves: list[list[ExpertCopy]]
    """Copies of a wave may be done in any order; a wave starts when the one before it is done on all ranks."""
    num_remote: int
    num_between_nodes: int
    num_local: int
    num_staging: list[int]
    """Additional places, each for one expert's weights, that the copies of each rank need."""


@eager
def balance(
    load: Table,
    *,
    num_replicas: int,
    num_ranks: int,
    num_nodes: int = 1,
    num_groups: int = 1,
    policy: BalancePolicy = "auto",
    previous: Table | None = None,
    max_moves: int | None = None,
    move_weight: float = 0.0,
    max_steps: int = 2000,
) -> Balance:
    """Place the experts of each layer so that every rank has about the same load. Local: no other rank takes part.

    load: [layers, E] numbers, not negative: a tensor in host memory or a numpy array. Floating point is read as f32.
    num_replicas: P, physical experts of all ranks, the experts themselves included; a multiple of ``num_ranks``.
    num_groups: equal contiguous groups of experts.
    policy: "hierarchical" keeps each group on one node, so that tokens limited to some groups reach few nodes; "global"
        does not; "auto": hierarchical if ``num_nodes`` divides ``num_groups``.
    previous: [layers, P], the placement in force, -1 where a place is empty: experts that need not move stay.
    max_moves: most experts of a layer that may arrive on a rank where they were not.
    move_weight: how much the highest load must fall for each of these, as a fraction of a rank's mean load.
    max_steps: exchanges tried per layer and start; the result depends on it and not on time.

    Never worse than the published greedy algorithm, unless ``max_moves`` or ``move_weight`` restricts it.
    """
    number = _POLICIES.get(policy) if isinstance(policy, str) else None
    if number is None:
        raise InvalidArgument(f"balance: policy is {policy!r}, expected one of {', '.join(map(repr, _POLICIES))}")
    if isinstance(move_weight, str) or not isinstance(move_weight, SupportsFloat):
        raise InvalidArgument(f"balance: move_weight is {move_weight!r}, expected a number")
    loads = _host_tensor(load, "load")
    if not loads.dtype.is_floating_point and loads.dtype not in (torch.int32, torch.int64):
        loads = loads.to(torch.int64)
    elif loads.dtype.is_floating_point:
        loads = loads.to(torch.float32)
    before = None if previous is None else _placement(previous, "previous")
    placed = _native.balance(
        loads,
        before,
        num_replicas,
        num_groups,
        num_nodes,
        num_ranks,
        number,
        -1 if max_moves is None else max_moves,
        float(move_weight),
        max_steps,
    )
    return Balance(
        tensor_of(placed.physical_to_logical()),
        tensor_of(placed.logical_to_physical()),
        tensor_of(placed.replica_counts()),
        torch.tensor(placed.max_load, dtype=torch.float64),
        torch.tensor(placed.mean_load, dtype=torch.float64),
        torch.tensor(placed.num_moves, dtype=torch.int64),
        placed.policy,
    )


@eager
def plan_moves(previous: Table, next: Table, *, num_experts: int, num_ranks: int, num_nodes: int = 1) -> MovePlan:
    """Copies that lead from one placement to another. Local: no other rank takes part.

    previous, next: [layers, P], as :class:`Balance` has it; -1 is an empty place. Sources are on the same rank where
    possible, else on the same node; among those, it is the rank that sends least so far.
    """
    before, after = _placement(previous, "previous"), _placement(next, "next")
    copies, begin, num_remote, num_between_nodes, num_local, num_staging = _native.plan_moves(
        before, after, num_experts, num_ranks, num_nodes
    )
    made = [ExpertCopy(*copy) for copy in copies]
    waves = [made[first:last] for first, last in pairwise(begin)]
    return MovePlan(waves, num_remote, num_between_nodes, num_local, num_staging)


def _host_tensor(table: object, name: str) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(table)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidArgument(f"{name} is a {type(table).__name__}, expected a tensor or a numpy array") from None
    if tensor.device != _CPU:
        raise InvalidArgument(f"{name} is on {tensor.device}, expected host memory; copy it with .cpu()")
    if tensor.dim() != 2:
        raise InvalidArgument(f"{name} is of shape {list(tensor.shape)}, expected two dimensions, [layers, …]")
    if tensor.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise InvalidArgument(f"{name} is {tensor.dtype}, expected numbers")
    return tensor


def _placement(table: object, name: str) -> torch.Tensor:
    tensor = _host_tensor(table, name)
    if tensor.dtype.is_floating_point:
        raise InvalidArgument(f"{name} is {tensor.dtype}, expected whole numbers")
    info = torch.iinfo(torch.int32)
    return tensor if tensor.dtype == torch.int32 else tensor.clamp(info.min, info.max).to(torch.int32)
