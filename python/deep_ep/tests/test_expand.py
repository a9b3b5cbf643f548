"""Rows by expert and back are those that torch's operators make of the same rows by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_expansion
from clients import assert_same, device_of, inputs_of, make_elastic
from ranks import run_ranks
from world import World, make_world

import deep_ep

ALIGNMENTS = [1, 3, 128]


def choices(num_rows: int, num_topk: int, num_local: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows + num_topk)
    return torch.randint(-1, num_local, (num_rows, num_topk), generator=generator)


def expected_slots(local_idx: torch.Tensor, num_local: int, alignment: int) -> tuple[torch.Tensor, list[int], int]:
    slots = torch.full(local_idx.shape, -1, dtype=torch.int32)
    position, counts = 0, []
    for expert in range(num_local):
        count = 0
        for row, ids in enumerate(local_idx.tolist()):
            if expert in ids:
                last = max(k for k, e in enumerate(ids) if e == expert)
                slots[row, last] = position + count
                count += 1
        counts.append(count)
        position += -(-count // alignment) * alignment
    return slots, counts, position


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize(("num_rows", "num_topk", "num_local"), [(0, 3, 2), (1, 1, 1), (40, 4, 3), (9, 32, 2)])
def test_slots_of_the_reference(num_rows: int, num_topk: int, num_local: int, alignment: int) -> None:
    local_idx = choices(num_rows, num_topk, num_local)
    expected, counts, num_expanded = expected_slots(local_idx, num_local, alignment)
    found = torch_expansion.expand_slots(local_idx, torch.tensor(counts, dtype=torch.int32), alignment)
    assert torch.equal(found.slots, expected) and found.slots.dtype == torch.int32
    origins = torch_expansion.Origins(found.slots, num_expanded)
    x = torch.randn(num_rows, 8).to(torch.bfloat16)
    wanted = torch.zeros(num_expanded, x.shape[1], dtype=x.dtype)
    for row, k in (expected >= 0).nonzero().tolist():
        wanted[expected[row, k]] = x[row]
    assert torch.equal(origins.rows(x, zero_padding=True), wanted)


def check_tables(buffer: deep_ep.ElasticBuffer, num_rows: int, num_topk: int, num_local: int) -> None:
    """On one rank, which receives its tokens with an expert, in their order."""
    device = buffer.device
    idx = choices(num_rows, num_topk, num_local)
    is_sent = (idx >= 0).any(1)
    local_idx = idx[is_sent]
    for alignment in ALIGNMENTS:
        expected, counts, num_expanded = expected_slots(local_idx, num_local, alignment)
        x = torch.randn(num_rows, 48, device=device).to(torch.bfloat16)
        new = {"num_experts": num_local, "expert_alignment": alignment, "do_expand": True}
        *_, handle, _ = buffer.dispatch(x, idx.to(device), **new)
        counts = torch.tensor(counts, dtype=torch.int32, device=device)
        assert handle.num_expanded_tokens == num_expanded
        assert torch.equal(handle.recv_src_metadata[:, 2:].cpu(), expected)
        assert torch.equal(handle.num_unaligned_recv_tokens_per_expert, counts)
        starts = torch_expansion.aligned_ends(counts, alignment) - torch_expansion.aligned(counts, alignment)
        assert torch.equal(handle.psum_num_recv_tokens_per_expert, starts + counts)
        last = torch_expansion.expand_slots(local_idx.to(device), counts, alignment).last_equal
        check_rows(buffer, handle, is_sent.to(device), last)
        # A table that a client rewrote: rows are named in another order.
        slots = handle.recv_src_metadata[:, 2:]
        slots[slots >= 0] = slots[slots >= 0].flip(0)
        check_rows(buffer, handle, is_sent.to(device), last)


def check_rows(
    buffer: deep_ep.ElasticBuffer, handle: deep_ep.EPHandle, is_sent: torch.Tensor, last: torch.Tensor
) -> None:
    device, slots, num_expanded = buffer.device, handle.recv_src_metadata[:, 2:], handle.num_expanded_tokens
    num_tokens, num_topk = handle.topk_idx.shape
    origins = torch_expansion.Origins(slots, num_expanded)
    weights = torch.rand(num_tokens, num_topk, device=device)
    named_weights = torch.where(last >= 0, weights[is_sent], 0.0)
    scales = torch.randint(1 << 30, (num_tokens, 3), dtype=torch.int32, device=device)
    padded = {"handle": handle, "do_zero_padding": True}
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
        x = torch.randn(num_tokens, 48, device=device).to(dtype)
        rows, idx, of_rows, _, _ = buffer.dispatch(x, topk_weights=weights, **padded)
        assert idx is None
        assert_same(rows, origins.rows(x[is_sent], zero_padding=True))
        torch.testing.assert_close(of_rows, origins.weights(named_weights, last))
        for column_major in (False, True):
            (_, made), _, no_weights, _, _ = buffer.dispatch(
                (x, scales), use_tma_aligned_col_major_sf=column_major, **padded
            )
            assert no_weights is None
            assert torch.equal(made, origins.rows(scales[is_sent], zero_padding=True))
            strides = (1, -(-num_expanded // 4) * 4) if column_major else (3, 1)
            assert made.stride() == tuple(max(stride, 1) for stride in strides)
    y = torch.full((num_expanded, 48), float("nan"), device=device).to(torch.bfloat16)
    named = slots[slots >= 0].long()
    y[named] = torch.randn(len(named), 48, device=device).to(torch.bfloat16)
    grad = torch.rand(num_expanded, device=device)
    sums, of_choices, _ = buffer.combine(y, handle, grad)
    assert torch.equal(sums[is_sent], torch_expansion.reduce_slots(y, slots, torch.bfloat16))
    assert torch.equal(of_choices[is_sent], torch_expansion.slot_weights(grad, slots, last))
    assert not sums[~is_sent].any() and not of_choices[~is_sent].any()
    assert buffer.combine(y, handle)[1] is None


def check_one_rank(rank: int, device: str, single_rounding: bool) -> None:
    buffer = make_elastic(rank, device, num_max_tokens_per_rank=300, allow_multiple_reduction=not single_rounding)
    for shape in [(0, 3, 2), (1, 1, 1), (40, 4, 3), (9, 32, 2), (300, 8, 7)]:
        check_tables(buffer, *shape)
    buffer.destroy()


@pytest.mark.parametrize("single_rounding", [False, True])
def test_rows_of_one_rank(single_rounding: bool, device: str) -> None:
    run_ranks(1, check_one_rank, device, single_rounding)


def check_sums_are_rounded_once(rank: int, device: str) -> None:
    buffer = make_elastic(rank, device)
    rows = torch.zeros(1, 8, dtype=torch.bfloat16, device=buffer.device)
    idx = torch.tensor([[0, 1, 2]], device=buffer.device)
    *_, handle, _ = buffer.dispatch(rows, idx, num_experts=3, do_expand=True)
    assert handle.recv_src_metadata[0, 2:].tolist() == [0, 1, 2]
    x = torch.tensor([[256.0], [1.0], [1.0]]).expand(3, 8).to(buffer.device, torch.bfloat16).contiguous()
    sums = buffer.combine(x, handle)[0]
    assert (sums == 258.0).all(), "256 + 1 in bf16 is 256"
    unaligned = torch.cat([x.new_zeros(8), x.view(-1)])[8:].view(3, 8)
    assert torch.equal(buffer.combine(unaligned, handle)[0], sums)
    shifted = torch.cat([x.new_zeros(1), x.view(-1)])[1:].view(3, 8)
    assert torch.equal(buffer.combine(shifted, handle)[0], sums)
    buffer.destroy()


def test_sums_are_rounded_once(device: str) -> None:
    run_ranks(1, check_sums_are_rounded_once, device)


def check_gradients(rank: int, device: str) -> None:
    """Reducing is the transpose of expanding, equal choices included, so gradients are right."""
    buffer = make_elastic(rank, device)
    on = buffer.device
    idx = torch.tensor([[0, 1, 0], [-1, 1, 1], [1, -1, -1], [-1, -1, -1]], device=on)
    weights = torch.rand(4, 3, device=on)
    x = torch.zeros(4, 8, dtype=torch.bfloat16, device=on)
    _, _, there, handle, _ = buffer.dispatch(x, idx, weights, num_experts=2, expert_alignment=4, do_expand=True)
    torch.testing.assert_close(there[0], weights[0, 0] + weights[0, 2])
    assert not there[1:4].any(), "gaps are zero"
    slots, last = torch_expansion.expand_slots(idx[:3], handle.num_unaligned_recv_tokens_per_expert, 4)
    leaf = weights.clone().requires_grad_()
    origins = torch_expansion.Origins(slots, 8)
    grad = torch.rand(8, device=on)
    (expected,) = torch.autograd.grad(origins.weights(torch.where(last >= 0, leaf[:3], 0.0), last), leaf, grad)
    y = torch.zeros(8, 8, dtype=torch.bfloat16, device=on)
    assert torch.equal(buffer.combine(y, handle, grad)[1], expected)
    buffer.destroy()


def test_weights_there_and_back(device: str) -> None:
    run_ranks(1, check_gradients, device)


def check_as_torch(rank: int, world: World, device: str, wait: bool, alignment: int, single_rounding: bool) -> None:
    """Dispatch and combine by token, with torch's operators between them, and the expanded calls."""
    buffer = make_elastic(rank, device, allow_multiple_reduction=not single_rounding)
    mine = inputs_of(world, rank, device_of(rank, device))
    new = {"num_experts": world.num_experts, "expert_alignment": alignment, "do_cpu_sync": wait}
    rows, idx, of_choices, by_token, _ = buffer.dispatch(mine.x, mine.idx, mine.weights, **new)
    x, _, weights, handle, _ = buffer.dispatch(
        mine.x, mine.idx, mine.weights, do_expand=True, do_zero_padding=True, **new
    )
    counts = handle.num_unaligned_recv_tokens_per_expert
    slots, last = torch_expansion.expand_slots(idx, counts, alignment)
    assert torch.equal(handle.recv_src_metadata[:, 2:], slots)
    assert torch.equal(handle.recv_src_metadata[:, :2], by_token.recv_src_metadata[:, :2])
    origins = torch_expansion.Origins(slots, handle.num_expanded_tokens)
    expected_x = origins.rows(rows, zero_padding=True)
    for payload, given in ((mine.x, mine.weights), (mine.x, None), (mine.x * 2, mine.weights * 2)):
        again, _, of_rows, _, _ = buffer.dispatch(
            payload, topk_weights=given, handle=handle, do_expand=True, do_zero_padding=True
        )
        assert torch.equal(again, expected_x * (2 if payload is not mine.x else 1))
        assert (of_rows is None) == (given is None)
    assert_same(x, expected_x)
    torch.testing.assert_close(weights, origins.weights(of_choices, last), rtol=1e-6, atol=0)

    y = torch.randn(x.shape, device=x.device).to(torch.bfloat16)
    bias = torch.ones_like(mine.x)
    by_rank = torch_expansion.reduce_slots(y, slots, torch.bfloat16)
    expected = buffer.combine(by_rank, by_token, torch_expansion.slot_weights(weights, slots, last), bias)
    out, sums, _ = buffer.combine(y, handle, weights, bias)
    if not single_rounding:
        assert_same(out, expected[0])
    assert_same(sums, expected[1])
    buffer.destroy()


@pytest.mark.parametrize(
    ("wait", "alignment", "single_rounding"), [(True, 1, False), (True, 16, True), (False, 4, False)]
)
@pytest.mark.parametrize(("num_tokens", "num_topk"), [([9, 30], 4), ([0, 0], 3), ([0, 17, 5], 32)])
def test_calls_give_what_torch_gives(
    num_tokens: list[int], num_topk: int, wait: bool, alignment: int, single_rounding: bool, device: str
) -> None:
    world = make_world(len(num_tokens), 12, num_tokens, num_topk=num_topk)
    run_ranks(len(num_tokens), check_as_torch, world, device, wait, alignment, single_rounding)


def check_no_operators(rank: int, world: World) -> None:
    """Not one operator of torch but those that make tensors."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            self.names.append(str(function))
            return function(*args, **kwargs or {})

    buffer = make_elastic(rank, "cpu")
    mine = inputs_of(world, rank, torch.device("cpu"))
    for wait in (True, False):
        with Operators() as operators:
            x, _, weights, handle, _ = buffer.dispatch(
                mine.x, mine.idx, mine.weights, num_experts=world.num_experts, do_expand=True, do_cpu_sync=wait
            )
            x, _, weights, _, _ = buffer.dispatch(mine.x, topk_weights=mine.weights, handle=handle)
            buffer.combine(x, handle, weights, mine.x)
        assert {name.split(".")[1] for name in operators.names} <= {"empty_strided", "empty", "as_strided"}
    buffer.destroy()


def test_expanded_calls_run_no_operator_of_torch() -> None:
    run_ranks(2, check_no_operators, make_world(2, 6, [7, 5]))


def check_clients_slots(rank: int, world: World, device: str) -> None:
    """A table that a client rewrote also determines where a cached dispatch puts rows."""
    buffer = make_elastic(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    x, _, _, handle, _ = buffer.dispatch(
        mine.x, mine.idx, num_experts=world.num_experts, expert_alignment=4, do_expand=True, do_zero_padding=True
    )
    slots = handle.recv_src_metadata[:, 2:]
    handle.recv_src_metadata[:, 2:] = torch.where(slots >= 0, len(x) - 1 - slots, -1)
    for options in ({}, {"previous_event_before_epilogue": deep_ep.EventHandle()}):
        again = buffer.dispatch(mine.x, handle=handle, do_zero_padding=True, **options)[0]
        assert torch.equal(again, x.flip(0))
    assert torch.equal(buffer.combine(x.flip(0), handle)[0], buffer.combine(again, handle)[0])
    buffer.destroy()


def test_slots_that_a_client_wrote(device: str) -> None:
    run_ranks(2, check_clients_slots, make_world(2, 6, [7, 5]), device)
