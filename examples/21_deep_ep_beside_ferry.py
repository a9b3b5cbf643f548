"""The same layer twice, through deep_ep and through ferry: large batches, and small ones in latency mode. Checks that
both give the same bits:  torchrun --nproc-per-node 4 examples/21_deep_ep_beside_ferry.py  (--device cuda)
"""

import argparse
import os

import torch
import torch.distributed as dist

import deep_ep
import ferry

TOKENS, HIDDEN, TOPK, EXPERTS = 32, 256, 4, 16


def experts(rows: torch.Tensor, local_idx: torch.Tensor, weights: torch.Tensor, first: int) -> torch.Tensor:
    """Sum of the experts' weighted outputs for each row. Expert e multiplies by e + 1."""
    factors = torch.where(local_idx >= 0, weights * (first + local_idx + 1), 0.0)
    return (rows.float() * factors.sum(1, keepdim=True)).to(torch.bfloat16)


def through_deep_ep(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    buffer = deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes=1 << 26, device=x.device)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    rows, local_idx, row_weights, _, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=idx,
        topk_weights=weights,
    )
    y = experts(rows, local_idx, row_weights, buffer.rank * EXPERTS // buffer.group_size)
    return buffer.combine(y, handle)[0]


def through_ferry(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    group = ferry.Group(dist.group.WORLD, device=x.device)
    routing = group.route(idx, weights, num_experts=EXPERTS)
    rows = group.dispatch(routing, x)
    y = experts(rows.x, rows.topk_idx, rows.topk_weights, group.rank * EXPERTS // group.num_ranks)
    return group.combine(routing, y).x


def slab_experts(rows: torch.Tensor, first: int) -> torch.Tensor:
    """rows: [L, C, H]. Weights are applied by the combine."""
    numbers = torch.arange(first + 1, first + 1 + len(rows), device=rows.device)
    return (rows.float() * numbers.view(-1, 1, 1)).to(torch.bfloat16)


def latency_through_deep_ep(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, dist.get_world_size(), EXPERTS)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, num_bytes, low_latency_mode=True, device=x.device)
    rows, _, handle, _, receive = buffer.low_latency_dispatch(
        x, idx, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
    )
    receive()
    y = slab_experts(rows, buffer.rank * EXPERTS // buffer.group_size)
    out, _, receive = buffer.low_latency_combine(y, idx, weights, handle, return_recv_hook=True)
    receive()
    return out


def latency_through_ferry(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    num_bytes = ferry.latency_bytes_required(
        num_ranks=dist.get_world_size(),
        max_tokens=TOKENS,
        num_topk=TOPK,
        dispatch_row_bytes=2 * HIDDEN,
        combine_row_bytes=2 * HIDDEN,
        backend=x.device.type,
    )
    group = ferry.Group(dist.group.WORLD, device=x.device, latency_bytes=num_bytes)
    sent = group.latency_dispatch(x, idx, weights, num_experts=EXPERTS, max_tokens=TOKENS, split=True)
    sent.receive()
    y = slab_experts(sent.x, group.rank * EXPERTS // group.num_ranks)
    summed = group.latency_combine(y, sent, order="rank_sums", split=True)
    summed.receive()
    return summed.x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    on_gpu = parser.parse_args().device == "cuda"
    device = torch.device("cpu")
    if on_gpu:  # ranks may share a GPU, which nccl does not allow
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    weights, idx = torch.rand(TOKENS, EXPERTS, device=device).softmax(-1).topk(TOPK)
    x = torch.randn(TOKENS, HIDDEN, device=device).to(torch.bfloat16)
    for one, other in ((through_deep_ep, through_ferry), (latency_through_deep_ep, latency_through_ferry)):
        left, right = one(x, idx, weights), other(x, idx, weights)
        expected = x.float() * (weights * (idx + 1)).sum(1, keepdim=True)
        assert left.equal(right) and (left - expected).abs().max() < 0.02 * expected.abs().max(), one.__name__
    print(f"rank {dist.get_rank()} on {device.type}: deep_ep and ferry give the same bits in both modes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
