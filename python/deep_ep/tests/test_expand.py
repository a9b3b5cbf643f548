"""Rows by token to rows by expert and back, on one rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from deep_ep import _expand


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
def test_slots(num_rows: int, num_topk: int, num_local: int, alignment: int) -> None:
    local_idx = choices(num_rows, num_topk, num_local)
    expected, counts, num_expanded = expected_slots(local_idx, num_local, alignment)
    found = _expand.expand_slots(local_idx, torch.tensor(counts, dtype=torch.int32), alignment)
    assert torch.equal(found.slots, expected) and found.slots.dtype == torch.int32
    for row, ids in enumerate(local_idx.tolist()):
        last = [max(k for k, e in enumerate(ids) if e == expert) if expert >= 0 else -1 for expert in ids]
        assert found.last_equal[row].tolist() == last

    origins = _expand.Origins(found.slots, num_expanded)
    for x in (torch.randn(num_rows, 8).to(torch.bfloat16), torch.randn(num_rows, 3)):
        rows = origins.rows(x, zero_padding=True)
        wanted = torch.zeros(num_expanded, x.shape[1], dtype=x.dtype)
        for row, k in (expected >= 0).nonzero().tolist():
            wanted[expected[row, k]] = x[row]
        assert torch.equal(rows, wanted)


@pytest.mark.parametrize(("num_rows", "num_topk"), [(1, 1), (40, 4), (300, 8)])
def test_sums_by_spare_bags(num_rows: int, num_topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU implementation, which must not read the number of slots. On the host it is exact only for f32 rows."""
    num_expanded = 37
    x = torch.randn(num_expanded, 24)
    slots = choices(num_rows, num_topk, num_expanded).to(torch.int32)
    slots[0] = -1
    used = slots[slots >= 0].long()
    x[~torch.isin(torch.arange(num_expanded), used)] = float("nan")
    total = torch.zeros(num_rows, 24)
    for k in range(num_topk):
        total = torch.where(slots[:, k : k + 1] >= 0, total + x[slots[:, k].clamp(min=0).long()], total)
    by_rows = _expand.reduce_slots(x, slots, torch.float32)
    by_bags = _expand._sum_of_bags(x, slots, (slots >= 0) & (slots < num_expanded))
    torch.testing.assert_close(by_rows, total, rtol=0, atol=1e-5)
    assert torch.equal(by_bags, by_rows)
    assert not by_rows.isnan().any()


def test_sums_are_rounded_once() -> None:
    x = torch.tensor([[256.0], [1.0], [1.0]]).expand(3, 8).to(torch.bfloat16).contiguous()
    out = _expand.reduce_slots(x, torch.tensor([[0, 1, 2]], dtype=torch.int32), torch.bfloat16)
    assert (out == 258.0).all(), "256 + 1 in bf16 is 256"


@pytest.mark.parametrize("num_rows", [0, 4])
def test_nothing_to_sum(num_rows: int) -> None:
    slots = torch.full((num_rows, 3), -1, dtype=torch.int32)
    for x in (torch.empty(0, 8, dtype=torch.bfloat16), torch.full((5, 8), float("nan"), dtype=torch.bfloat16)):
        out = _expand.reduce_slots(x, slots, torch.bfloat16)
        assert torch.equal(out, torch.zeros(num_rows, 8, dtype=torch.bfloat16))


def test_weights_there_and_back() -> None:
    """Reducing is the transpose of expanding, equal choices included, so gradients are right."""
    local_idx = torch.tensor([[0, 1, 0], [-1, 1, 1], [1, -1, -1], [-1, -1, -1]])
    slots, last_equal = _expand.expand_slots(local_idx, torch.tensor([1, 3], dtype=torch.int32), 4)
    origins = _expand.Origins(slots, 8)
    weights = torch.rand(4, 3).requires_grad_()
    there = origins.weights(weights, last_equal)
    assert there.shape == (8,)
    torch.testing.assert_close(there[0], weights[0, 0] + weights[0, 2])
    grad = torch.rand(8)
    (expected,) = torch.autograd.grad(there, weights, grad)
    assert torch.equal(_expand.slot_weights(grad, slots, last_equal), expected)
    assert F.relu(there[1:4]).sum() == 0, "gaps are zero"
