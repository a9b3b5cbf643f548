"""Any number of buffers, created and destroyed in any order; and every way to define the ranks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from clients import device_of, dispatch, inputs_of, make_buffer, make_elastic
from ranks import run_ranks
from world import World, make_world

import deep_ep
import ferry
import reference


def use(buffer: deep_ep.Buffer, world: World, rank: int, device: str) -> tuple:
    x, *_, handle, _ = dispatch(buffer, world, inputs_of(world, rank, device_of(rank, device)))
    out = buffer.combine(reference.scaled(x, rank), handle)[0]
    assert torch.equal(out.cpu(), reference.combined(world, rank, []))
    return handle


def check_endings(rank: int, world: World, device: str) -> None:
    buffers = [make_buffer(rank, device, explicitly_destroy=explicit) for explicit in (True, False, False, True)]
    handles = [use(buffer, world, rank, device) for buffer in buffers]
    buffers[2].destroy()
    buffers[0].destroy()
    buffers[0].destroy()
    use(buffers[1], world, rank, device)
    # Dropped by one rank early, by the others late, in another order: no rank waits.
    started = time.monotonic()
    for index in (1, 3) if rank else (3, 1):
        buffers[index] = None
        gc.collect()
        time.sleep(0.1 * rank)
    del handles
    gc.collect()
    assert time.monotonic() - started < 10
    # Some live until the interpreter exits.
    last = make_elastic(rank, device), make_buffer(rank, device)
    use(last[1], world, rank, device)
    globals()["left"] = last


def test_endings(device: str) -> None:
    run_ranks(3, check_endings, make_world(3, 6, [5, 0, 8]), device)


def check_refused_tensors(rank: int, world: World) -> None:
    buffer = make_buffer(rank, "cpu", low_latency_mode=True)
    elastic = make_elastic(rank, "cpu")
    mine = inputs_of(world, rank, torch.device("cpu"))
    x, *_, handle, _ = dispatch(buffer, world, mine)
    *_, expanded, _ = elastic.dispatch(mine.x, mine.idx, num_experts=world.num_experts)
    late = {"previous_event_before_epilogue": 3}
    calls = {
        "previous_event": lambda given: buffer.combine(given, handle, previous_event=3),
        "elastic previous_event": lambda given: elastic.combine(given, expanded, previous_event=3),
        "combine before_epilogue": lambda given: elastic.combine(given, expanded, **late),
        "cached dispatch before_epilogue": lambda given: elastic.dispatch(given, handle=expanded, **late),
        "dispatch before_epilogue": lambda given: elastic.dispatch(given, mine.idx, num_experts=6, **late),
        "two ends": lambda given: buffer.low_latency_dispatch(
            given, mine.idx, 8, 6, async_finish=True, return_recv_hook=True
        ),
        "logfmt": lambda given: buffer.low_latency_combine(given, mine.idx, mine.weights, (), use_logfmt=True),
    }
    gc.collect()
    gc.disable()
    for name, call in calls.items():
        given = mine.x.clone() if "dispatch" in name or "ends" in name else x.clone()
        dropped = weakref.ref(given)
        try:
            call(given)
        except (ferry.InvalidArgument, NotImplementedError):
            del given
        assert dropped() is None, f"a refused call keeps tensors: {name}"
    gc.enable()
    buffer.destroy()
    elastic.destroy()


def test_refused_calls_keep_no_tensors() -> None:
    run_ranks(1, check_refused_tensors, make_world(1, 6, [5]))


PROGRAM = """
import torch, torch.distributed as dist, deep_ep
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
buffer = deep_ep.Buffer(dist.group.WORLD, device="cpu")
elastic = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8, hidden=64, device="cpu")
idx = torch.zeros(4, 2, dtype=torch.int64)
x, _, _, handle, event = elastic.dispatch(torch.ones(4, 64).bfloat16(), idx, num_experts=4, do_expand=True)
assert len(x) == 4, "a token that names an expert twice has one row"
print("out", elastic.combine(x, handle)[0].sum().item())
"""


def test_the_end_of_the_interpreter() -> None:
    end = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert end.returncode == 0, end.stderr
    assert end.stdout == "out 256.0\n"
    assert "leak" not in end.stderr and "Error" not in end.stderr


class Communicator:
    """The part of an mpi4py communicator that is used."""

    def Get_rank(self) -> int:  # noqa: N802
        return dist.get_rank()

    def Get_size(self) -> int:  # noqa: N802
        return dist.get_world_size()

    def allgather(self, value: object) -> list:
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, value)
        return gathered


def check_groups(rank: int, world: World, device: str) -> None:
    by_mpi = deep_ep.Buffer(None, 0, 0, comm=Communicator(), device=device_of(rank, device))
    use(by_mpi, world, rank, device)
    assert by_mpi.group is None and by_mpi.group_size == 4
    pair = dist.new_group([0, 1]), dist.new_group([2, 3])
    mine = pair[rank // 2]
    in_pair = deep_ep.Buffer(mine, device=device_of(rank, device))
    assert in_pair.group is mine and (in_pair.rank, in_pair.group_size) == (rank % 2, 2)
    use(in_pair, make_world(2, 4, [3, 5]), rank % 2, device)
    with pytest.raises(ValueError, match="comm="):
        deep_ep.Buffer(None)


def test_ways_to_name_the_ranks(device: str) -> None:
    run_ranks(4, check_groups, make_world(4, 8, [5, 0, 8, 2]), device)


def check_devices(rank: int) -> None:
    os.environ["DEEP_EP_DEVICE"] = "cpu"
    assert deep_ep.Buffer(dist.group.WORLD).device == torch.device("cpu")
    elastic = deep_ep.ElasticBuffer(dist.group.WORLD, num_bytes=2 << 20)
    assert elastic.device == torch.device("cpu") and elastic.num_bytes == 2 << 20
    with pytest.raises(ValueError, match="num_max_tokens_per_rank is 0"):
        elastic.dispatch(torch.zeros(1, 64), torch.zeros(1, 1, dtype=torch.int64), num_experts=2)
    with pytest.raises(ValueError, match="num_bytes"):
        deep_ep.ElasticBuffer(dist.group.WORLD)
    with pytest.warns(UserWarning, match="use_fabric"):
        deep_ep.Buffer(dist.group.WORLD, use_fabric=True, num_qps_per_rank=12.0)
    with pytest.raises(ValueError, match="network_service_level is 16, expected 0 to 15"):
        deep_ep.ElasticBuffer(dist.group.WORLD, num_bytes=2 << 20, sl_idx=16)
    with pytest.raises(ValueError, match="network_paths is -1, expected at least 1"):
        deep_ep.ElasticBuffer(dist.group.WORLD, num_bytes=2 << 20, num_allocated_qps=-1)
    # Ranks of one host have no card that could have a service level and connections.
    for buffer in (
        deep_ep.ElasticBuffer(dist.group.WORLD, num_bytes=2 << 20, sl_idx=5, num_allocated_qps=65),
        deep_ep.Buffer(dist.group.WORLD, num_qps_per_rank=32),
    ):
        usage = buffer.runtime.network_usage()
        assert usage.service_level is None and usage.num_paths is None
    shape = {"num_max_tokens_per_rank": 4096, "hidden": 7168, "num_topk": 8}
    elastic = deep_ep.ElasticBuffer(dist.group.WORLD, **shape, num_gpu_timeout_secs=5)
    assert elastic.num_bytes == deep_ep.ElasticBuffer.get_buffer_size_hint(dist.group.WORLD, 4096, 7168, 8)
    assert elastic.get_logical_domain_size() == deep_ep.get_logical_domain_size(dist.group.WORLD) == (1, 2)
    assert elastic.get_physical_domain_size() == deep_ep.get_physical_domain_size(dist.group.WORLD) == (1, 2)
    assert (elastic.rank_idx, elastic.num_ranks, elastic.scaleup_rank_idx) == (rank, 2, rank)
    num_sms = elastic.get_theoretical_num_sms(64, 8)
    assert num_sms >= 4 and num_sms % 2 == 0 and elastic.get_theoretical_num_qps(num_sms) >= 4
    for name in ("engram_write", "pp_send", "create_agrs_session", "get_engram_storage_size_hint"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(elastic, name)(1, 2)


def test_options_of_constructors() -> None:
    run_ranks(2, check_devices)
