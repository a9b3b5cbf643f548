"""Buffer: values, order and shapes of the first generation, against plain torch."""

from __future__ import annotations

import pytest
import torch
from clients import device_of, dispatch, inputs_of, layout_of, make_buffer, tensors_read
from ranks import run_ranks
from world import World, make_world

import deep_ep
import reference


def check_layout(rank: int, world: World, device: str) -> None:
    buffer = make_buffer(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    layout = layout_of(buffer, mine.idx, world.num_experts)
    expected = reference.in_rank(world, rank)
    assert torch.equal(layout["is_token_in_rank"].cpu(), expected)
    assert layout["num_tokens_per_rank"].tolist() == expected.sum(0).tolist()
    assert layout["num_tokens_per_expert"].tolist() == reference.choices_per_expert(world, rank)
    assert {t.dtype for name, t in layout.items() if name.startswith("num") and t is not None} == {torch.int32}
    assert layout["num_tokens_per_rdma_rank"] is None
    *_, event = buffer.get_dispatch_layout(
        mine.idx, world.num_experts, previous_event=buffer.capture(), async_finish=True, allocate_on_comm_stream=True
    )
    assert event.event is not None
    event.current_stream_wait()
    buffer.destroy()


def check_pair(rank: int, world: World, device: str, alignment: int, num_worst_tokens: int) -> None:
    buffer = make_buffer(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    options = {"expert_alignment": alignment, "num_worst_tokens": num_worst_tokens}
    x, idx, weights, counts, handle, event = dispatch(buffer, world, mine, **options)
    assert event.event is None
    expected = reference.received_rows(world, rank)
    count = len(expected)
    num_rows = num_worst_tokens or count
    assert x.shape == (num_rows, mine.x.shape[1]) and idx.shape == weights.shape == (num_rows, mine.idx.shape[1])
    assert torch.equal(x[:count].cpu().view(torch.int16), expected.view(torch.int16))
    assert idx.dtype == torch.int64
    assert idx[:count].tolist() == reference.received_ids(world, rank)
    assert torch.equal(weights[:count].cpu(), reference.received_weights(world, rank))
    assert (idx[count:] == -1).all()
    entries = [reference.align(n, alignment) for n in reference.entries_per_local_expert(world, rank)]
    assert counts == ([] if num_worst_tokens else entries)
    assert all(type(n) is int for n in counts)

    y = reference.scaled(x, rank)
    y[count:] = float("nan")  # no rank may read rows that hold no token
    bias = [torch.full_like(mine.x, 0.5), torch.full_like(mine.x, -3.0)]
    for biases in ([], bias[:1], bias):
        given = {0: None, 1: biases[0] if biases else None, 2: tuple(biases)}[len(biases)]
        out, out_weights, event = buffer.combine(y, handle, topk_weights=weights, bias=given)
        assert event.event is None
        assert torch.equal(out.cpu(), reference.combined(world, rank, [b.cpu() for b in biases]))
        assert torch.equal(out_weights.cpu(), torch.where(world.topk_idx[rank] >= 0, world.topk_weights[rank], 0.0))
    assert buffer.combine(y, handle)[1] is None

    again = buffer.dispatch(mine.x * 2, handle=handle)
    assert again[1:5] == (None, None, None, None)
    assert torch.equal(again[0][:count].cpu(), expected * 2)
    buffer.destroy()


def test_layout(device: str) -> None:
    run_ranks(3, check_layout, make_world(3, 6, [7, 0, 4]), device)


@pytest.mark.parametrize("num_tokens", [[5], [4, 9, 0], [0, 0], [7, 7, 7, 7]])
@pytest.mark.parametrize(("alignment", "num_worst_tokens"), [(1, 0), (8, 0), (1, 64)])
def test_dispatch_and_combine(num_tokens: list[int], alignment: int, num_worst_tokens: int, device: str) -> None:
    world = make_world(len(num_tokens), 12, num_tokens, num_topk=4)
    run_ranks(len(num_tokens), check_pair, world, device, alignment, num_worst_tokens)


def test_every_token_to_one_rank(device: str) -> None:
    """The others receive nothing and contribute nothing to combine."""
    world = make_world(3, 6, [5, 6, 7])
    for ids in world.topk_idx:
        ids.clamp_(min=0).remainder_(2)
    run_ranks(3, check_pair, world, device, 1, 0)


@pytest.mark.parametrize(("hidden", "num_topk", "num_experts"), [(7168, 8, 64), (64, 16, 64), (8, 32, 40)])
def test_shapes_of_clients(hidden: int, num_topk: int, num_experts: int, device: str) -> None:
    world = make_world(2, num_experts, [6, 3], hidden=hidden, num_topk=num_topk)
    run_ranks(2, check_pair, world, device, 16, 0)


def check_nan(rank: int, world: World, device: str) -> None:
    world.x[0][1] = float("nan")
    buffer = make_buffer(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    x, *_, handle, _ = dispatch(buffer, world, mine)
    is_nan = [(s, t) == (0, 1) for s, t in world.rows_of(rank)]
    assert x.isnan().all(dim=1).tolist() == x.isnan().any(dim=1).tolist() == is_nan
    out = buffer.combine(x, handle)[0]
    expected = [rank == 0 and t == 1 and bool(world.ranks_of(0, 1)) for t in range(len(out))]
    assert out.isnan().any(dim=1).tolist() == expected
    buffer.destroy()


def test_nan_stays_in_its_row(device: str) -> None:
    run_ranks(2, check_nan, make_world(2, 4, [4, 3]), device)


def scales_of(x: torch.Tensor, kind: str) -> torch.Tensor:
    """[T, 3]: each kind with other strides, or of i32."""
    values = x[:, :3].float()
    if kind == "column major":
        return values.t().contiguous().t()
    if kind == "gaps":
        return values.new_zeros(len(x), 7)[:, ::2][:, :3].copy_(values)
    if kind == "one for all":
        return values.new_full((1, 1), 2.5).expand(len(x), 3)
    if kind == "vector":
        return values[:, 0].contiguous()
    return (values * 1000).to(torch.int32)


def check_fp8(rank: int, world: World, device: str, kind: str) -> None:
    buffer = make_buffer(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    payload = mine.x.float().clamp(-8, 8).to(torch.float8_e4m3fn)
    scales = scales_of(mine.x, kind)
    (x, recv_scales), _, _, _, handle, _ = dispatch(buffer, world, mine._replace(x=(payload, scales)))
    expected = reference.received_rows(world, rank)
    all_scales = [scales_of(source, kind) for source in world.x]
    expected_scales = reference.stack([all_scales[s][t] for s, t in world.rows_of(rank)], all_scales[rank])
    for _ in range(2):
        assert x.dtype == torch.float8_e4m3fn
        sent = expected.float().clamp(-8, 8).to(torch.float8_e4m3fn)
        assert torch.equal(x.cpu().view(torch.uint8), sent.view(torch.uint8))
        assert recv_scales.dtype == scales.dtype and recv_scales.is_contiguous()
        assert torch.equal(recv_scales.cpu(), expected_scales)
        (x, recv_scales), *_ = buffer.dispatch((payload, scales), handle=handle)
    buffer.destroy()


@pytest.mark.parametrize("kind", ["column major", "gaps", "one for all", "vector", "integers"])
def test_fp8_with_scales_of_any_strides(kind: str, device: str) -> None:
    run_ranks(2, check_fp8, make_world(2, 6, [5, 8]), device, kind)


def check_without_ids(rank: int, world: World, device: str) -> None:
    buffer = make_buffer(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    layout = layout_of(buffer, mine.idx, world.num_experts)
    x, idx, weights, counts, handle, _ = buffer.dispatch(mine.x, **layout)
    assert idx is None and weights is None
    assert torch.equal(x.cpu(), reference.received_rows(world, rank))
    assert counts == reference.entries_per_local_expert(world, rank)
    # Weights are still returned: the client chooses their width.
    out, sums, _ = buffer.combine(reference.scaled(x, rank), handle, torch.ones(len(x), 5, device=x.device))
    assert torch.equal(out.cpu(), reference.combined(world, rank, []))
    num_ranks_of = torch.tensor([float(len(world.ranks_of(rank, t))) for t in range(len(out))])
    assert torch.equal(sums.cpu(), num_ranks_of.unsqueeze(1).expand(-1, 5))
    buffer.destroy()


def test_dispatch_without_ids(device: str) -> None:
    run_ranks(3, check_without_ids, make_world(3, 6, [5, 0, 8]), device)


def check_fleeting_biases(rank: int, world: World, device: str) -> None:
    """Biases that have no owner but the call."""
    buffer = make_buffer(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    x, *_, handle, _ = dispatch(buffer, world, mine)
    y = reference.scaled(x, rank)
    made = [torch.full(mine.x.shape, 0.3, device=x.device), torch.rand(mine.x.shape, device=x.device)]
    expected = reference.combined(world, rank, [tensor.bfloat16().cpu() for tensor in made])
    with tensors_read() as read:
        for options in ({}, {"async_finish": True}):
            for bias in (map(torch.Tensor.bfloat16, made), (tensor.bfloat16() for tensor in made)):
                out, _, event = buffer.combine(y, handle, bias=bias, **options)
                if options:
                    event.current_stream_wait()
                assert torch.equal(out.cpu(), expected)
    assert len(read) == 8, "the stream of the call is told of each"
    buffer.destroy()


def test_biases_of_iterators(device: str) -> None:
    run_ranks(2, check_fleeting_biases, make_world(2, 6, [5, 8]), device)


def check_events(rank: int, world: World, device: str) -> None:
    buffer = make_buffer(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    for previous in (None, deep_ep.EventHandle(), deep_ep.Buffer.capture(), deep_ep.EventOverlap()):
        options = {"previous_event": previous, "async_finish": True, "allocate_on_comm_stream": previous is not None}
        x, _, weights, _, handle, event = dispatch(buffer, world, mine, **options)
        assert isinstance(event, deep_ep.EventOverlap) and isinstance(event.event, deep_ep.EventHandle)
        event.current_stream_wait()
        y = reference.scaled(x, rank)
        out, _, event = buffer.combine(y, handle, topk_weights=weights, **(options | {"previous_event": None}))
        del y
        with event:
            pass
        assert torch.equal(out.cpu(), reference.combined(world, rank, []))
    buffer.destroy()


def test_asynchronous_calls(device: str) -> None:
    run_ranks(2, check_events, make_world(2, 6, [5, 8]), device)


def check_local_memory(rank: int, device: str) -> None:
    buffer = make_buffer(rank, device, num_nvl_bytes=1024, num_rdma_bytes=4096, low_latency_mode=True)
    whole = buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)
    assert whole.shape == (4096,) and whole.device == buffer.device and not whole.any()
    part = buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size([2, 8]), offset=64, use_rdma_buffer=True)
    part.fill_(1.0)
    assert whole[64:96].any() and not whole[:64].any() and not whole[96:].any()
    assert buffer.get_local_buffer_tensor(torch.int64).shape == (128,)
    assert buffer.get_local_buffer_tensor(torch.float32, offset=1000).shape == (6,)
    for size, offset in ((torch.Size([257]), 0), (None, 2), (None, 1028)):
        with pytest.raises(ValueError, match="get_local_buffer_tensor"):
            buffer.get_local_buffer_tensor(torch.int32, size, offset)
    assert (buffer.rank, buffer.group_size, buffer.low_latency_mode) == (rank, 2, True)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1024, 4096)
    buffer.destroy()
    assert whole.sum() == 16 * (0x3F + 0x80)


def test_local_memory(device: str) -> None:
    run_ranks(2, check_local_memory, device)
