"""Expert ids of 32 bits: chosen as the original's native module is built with them, and then taken by all calls."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from clients import Inputs, assert_same, device_of, dispatch, inputs_of, make_buffer, make_elastic, make_ep
from network import skip_without_network
from ranks import run_ranks
from world import World, make_world

import deep_ep
import ferry
from deep_ep import _ids

BITS = {torch.int64: "int64", torch.int32: "int32"}


def with_ids(made: Any, dtype: torch.dtype) -> Any:
    """Results with their ids, of this dtype, as i64."""
    if isinstance(made, (tuple, list)):
        return type(made)(with_ids(part, dtype) for part in made)
    return made.long() if isinstance(made, torch.Tensor) and made.dtype == dtype else made


def calls_of_buffer(rank: int, world: World, device: str, mine: Inputs, nodes: int) -> list[Any]:
    buffer = make_buffer(rank, device, ranks_per_node=world.num_ranks // nodes)
    x, idx, weights, counts, handle, _ = dispatch(buffer, world, mine)
    assert idx.dtype == mine.idx.dtype
    again = buffer.dispatch(mine.x, handle=tuple(tensor.clone() for tensor in handle))[0]
    worst = dispatch(buffer, world, mine, num_worst_tokens=64)
    assert worst[1].dtype == mine.idx.dtype
    out, sums, _ = buffer.combine(x, handle, weights)
    buffer.destroy()
    return [x, idx.long(), weights, counts, list(handle), again, worst[1].long(), out, sums]


def calls_of_latency_mode(rank: int, world: World, device: str, mine: Inputs) -> list[Any]:
    bytes_needed = deep_ep.Buffer.get_low_latency_rdma_size_hint(16, 64, world.num_ranks, world.num_experts)
    buffer = make_buffer(rank, device, low_latency_mode=True, num_rdma_bytes=bytes_needed)
    x, counts, handle, _, hook = buffer.low_latency_dispatch(
        mine.x, mine.idx, 16, world.num_experts, use_fp8=False, return_recv_hook=True
    )
    hook()
    counts = counts.clone()
    out, _, _ = buffer.low_latency_combine(x, mine.idx, mine.weights, handle)
    buffer.destroy()
    return [counts, out]


def calls_of_elastic(rank: int, world: World, device: str, mine: Inputs, nodes: int) -> list[Any]:
    found: list[Any] = []
    for make in (make_elastic, make_ep):
        buffer = make(rank, device, ranks_per_node=world.num_ranks // nodes)
        for expand, waits in ((False, True), (True, True), (False, False)):
            x, idx, weights, handle, _ = buffer.dispatch(
                mine.x,
                mine.idx,
                mine.weights,
                num_experts=world.num_experts,
                do_expand=expand,
                do_cpu_sync=waits,
                do_zero_padding=True,
            )
            assert (handle.topk_idx is mine.idx) == (make is make_ep) and torch.equal(handle.topk_idx, mine.idx)
            assert handle.topk_idx.dtype == mine.idx.dtype
            if not expand:
                assert idx.dtype == mine.idx.dtype
                assert buffer.dispatch(mine.x, handle=handle)[1].dtype == mine.idx.dtype
                idx = idx.long()
            rows = len(world.rows_of(rank)) if not expand else len(x)
            found += [x[:rows], idx, weights[:rows], handle.recv_src_metadata, handle.dst_buffer_slot_idx]
            found += list(buffer.combine(x, handle, weights)[:2])
        buffer.destroy()
    return found


def check(rank: int, world: World, device: str, nodes: int) -> None:
    mine = inputs_of(world, rank, device_of(rank, device))
    results = []
    for dtype in BITS:
        _ids.topk_idx_t = dtype
        own = mine._replace(idx=mine.idx.to(dtype))
        made = calls_of_buffer(rank, world, device, own, nodes) + calls_of_elastic(rank, world, device, own, nodes)
        results.append(made + calls_of_latency_mode(rank, world, device, own))
    assert_same(results[0], results[1])

    # A buffer that was made for one dtype refuses the other.
    buffer, elastic = make_buffer(rank, device, ranks_per_node=0), make_elastic(rank, device, ranks_per_node=0)
    with pytest.raises(ferry.InvalidArgument, match=r"topk_idx has dtype torch.int64, expected torch.int32.*\.to\("):
        buffer.get_dispatch_layout(mine.idx, world.num_experts)
    with pytest.raises(ferry.InvalidArgument, match=r"int64, expected torch\.int32"):
        elastic.dispatch(mine.x, mine.idx, num_experts=world.num_experts)
    for used in (buffer, elastic):
        used.destroy()


def test_results_are_those_of_ids_of_64_bits(device: str) -> None:
    run_ranks(3, check, make_world(3, 6, [5, 0, 8]), device, 1)


def test_over_nodes(device: str) -> None:
    skip_without_network()
    run_ranks(2, check, make_world(2, 6, [5, 8]), device, 2)


@pytest.mark.parametrize("variable", _ids.VARIABLES)
def test_the_variables_choose(variable: str) -> None:
    def imported(bits: str, program: str) -> subprocess.CompletedProcess[str]:
        others = {name: value for name, value in os.environ.items() if name not in _ids.VARIABLES}
        environment = others | {variable: bits}
        return subprocess.run(
            [sys.executable, "-c", f"import deep_ep; {program}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    show = "print(deep_ep.topk_idx_t, deep_ep.Config().get_nvl_buffer_size_hint(1024, 8))"
    wide, narrow = (imported(bits, show).stdout.split() for bits in ("64", "32"))
    assert (wide[0], narrow[0]) == ("torch.int64", "torch.int32")
    assert int(wide[1]) - int(narrow[1]) == 10 * 8 * 256 * 128 * 4, "128 ids of each record"
    assert imported("", show).stdout.split() == wide
    wrong = imported("16", "")
    assert f"{variable} is '16', expected 32 or 64" in wrong.stderr
