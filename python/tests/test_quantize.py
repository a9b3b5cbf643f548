"""Rows of one byte per channel: alone, and made by dispatch on the way."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from ranks import DEVICES, device_of, run_ranks
from world import World, make_world

import ferry

MODES = ["fp8", "fp8_power_of_two", "fp8_ue8m0", "int8"]
LARGEST = {"fp8": 448.0, "fp8_power_of_two": 448.0, "fp8_ue8m0": 448.0, "int8": 127.0}


def block_maxima(x: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(x.float().abs(), (0, -x.shape[1] % 128))
    return padded.view(len(x), -1, 128).amax(dim=2).clamp(min=1e-4)


def spread(scales: torch.Tensor, hidden: int) -> torch.Tensor:
    return scales.repeat_interleave(128, dim=1)[:, :hidden]


def f32_scales(scales: torch.Tensor, num_blocks: int) -> torch.Tensor:
    if scales.dtype == torch.float32:
        return scales
    exponents = scales.contiguous().view(torch.uint8)[:, :num_blocks].to(torch.int32)
    return (exponents << 23).view(torch.float32)


@pytest.mark.starts_cuda
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hidden", [16, 128, 640])
def test_follows_the_formula_and_comes_back(kind: str, mode: str, hidden: int) -> None:
    # The formula on the CPU: torch divides by a number as if it multiplied by its reciprocal on GPUs.
    x = (torch.randn(9, hidden, generator=torch.Generator().manual_seed(2)) * 3).bfloat16()
    rows = ferry.quantize(x.to(kind), mode)
    maxima = block_maxima(x)
    scales = f32_scales(rows.scales.cpu(), maxima.shape[1])
    codes = rows.x.cpu()
    if mode in ("fp8", "int8"):
        assert torch.equal(scales, maxima / LARGEST[mode])
    else:
        assert torch.equal(scales, torch.exp2(torch.ceil(torch.log2(maxima / LARGEST[mode]))))
    factor = (
        1 / scales if mode in ("fp8_power_of_two", "fp8_ue8m0") else torch.full_like(maxima, LARGEST[mode]) / maxima
    )
    scaled = x.float() * spread(factor, hidden)
    if mode == "int8":
        assert torch.equal(codes, scaled.round().clamp(-127, 127).to(torch.int8))
    else:
        assert torch.equal(codes.view(torch.uint8), scaled.to(torch.float8_e4m3fn).view(torch.uint8))
    exact = codes.float() * spread(scales, hidden)
    assert torch.equal(ferry.dequantize(rows.x, rows.scales, dtype=torch.float32).cpu(), exact)
    assert torch.equal(ferry.dequantize(rows.x, rows.scales).cpu(), exact.bfloat16())


@pytest.mark.starts_cuda
@pytest.mark.parametrize("kind", DEVICES)
def test_writes_where_it_is_told(kind: str) -> None:
    x = torch.randn(6, 256, dtype=torch.bfloat16, device=kind)
    expected = ferry.quantize(x, "fp8_ue8m0")
    bytes_of = torch.empty(2, 6, dtype=torch.uint8, device=kind)
    out = torch.empty(6, 256, dtype=torch.float8_e4m3fn, device=kind)
    rows = ferry.quantize(x, "fp8_ue8m0", out=out, out_scales=bytes_of.T)
    assert rows.x is out
    assert torch.equal(out.view(torch.uint8), expected.x.view(torch.uint8))
    assert torch.equal(bytes_of.T, expected.scales.view(torch.uint8)[:, :2])
    back = torch.empty(6, 512, device=kind)[:, :256]
    assert ferry.dequantize(out, bytes_of.T, out=back) is back
    assert torch.equal(back, ferry.dequantize(*expected, dtype=torch.float32))


def test_refuses_what_cannot_be_quantised() -> None:
    x = torch.zeros(2, 128, dtype=torch.bfloat16)
    with pytest.raises(ferry.InvalidArgument, match="quantize is 'fp4'"):
        ferry.quantize(x, "fp4")
    with pytest.raises(ferry.InvalidArgument, match="mode is None"):
        ferry.quantize(x, None)
    with pytest.raises(ferry.InvalidArgument, match=r"\[T, H\]"):
        ferry.quantize(x[0], "fp8")
    with pytest.raises(ferry.InvalidArgument, match="f16"):
        ferry.quantize(x.half(), "fp8")
    with pytest.raises(ferry.InvalidArgument, match="quantize_int8: scales"):
        ferry.quantize(x, "int8", out_scales=torch.zeros(2, 3))
    with pytest.raises(ferry.InvalidArgument, match="dequantize_fp8: q is bf16"):
        ferry.dequantize(x, torch.zeros(2, 1))


def check_dispatch(rank: int, world: World, layout: str, kind: str) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    x = world.x[rank]
    options = {"slab_capacity": 64} if layout == "slab" else {}
    routing = group.route(
        world.topk_idx[rank], world.topk_weights[rank], num_experts=world.num_experts, layout=layout, **options
    )
    hidden = x.shape[1]
    for mode in MODES:
        sent = ferry.quantize(x, mode)
        expected = group.dispatch(routing, sent.x, scales=sent.scales, zero_padding=True)
        received = group.dispatch(routing, x, quantize=mode, zero_padding=True)
        assert (received.x.dtype, received.scales.dtype) == (sent.x.dtype, sent.scales.dtype)
        assert torch.equal(received.x.view(torch.uint8), expected.x.view(torch.uint8))
        assert torch.equal(received.scales, expected.scales)
        assert torch.equal(received.topk_weights, expected.topk_weights)
        # The caller's tensors, scales by columns.
        rows = routing.num_recv_rows
        columns = sent.scales.shape[1]
        by_columns = torch.empty(columns, rows, dtype=sent.scales.dtype, device=device).T
        out = group.empty(rows, hidden, dtype=sent.x.dtype)
        group.dispatch(
            routing, x, quantize=mode, out=out, out_scales=by_columns, tables=False, zero_padding=True, num_sms=8
        )
        assert torch.equal(out.view(torch.uint8), expected.x.view(torch.uint8))
        assert torch.equal(by_columns, expected.scales)
    exponents = torch.empty(routing.num_recv_rows, math.ceil(hidden / 128), dtype=torch.uint8, device=device)
    group.dispatch(routing, x, quantize="fp8_ue8m0", out_scales=exponents)
    with pytest.raises(ferry.InvalidArgument, match="rank 0: dispatch: input scales are"):
        group.dispatch(routing, x, quantize="fp8", scales=exponents if rank == 0 else None, out_scales=None)
        group.wait()
    with pytest.raises(ferry.InvalidArgument):
        group.dispatch(routing, x, quantize="fp9" if rank == 0 else "fp8")
        group.wait()
    group.destroy()


@pytest.mark.parametrize("layout", ["tokens", "experts", "slab"])
def test_dispatch_quantises_on_the_way(layout: str, device: str) -> None:
    run_ranks(3, check_dispatch, make_world(3, 7, [5, 0, 9], hidden=272), layout, device)
