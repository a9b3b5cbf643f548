"""Handles of the first generation: six tensors, their contents, and their lifetimes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clients import Inputs, device_of, dispatch, inputs_of, layout_of, make_buffer
from network import skip_without_network
from ranks import run_ranks
from world import World, make_world

import deep_ep
import reference
from deep_ep import _masks
from deep_ep._masks import check_mask, ids_of_mask
from deep_ep._steps import Steps
from ferry import InvalidArgument


def check_contents(rank: int, world: World, device: str, num_worst_tokens: int) -> None:
    buffer = make_buffer(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    config = deep_ep.Config(num_sms=6)
    *_, handle, _ = dispatch(buffer, world, mine, config=config, num_worst_tokens=num_worst_tokens)
    assert type(handle) is tuple and len(handle) == 6
    assert all(isinstance(tensor, torch.Tensor) for tensor in handle)
    prefix, channels, recv_channels, recv_idx, in_rank, head = (tensor.cpu() for tensor in handle)
    rows = world.rows_of(rank)
    assert torch.equal(prefix, reference.rank_prefix(world))
    assert recv_idx.tolist() == [t for _, t in rows] + [-1] * (num_worst_tokens and num_worst_tokens - len(rows))
    assert torch.equal(in_rank, reference.in_rank(world, rank))
    assert {t.dtype for t in (prefix, channels, recv_channels, recv_idx, head)} == {torch.int32}

    def before(source: int, channel: int) -> int:
        """First token of a channel."""
        count = len(world.x[source])
        return min(channel * -(-count // 3), count)

    for other in range(world.num_ranks):
        sent = reference.in_rank(world, rank)[:, other]
        assert channels[other].tolist() == [int(sent[: before(rank, c + 1)].sum()) for c in range(3)]
        came = reference.in_rank(world, other)[:, rank]
        assert recv_channels[other].tolist() == [int(came[: before(other, c)].sum()) for c in range(3)]
        assert head[:, other].tolist() == [int(sent[:t].sum()) if sent[t] else -1 for t in range(len(sent))]
    buffer.destroy()


@pytest.mark.parametrize("num_worst_tokens", [0, 40])
def test_contents(num_worst_tokens: int, device: str) -> None:
    run_ranks(3, check_contents, make_world(3, 6, [7, 0, 4]), device, num_worst_tokens)


class Dispatch(torch.autograd.Function):
    """As in trainers: the handle is saved as single tensors and restored as a new tuple."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, buffer: deep_ep.Buffer, idx: torch.Tensor, e: int):
        layout = layout_of(buffer, idx, e)
        x, idx, weights, _, handle, _ = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **layout)
        ctx.buffer = buffer
        ctx.save_for_backward(*handle)
        ctx.mark_non_differentiable(idx, *handle)
        return x, idx, weights, *handle

    @staticmethod
    def backward(ctx: Any, grad_x: torch.Tensor, _: Any, grad_weights: torch.Tensor, *__: Any):
        x, weights, _ = ctx.buffer.combine(grad_x.contiguous(), ctx.saved_tensors, grad_weights.contiguous())
        return x, weights, None, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, buffer: deep_ep.Buffer, *handle: torch.Tensor):
        ctx.buffer = buffer
        ctx.save_for_backward(*handle)
        return buffer.combine(y, handle)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        rows = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.saved_tensors)[0]
        return rows, None, *[None] * len(ctx.saved_tensors)


def expert_weights(num_experts: int, hidden: int) -> torch.Tensor:
    return torch.randn(num_experts, hidden, hidden, generator=torch.Generator().manual_seed(5)) / hidden**0.5


def check_layer(rank: int, world: World, device: str, offload: bool, ranks_per_node: int = 0) -> None:
    buffer = make_buffer(rank, device, ranks_per_node=ranks_per_node)
    mine = inputs_of(world, rank, device_of(rank, device))
    hidden = mine.x.shape[1]
    first = world.first_expert(rank)
    all_experts = expert_weights(world.num_experts, hidden).to(buffer.device)
    experts = all_experts[first : first + world.num_local(rank)].clone().requires_grad_()
    x, weights = mine.x.clone().requires_grad_(), mine.weights.clone().requires_grad_()
    # An offloading trainer: everything that is saved is copied to another device and back.
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone())
    with hooks if offload else torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        rows, idx, row_weights, *handle = Dispatch.apply(x, weights, buffer, mine.idx, world.num_experts)
        y = torch.zeros(rows.shape, device=rows.device)
        for k in range(idx.shape[1]):
            chosen = experts[idx[:, k].clamp(min=0)]
            part = torch.tanh(torch.einsum("nh,nhg->ng", rows.float(), chosen)) * row_weights[:, k : k + 1]
            y = y + torch.where(idx[:, k : k + 1] >= 0, part, 0.0)
        out = Combine.apply(y.to(torch.bfloat16), buffer, *handle)
    del handle
    out.float().square().sum().backward()

    # The same layer on one rank, this rank's tokens for their gradients, all tokens for the experts.
    dense_experts = all_experts.clone().requires_grad_()
    for source in range(world.num_ranks):
        theirs = inputs_of(world, source, buffer.device)
        dense_x, dense_weights = theirs.x.float().requires_grad_(), theirs.weights.clone().requires_grad_()
        total = torch.zeros(theirs.x.shape, device=buffer.device)
        for k in range(theirs.idx.shape[1]):
            chosen = dense_experts[theirs.idx[:, k].clamp(min=0)]
            part = torch.tanh(torch.einsum("nh,nhg->ng", dense_x, chosen)) * dense_weights[:, k : k + 1]
            total = total + torch.where(theirs.idx[:, k : k + 1] >= 0, part, 0.0)
        total.square().sum().backward()
        if source == rank:
            tolerance = {"rtol": 3e-2, "atol": 3e-2}
            torch.testing.assert_close(out.float(), total, **tolerance)
            torch.testing.assert_close(x.grad.float(), dense_x.grad, **tolerance)
            torch.testing.assert_close(weights.grad, dense_weights.grad, rtol=3e-2, atol=1e-1)
    grad = dense_experts.grad[first : first + world.num_local(rank)]
    torch.testing.assert_close(experts.grad, grad, rtol=3e-2, atol=1e-1)
    buffer.destroy()


@pytest.mark.parametrize("offload", [False, True])
def test_layer_with_a_saved_handle(offload: bool, device: str) -> None:
    run_ranks(3, check_layer, make_world(3, 6, [6, 0, 9], hidden=16, num_topk=2), device, offload)


@pytest.mark.parametrize("offload", [False, True])
def test_layer_over_nodes(offload: bool, device: str) -> None:
    skip_without_network()
    run_ranks(4, check_layer, make_world(4, 8, [6, 0, 9, 3], hidden=16, num_topk=2), device, offload, 2)


def count_routes() -> list[int]:
    """Counts how often handles are routed again from now on: by the ids of their masks."""
    routed = []
    ids_of_mask = Steps.ids_of_mask

    def counted(*arguments: Any) -> Any:
        routed.append(1)
        return ids_of_mask(*arguments)

    Steps.ids_of_mask = counted
    return routed


def check_copies(rank: int, world: World, device: str, num_worst_tokens: int) -> None:
    buffer = make_buffer(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    x, _, weights, _, handle, _ = dispatch(buffer, world, mine, num_worst_tokens=num_worst_tokens)
    y = reference.scaled(x, rank)
    expected = reference.combined(world, rank, [])
    routed = count_routes()

    def check(given: tuple, buffer: deep_ep.Buffer = buffer) -> None:
        out, sums, _ = buffer.combine(y, given, topk_weights=weights)
        assert torch.equal(out.cpu(), expected)
        assert torch.equal(sums.cpu(), torch.where(world.topk_idx[rank] >= 0, world.topk_weights[rank], 0.0))
        assert torch.equal(buffer.dispatch(mine.x, handle=given)[0][: len(world.rows_of(rank))].cpu(), rows)

    rows = reference.received_rows(world, rank)
    check(handle)
    check([tensor.detach().view(tensor.shape) for tensor in handle])
    assert not routed
    copies = tuple(tensor.clone() for tensor in handle)
    for _ in range(2):
        check(copies)
    assert len(routed) == 1, "a copied handle is routed again once"
    # A handle may outlive its buffer, for example if a trainer creates a larger one between forward and backward.
    larger = make_buffer(rank, device)
    check(handle, larger)
    larger.destroy()
    buffer.destroy()


@pytest.mark.parametrize("num_worst_tokens", [0, 40])
def test_copied_handles(num_worst_tokens: int, device: str) -> None:
    run_ranks(3, check_copies, make_world(3, 6, [5, 0, 8]), device, num_worst_tokens)


def check_copied_on_one_rank(rank: int, world: World, device: str) -> None:
    buffer = make_buffer(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    x, *_, handle, _ = dispatch(buffer, world, mine)
    with pytest.raises(ValueError, match="route"):
        buffer.combine(x, tuple(t.clone() for t in handle) if rank == 1 else handle)
    assert torch.equal(buffer.combine(reference.scaled(x, rank), handle)[0].cpu(), reference.combined(world, rank, []))


def test_a_handle_copied_on_one_rank_alone() -> None:
    run_ranks(3, check_copied_on_one_rank, make_world(3, 6, [5, 3, 8]), "cpu")


def check_odd_copies(rank: int, world: World) -> None:
    """Copies of which one rank has an element of another kind."""
    buffer = make_buffer(rank, "cpu")
    mine = inputs_of(world, rank, torch.device("cpu"))
    x, _, weights, _, handle, _ = dispatch(buffer, world, mine)
    bad = rank == 1

    def copied(at: int, wrong: Any) -> tuple:
        copies = [tensor.clone() for tensor in handle]
        if bad:
            copies[at] = wrong
        return tuple(copies)

    # An element that no call uses may be anything on the device.
    for wrong in (handle[5].short(), handle[5].double(), handle[5][:1]):
        assert torch.equal(buffer.dispatch(mine.x, handle=copied(5, wrong))[0], x)
        out, sums, _ = buffer.combine(reference.scaled(x, rank), copied(5, wrong), topk_weights=weights)
        assert torch.equal(out, reference.combined(world, rank, []))
        assert sums.shape == mine.weights.shape
    for at, wrong, match in (
        (5, None, r"handle\[5\] is a NoneType"),
        (1, handle[1].to("meta"), r"handle\[1\] is on meta, expected cpu"),
        (3, handle[3].short(), "handle's recv_src_idx has dtype torch.int16"),
        (4, handle[4].int(), "handle's is_token_in_rank has dtype torch.int32"),
    ):
        # The same collectives are announced for a wrong dtype, so that the text names the rank and no other call.
        theirs = "rank 1: route" if isinstance(wrong, torch.Tensor) and not wrong.is_meta else None
        for call in (lambda given: buffer.dispatch(mine.x, handle=given), lambda given: buffer.combine(x, given)):
            with pytest.raises(InvalidArgument, match=match if bad else theirs):
                call(copied(at, wrong))
            with pytest.raises(InvalidArgument, match=match if bad else None):
                call(copied(at, wrong) if bad else handle)
    assert torch.equal(buffer.dispatch(mine.x, handle=handle)[0], x)
    buffer.destroy()


def test_copied_handles_with_an_odd_element() -> None:
    run_ranks(3, check_odd_copies, make_world(3, 6, [5, 3, 8]))


def check_many(rank: int, world: World, device: str) -> None:
    """Handles of several buffers and batches, used in another order than created, and freed with their last tensor."""
    buffers = [make_buffer(rank, device) for _ in range(3)]
    mine = inputs_of(world, rank, device_of(rank, device))
    few = Inputs(*(tensor[:2].contiguous() for tensor in mine))
    made = [(buffer, dispatch(buffer, world, part)) for buffer in buffers for part in (mine, few)]
    for buffer, (x, _, _, _, handle, _) in reversed(made):
        out = buffer.combine(reference.scaled(x, rank), handle)[0]
        assert torch.equal(out.cpu(), reference.combined(world, rank, [])[: len(out)])
    link = handle[0].untyped_storage()._ferry_routing
    native = weakref.ref(link.routing.group)
    kept = handle[0].view(-1)
    del made, buffers, buffer, handle, link, x, out
    gc.collect()
    assert native() is not None, "what shows the memory keeps the link"
    del kept
    gc.collect()
    assert native() is None, "nothing else does"
    dist.barrier()


def test_many_handles(device: str) -> None:
    run_ranks(2, check_many, make_world(2, 6, [5, 8]), device)


@pytest.mark.parametrize("num_ranks", [1, 5, 32, 40])
def test_ids_that_stand_for_ranks(num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(num_ranks)
    mask = torch.rand(50, num_ranks, generator=generator) < 0.5
    ids = ids_of_mask(mask)
    assert ids.shape == (50, min(num_ranks, 32)) and ids.is_contiguous() and ids.dtype == torch.int64
    for row, wanted in zip(ids.tolist(), mask):
        assert sorted(rank for rank in row if rank >= 0) == wanted.nonzero().flatten().tolist()
    assert ids_of_mask(mask[:0]).shape == (0, min(num_ranks, 32))


def test_tokens_of_more_than_32_ranks() -> None:
    mask = torch.zeros(3, 40, dtype=torch.bool)
    mask[0, 8:] = mask[1, :33] = True
    check_mask(mask[::2], "mask")
    check_mask(torch.ones(3, 32, dtype=torch.bool), "mask")
    with pytest.raises(InvalidArgument, match=r"mask\[1\] names 33 ranks, expected at most 32"):
        check_mask(mask, "mask")
    ids = ids_of_mask(mask)
    assert sorted(ids[0].tolist()) == list(range(8, 40))
    assert (ids[1] == 40).all(), "no rank of 40, so that route refuses it"
    assert (ids[2] == -1).all()


def check_large_masks(rank: int, world: World) -> None:
    """As in a group of more than 32 ranks, with fewer."""
    _masks.MAX_TOPK = 2
    buffer = make_buffer(rank, "cpu")
    x = world.x[rank]
    right = torch.ones(len(x), 3, dtype=torch.bool)
    right[:, 0] = False
    wrong = right.clone()
    wrong[0] = True

    def dispatch_by(mask: torch.Tensor) -> tuple:
        counts = mask.sum(0, dtype=torch.int32)
        return buffer.dispatch(x, num_tokens_per_rank=counts, num_tokens_per_expert=counts, is_token_in_rank=mask)

    with pytest.raises(InvalidArgument, match=r"is_token_in_rank\[0\] names 3 ranks" if rank == 1 else None):
        dispatch_by(wrong if rank == 1 else right)
    rows, *_, handle, _ = dispatch_by(right)
    assert torch.equal(rows, torch.cat(world.x) if rank > 0 else x[:0])
    copies = [tensor.clone() for tensor in handle]
    copies[4] = wrong if rank == 1 else copies[4]
    with pytest.raises(InvalidArgument, match=r"topk_idx\[0, 0\] is 3"):
        buffer.dispatch(x, handle=tuple(copies))
    assert torch.equal(buffer.dispatch(x, handle=handle)[0], rows)
    buffer.destroy()


def test_tokens_of_too_many_ranks_are_refused_on_all_ranks() -> None:
    run_ranks(3, check_large_masks, make_world(3, 6, [5, 3, 8]))
