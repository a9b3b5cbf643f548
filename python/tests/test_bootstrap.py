"""Every way for ranks to find each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import ferry
from ferry._bootstrap import address_towards_master


def check_group(group: ferry.Group, rank: int) -> None:
    assert group.rank == rank
    idx = torch.arange(group.num_ranks, device=group.device).view(-1, 1)
    x = torch.full((len(idx), 16), float(rank), device=group.device)
    received = group.dispatch(group.route(idx, num_experts=group.num_ranks), x)
    assert received.x[:, 0].tolist() == list(range(group.num_ranks))
    group.destroy()


class Communicator:
    """The part of an mpi4py communicator that is used."""

    def Get_rank(self) -> int:  # noqa: N802
        return dist.get_rank()

    def Get_size(self) -> int:  # noqa: N802
        return dist.get_world_size()

    def allgather(self, value: bytes) -> list[bytes]:
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, value)
        return gathered


def test_network_of_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = {"127.0.0.1": "127.0.0.1", "::1": "::1", "[::1]": "::1", "": "", "no address": ""}
    for master, address in hosts.items():
        monkeypatch.setenv("MASTER_ADDR", master)
        assert address_towards_master() == address
    monkeypatch.delenv("MASTER_ADDR")
    assert address_towards_master() == ""


def test_communicator() -> None:
    run_ranks(3, lambda rank: check_group(ferry.Group(comm=Communicator()), rank))


class BrokenCommunicator(Communicator):
    def allgather(self, value: bytes) -> list[bytes]:
        raise OSError("the cable is out")


def test_communicator_that_fails() -> None:
    """The text is one line: a traceback in it would hide what to do."""

    def check(rank: int) -> None:
        with pytest.raises(ferry.TransportError, match=r"failed: OSError: the cable is out; check that all ranks"):
            ferry.Group(comm=BrokenCommunicator())

    run_ranks(2, check)


def check_subgroup(rank: int) -> None:
    odd = dist.new_group([1, 3])
    even = dist.new_group([0, 2])
    check_group(ferry.Group(odd if rank % 2 else even), rank // 2)


def test_subgroups() -> None:
    run_ranks(4, check_subgroup)


def check_environment(rank: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="3", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="3", MASTER_ADDR="127.0.0.1",
        FERRY_PORT=str(port), FERRY_SECRET="a secret of this test",
    )  # fmt: skip
    check_group(ferry.Group(), rank)


def test_launcher_variables() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_ranks(3, check_environment, port)


_WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None  # an import of it raises ModuleNotFoundError
import torch.distributed as dist
import ferry

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert ferry.Group(dist.group.WORLD).num_ranks == 1
"""


def test_torch_without_numpy() -> None:
    subprocess.run([sys.executable, "-c", _WITHOUT_NUMPY], check=True, timeout=100)
