"""Every failure raises the right exception on every rank, and never hangs."""

from __future__ import annotations

import datetime
import inspect
import itertools
import math
import os
import pickle
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.tensor import DTensor, Replicate
from world import World, make_world

import ferry
from ferry._errors import from_status

NUM_RANKS = 3
BAD_RANK = 1


def check_numbers(
    group: ferry.Group, routing: ferry.Routing, idx: torch.Tensor, x: torch.Tensor, y: torch.Tensor, refused, bad: bool
) -> None:
    """Numbers that do not fit the native module's types: if it raised for them, no peer would learn of the failure."""
    for name, wrong, match in (
        ("num_experts", 2**64, "num_experts is 18446744073709551616"),
        ("num_experts", "many", "num_experts is 'many', expected an integer"),
        ("num_experts", float("nan"), "num_experts is nan"),
        ("num_experts", 6.5, "num_experts is 6.5, expected an integer"),
        ("max_recv_rows", 2.9, "max_recv_rows is 2.9, expected an integer"),
        ("expert_alignment", -(2**63), "expert_alignment"),
        ("slab_capacity", 2**63, "slab_capacity"),
        ("max_recv_rows", 2**63, r"max_recv_rows is 9223372036854775808, expected less than 2\*\*63"),
        ("max_tokens", 2**100, "max_tokens"),
        ("num_sms", 2**31, r"num_sms is 2147483648, expected less than 2\*\*31"),
        ("num_sms", None, "num_sms is None"),
        ("num_sms", -1, "route: num_sms is -1, expected a positive number, or 0 for Ferry's own choice"),
        ("expert_to_rank", [0] * 5 + [2**40], r"expert_to_rank\[5\] is 1099511627776"),
        ("expert_to_rank", [0, 0.5] * 3, r"expert_to_rank\[1\] is 0.5, expected a rank"),
        ("expert_to_rank", 7, "expert_to_rank: expected the rank of each expert"),
    ):
        given = {"num_experts": 6} | ({name: wrong} if bad else {})
        refused(lambda given=given: group.route(idx, **given), match)
    for wrong in (-1, 2**31, 2**64, "all"):
        sms = wrong if bad else 0
        refused(lambda sms=sms: group.dispatch(routing, x, num_sms=sms), "dispatch: num_sms")
        refused(lambda sms=sms: group.combine(routing, y, num_sms=sms), "combine: num_sms")
    refused(lambda: group.combine(routing, y, bias=5 if bad else None), "bias is a int")


def check_order(
    group: ferry.Group, routing: ferry.Routing, x: torch.Tensor, y: torch.Tensor, refused, bad: bool
) -> None:
    """The text is about the first of several wrong arguments."""
    away = x.to("meta")
    for wrong, match in (
        ({"bias": [away] * 3, "x": None}, "at most two"),
        ({"bias": away, "x": None}, "combine: x"),
        ({"bias": away, "num_sms": "all"}, "num_sms"),
        ({"bias": away, "weights": 7}, "combine: weights"),
        ({"bias": away, "topk_weights": 7}, "combine: bias"),
        ({"bias": [x, away], "topk_weights": 7}, "combine: second bias"),
    ):
        given = {"x": y} | (wrong if bad else {})
        refused(lambda given=given: group.combine(routing, **given), match)


def check_broken_objects(group: ferry.Group, idx: torch.Tensor, x: torch.Tensor, y: torch.Tensor, bad: bool) -> None:
    """Objects that lack what their constructors give them."""
    routing = group.route(idx, num_experts=6)
    placement = ferry.Placement(range(6))
    for natives in ({}, {"_native": 7}):
        broken, unplaced = (object.__new__(kind) for kind in (ferry.Routing, ferry.Placement))
        for one, (name, value) in itertools.product((broken, unplaced), natives.items()):
            setattr(one, name, value)
        broken.group = group
        error = (AttributeError, RuntimeError) if bad else ferry.InvalidArgument
        for call in (
            lambda given=broken if bad else routing: group.dispatch(given, x),
            lambda given=broken if bad else routing: group.combine(given, y),
            lambda given=unplaced if bad else placement: group.route(idx, num_experts=6, placement=given),
        ):
            with pytest.raises(error):
                call()


def check_refusals(rank: int, world: World) -> None:
    group = ferry.Group(dist.group.WORLD, timeout=60)
    idx, x = world.topk_idx[rank], world.x[rank]
    routing = group.route(idx, num_experts=world.num_experts)
    rows = routing.num_recv_rows
    bad = rank == BAD_RANK

    def refused(call, match: str | None = None) -> None:
        with pytest.raises(ferry.InvalidArgument, match=match if bad else None):
            call()

    # Errors found by the native library, errors that only Python sees, and arguments that are not tensors.
    for wrong in (idx.to(torch.float32), idx.to(torch.int16), idx.to("meta"), idx[:, :2], None, "ids", (idx, idx)):
        refused(lambda wrong=wrong: group.route(wrong if bad else idx, num_experts=world.num_experts))
    for name, wrong, match in (
        ("topk_idx", idx.to(torch.int16), "topk_idx: dtype is torch.int16, expected torch.int32 or torch.int64$"),
        ("topk_weights", torch.ones(idx.shape).double(), "dtype is torch.float64, expected torch.float32$"),
    ):
        given = {"topk_idx": idx} | ({name: wrong} if bad else {})
        refused(lambda given=given: group.route(**given, num_experts=world.num_experts), match)
    refused(lambda: group.route(idx, num_experts=world.num_experts, layout="rows" if bad else "tokens"), "layout")
    refused(lambda: group.route(idx, num_experts=world.num_experts + bad))
    for wrong in (x.double(), x.to("meta"), x[:, :5], x[:-1], None, 7):
        refused(lambda wrong=wrong: group.dispatch(routing, wrong if bad else x))
    refused(lambda: group.dispatch("routing" if bad else routing, x), "routing is a str")
    refused(lambda: group.dispatch(routing, x, out=torch.empty(rows + 1, 64, dtype=x.dtype) if bad else None))
    y = torch.ones(rows, 64, dtype=torch.bfloat16)
    check_numbers(group, routing, idx, x, y, refused, bad)
    for wrong in (y.half(), y.to("meta"), torch.ones(rows + 1, 64, dtype=y.dtype), None):
        refused(lambda wrong=wrong: group.combine(routing, wrong if bad else y))
    refused(lambda: group.combine(routing, y, bias=[x] * 3 if bad else None), "at most two")
    check_order(group, routing, x, y, refused, bad)
    check_broken_objects(group, idx, x, y, bad)

    # Tensors that share memory: rows that were sent or are to be summed must not be written over.
    shared = torch.zeros(max(rows, len(x)), 64, dtype=x.dtype)
    sent = shared[: len(x)] if bad else x
    refused(lambda: group.dispatch(routing, sent, out=shared[:rows]), "shares memory with input x")
    returned = shared[:rows] if bad else y
    refused(lambda: group.combine(routing, returned, out=shared[: len(x)]), "shares memory with input x")
    table = torch.empty(rows, 2, dtype=torch.int32)
    refused(lambda: group.dispatch(routing, x, out_source=table if bad else None), "output source present")
    bias = torch.full_like(x, 2.0)
    apart = group.combine(routing, y, bias=bias).x
    assert torch.equal(group.combine(routing, y, bias=bias, out=bias).x, apart)
    assert torch.equal(bias, apart)

    # The group is still usable.
    assert group.dispatch(routing, x).x.shape == (rows, 64)
    assert group.combine(routing, y).x.shape == x.shape
    group.destroy()


def test_bad_arguments_are_refused_on_all_ranks() -> None:
    run_ranks(NUM_RANKS, check_refusals, make_world(NUM_RANKS, 6, [4, 5, 6]))


def check_without_memory(rank: int, world: World) -> None:
    group = ferry.Group(dist.group.WORLD, timeout=60)
    idx, x = world.topk_idx[rank], world.x[rank]
    routing = group.route(idx, num_experts=world.num_experts)
    freed = idx.clone()
    freed.untyped_storage().resize_(0)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world.num_ranks,))
    distributed = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    bad = rank == BAD_RANK
    advice = r"memory of [^;]*; the tensor has no memory of its own: of a DTensor pass \.to_local\(\)"
    with pytest.raises(ferry.InvalidArgument, match=advice):
        group.route(freed if bad else idx, num_experts=world.num_experts)
    with pytest.raises(ferry.InvalidArgument, match=advice):
        group.dispatch(routing, distributed if bad else x)
    with pytest.raises(ferry.InvalidArgument, match=advice):
        group.latency_dispatch(distributed if bad else x, idx, num_experts=world.num_experts, max_tokens=8)
    assert torch.equal(group.dispatch(routing, distributed.to_local()).x, group.dispatch(routing, x).x)
    group.destroy()


def test_tensors_without_memory_of_their_own() -> None:
    run_ranks(2, check_without_memory, make_world(2, 6, [4, 5]))


def die(rank: int, world: World) -> None:
    group = ferry.Group(dist.group.WORLD, timeout=10)
    routing = group.route(world.topk_idx[rank], num_experts=world.num_experts)
    group.dispatch(routing, world.x[rank])
    if rank == BAD_RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises((ferry.PeerLost, ferry.Timeout)) as caught:
        for _ in range(1000):
            group.dispatch(routing, world.x[rank])
    assert time.monotonic() - started < 20, "twice the deadline"
    assert caught.value.peer == BAD_RANK
    assert isinstance(caught.value, (ConnectionError, TimeoutError))
    with pytest.raises(ferry.FerryError):
        group.route(world.topk_idx[rank], num_experts=world.num_experts)


def test_a_dead_rank_is_named() -> None:
    run_ranks(NUM_RANKS, die, make_world(NUM_RANKS, 6, [4, 5, 6]), lost=(BAD_RANK,))


def check_wrong_groups(rank: int) -> None:
    with pytest.raises(ferry.InvalidArgument, match="not several"):
        ferry.Group(dist.group.WORLD, comm=object())
    with pytest.raises(ferry.InvalidArgument, match="ProcessGroup"):
        ferry.Group("world")
    with pytest.raises(ferry.InvalidArgument, match="timeout"):
        ferry.Group(dist.group.WORLD, timeout=0)
    for name, wrong in (
        ("timeout", "soon"),
        ("mask_timeout", 0),
        ("network_poll", "soon"),
        ("arena_bytes", -1),
        ("latency_bytes", 1.5),
        ("ranks_per_node", "1"),
        ("network_paths", 1.5),
        ("net_devices", 3),
        ("tuning_file", None),
    ):
        with pytest.raises(ferry.InvalidArgument, match=f"^Group: {name} is {wrong!r}.*, expected "):
            ferry.Group(dist.group.WORLD, **{name: wrong})
    with pytest.raises(ferry.InvalidArgument, match="comm is a int, expected an mpi4py communicator"):
        ferry.Group(comm=3)
    for poll in (0, -1, math.nan, 90000, datetime.timedelta(days=2)):
        with pytest.raises(ferry.InvalidArgument, match="network_poll is"):
            ferry.Group(dist.group.WORLD, network_poll=poll)
    for poll in (None, 0.5, math.inf, datetime.timedelta(minutes=1)):
        ferry.Group(dist.group.WORLD, network_poll=poll).destroy()
    for wrong in ({"network_service_level": 16}, {"network_service_level": -1}, {"network_paths": 17}):
        with pytest.raises(ferry.InvalidArgument, match=f"{next(iter(wrong))} is"):
            ferry.Group(dist.group.WORLD, **wrong)
    with pytest.raises(ferry.InvalidArgument, match="network_paths is 0, expected at least 1, or None"):
        ferry.Group(dist.group.WORLD, network_paths=0)
    group = ferry.Group(dist.group.WORLD, network_service_level=3, network_paths=2)
    assert group.network_usage().service_level is None and group.network_usage().num_paths is None, "there is no card"
    group.destroy()
    with pytest.raises(ferry.InvalidArgument, match="rank 0 has verify=true, rank 1 has verify=false"):
        ferry.Group(dist.group.WORLD, verify=rank == 0)
    ferry.Group(dist.group.WORLD, verify=True).destroy()
    with pytest.raises(NotImplementedError, match="cpu or cuda"):
        ferry.Group(dist.group.WORLD, device="meta")
    with pytest.raises(ferry.InvalidArgument, match="device is 'gpu', expected cpu or cuda"):
        ferry.Group(dist.group.WORLD, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(NotImplementedError, match="finds no GPU"):
            ferry.Group(dist.group.WORLD, device="cuda")
    with pytest.raises(ferry.InvalidArgument, match="arena_bytes"):
        ferry.Group(dist.group.WORLD, arena_bytes=2**62)
    unread = r"Group: tuning file /no/such/file: cannot be opened.*; see tuning_file= of ferry\.Group and"
    with pytest.raises(ferry.InvalidArgument, match=unread):
        ferry.Group(dist.group.WORLD, tuning_file="/no/such/file")
    group = ferry.Group(dist.group.WORLD, arena_bytes=16 << 20)
    with pytest.raises(ferry.CapacityExceeded, match=r"raise arena_bytes= of ferry\.Group$"):
        group.empty(64 << 20, dtype=torch.uint8)
    group.destroy()


def test_groups_that_cannot_be_made() -> None:
    run_ranks(2, check_wrong_groups)


def test_options_are_named_as_python_writes_them() -> None:
    for text, shown in (
        ("Group::create: GroupOptions::verify is set", "Group: verify= of ferry.Group is set"),
        ("a longer GroupOptions::timeout_ns if", "a longer timeout= of ferry.Group if"),
        ("lower GroupOptions::arena_bytes (of a OneSided: heap_bytes)", "lower arena_bytes= of ferry.Group"),
        ("Membership::join: set JoinOptions::host to", "Membership.join: set host= to"),
        ("as its program asked (GroupOptions::interrupted)", "as its program asked (a signal's handler)"),
        ("no route to fe80::1, ::1 and FE80::ab", "no route to fe80::1, ::1 and FE80::ab"),
    ):
        assert str(from_status(1, text, -1)) == shown


def test_every_option_that_errors_name_is_an_argument() -> None:
    """Options in the library's texts are renamed by a rule, which a new option may not follow."""
    owners = {"Group": ferry.Group, "Membership": ferry.Membership, "Join": ferry.Membership.join}
    options = set()
    for source in (Path(__file__).parents[2] / "src").rglob("*.cpp"):
        for text in re.findall(r'"(?:[^"\\\n]|\\.)*"', source.read_text()):
            options |= set(re.findall(r"(Group|Membership|Join)Options::(\w+)", text))
    assert len(options) > 10
    for owner, name in options - {("Group", "present_ranks")}:
        shown = str(from_status(1, f"{owner}Options::{name}", -1))
        if shown == "a signal's handler":
            continue
        argument, *of = shown.split("= of ferry.")
        assert argument.removesuffix("=") in inspect.signature(owners[owner]).parameters, shown
        assert of == ([] if owner == "Join" else [owner])


def test_exceptions_are_what_python_users_catch() -> None:
    for error, base in (
        (ferry.InvalidArgument, ValueError),
        (ferry.Unsupported, NotImplementedError),
        (ferry.Timeout, TimeoutError),
        (ferry.PeerLost, ConnectionError),
        (ferry.SystemFailure, OSError),
        (ferry.DataCorrupt, RuntimeError),
    ):
        raised = error("what, where", peer=3)
        assert isinstance(raised, base)
        assert isinstance(raised, ferry.FerryError)
        assert str(raised) == "what, where"
        copy = pickle.loads(pickle.dumps(raised))
        assert (type(copy), str(copy), copy.peer) == (error, "what, where", 3)
