"""EPHandle: combine reads its tensors when it is called, whatever wrote them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from clients import device_of, inputs_of, make_elastic
from ranks import run_ranks
from world import World, make_world

import deep_ep
import reference


def dense_sums(world: World, rank: int, x: torch.Tensor, handle: deep_ep.EPHandle) -> torch.Tensor:
    """[n, H]: how an engine reduces expanded rows itself, one row per received token."""
    slots = handle.recv_src_metadata[: len(world.rows_of(rank)), 2:].long()
    dense = torch.zeros(len(slots), x.shape[1], device=x.device)
    for k in range(slots.shape[1]):
        dense += torch.where(slots[:, k : k + 1] >= 0, x[slots[:, k].clamp(min=0)].float(), 0.0)
    return dense.to(torch.bfloat16)


def compacted(metadata: torch.Tensor) -> torch.Tensor:
    """Each token's only slot is its own row."""
    slots = torch.full_like(metadata[:, 2:], -1)
    slots[:, 0] = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
    return torch.cat([metadata[:, :2], slots], dim=1)


def check_rewritten(rank: int, world: World, device: str, wait: bool) -> None:
    buffer = make_elastic(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))

    def dispatch() -> tuple[torch.Tensor, deep_ep.EPHandle]:
        x, _, _, handle, _ = buffer.dispatch(
            mine.x, mine.idx, num_experts=world.num_experts, expert_alignment=4, do_expand=True, do_cpu_sync=wait
        )
        return x, handle

    x, handle = dispatch()
    out = buffer.combine(x, handle)[0]

    # Replaced on a copy of the handle: the copy follows the new tensor, the handle the old one.
    other = copy.copy(handle)
    dense = dense_sums(world, rank, x, handle)
    other.recv_src_metadata = compacted(handle.recv_src_metadata)
    if not wait:
        other.recv_src_metadata[len(dense) :, 2] = -1
    assert torch.equal(buffer.combine(dense, other)[0], out)
    assert torch.equal(buffer.combine(x, handle)[0], out)

    # Rewritten in place, with a dense input of another size than the expanded one.
    handle.recv_src_metadata[:, 2:] = other.recv_src_metadata[:, 2:]
    assert torch.equal(buffer.combine(dense, handle)[0], out)
    # Slots may name any row: here all of this rank's rows name its first.
    handle.recv_src_metadata[: len(dense), 2] = 0
    alike = buffer.combine(dense, handle)[0]
    handle.recv_src_metadata[:, 2:] = other.recv_src_metadata[:, 2:]
    assert torch.equal(alike, buffer.combine(dense[:1].expand_as(dense).contiguous(), handle)[0])
    buffer.destroy()


@pytest.mark.parametrize("wait", [True, False])
def test_rewritten_metadata(wait: bool, device: str) -> None:
    run_ranks(3, check_rewritten, make_world(3, 6, [5, 0, 8]), device, wait)


def check_copies(rank: int, world: World, device: str, expand: bool) -> None:
    buffer = make_elastic(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    x, _, _, handle, _ = buffer.dispatch(mine.x, mine.idx, num_experts=world.num_experts, do_expand=expand)
    out = buffer.combine(x, handle)[0]
    assert handle.topk_idx.data_ptr() != mine.idx.data_ptr() or not len(mine.idx)
    larger = make_elastic(rank, device, num_max_tokens_per_rank=64)
    restored = copy.deepcopy(handle) if device == "cuda" else pickle.loads(pickle.dumps(handle))
    for user, given in ((buffer, restored), (larger, copy.copy(handle)), (larger, handle)):
        for _ in range(2):
            assert torch.equal(user.combine(x, given)[0], out)
            assert torch.equal(user.dispatch(mine.x, handle=given)[0], x)
    assert handle._routing.group is larger.runtime
    for used in (larger, buffer):
        used.destroy()


@pytest.mark.parametrize("expand", [False, True])
def test_handles_of_other_buffers_and_copies(expand: bool, device: str) -> None:
    run_ranks(2, check_copies, make_world(2, 6, [5, 8]), device, expand)


def check_ids(rank: int, world: World, device: str) -> None:
    buffer = make_elastic(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    for copied in (True, False):
        handle = buffer.dispatch(mine.x, mine.idx, num_experts=world.num_experts, do_handle_copy=copied)[3]
        assert (handle.topk_idx is mine.idx) != copied
        slots = handle.dst_buffer_slot_idx
        for token, ids in enumerate(world.topk_idx[rank].tolist()):
            for k, expert in enumerate(ids):
                rows = world.rows_of(world.owner(expert)) if expert >= 0 else []
                assert slots[token, k] == (rows.index((rank, token)) if expert >= 0 else -1)
        assert handle.num_sms >= 4
    assert buffer.dispatch(mine.x, mine.idx, num_experts=world.num_experts, num_sms=12)[3].num_sms == 12
    buffer.destroy()


def test_ids_and_destinations(device: str) -> None:
    run_ranks(2, check_ids, make_world(2, 6, [5, 8]), device)


def check_interleaved(rank: int, world: World, device: str) -> None:
    """Two batches in flight at once, on a buffer of each generation."""
    elastic = make_elastic(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    half = len(mine.x) // 2
    parts = [slice(None, half), slice(half, None)]
    under_way = [
        elastic.dispatch(mine.x[part], mine.idx[part].contiguous(), num_experts=world.num_experts, do_expand=expand)
        for part, expand in zip(parts, (False, True))
    ]
    outs = [elastic.combine(x, handle)[0] for x, _, _, handle, _ in under_way]
    expected = reference.combined(world, rank, [])
    outs = [elastic.combine(reference.scaled(under_way[0][0], rank), under_way[0][3])[0], *outs]
    assert torch.equal(outs[0].cpu(), expected[:half])
    elastic.destroy()


def test_two_batches_at_once(device: str) -> None:
    run_ranks(2, check_interleaved, make_world(2, 6, [6, 8]), device)
