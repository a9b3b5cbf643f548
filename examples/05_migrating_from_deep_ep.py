"""A program written for deep_ep, running unchanged on Ferry: dispatch and combine of an expert layer with the classes
of both generations. GPUs or CPUs:  torchrun --nproc-per-node 4 examples/05_migrating_from_deep_ep.py
"""

import torch
import torch.distributed as dist

import deep_ep

TOKENS, HIDDEN, TOPK, EXPERTS = 64, 256, 4, 16


def experts(rows: torch.Tensor, local_expert: torch.Tensor, first: int) -> torch.Tensor:
    """Each expert multiplies by its number."""
    return (rows.float() * (first + local_expert + 1).unsqueeze(1)).to(torch.bfloat16)


def first_generation(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    buffer = deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes=0, explicitly_destroy=True)
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
    first = buffer.rank * EXPERTS // buffer.group_size
    y = torch.zeros_like(rows, dtype=torch.float32)
    for k in range(TOPK):
        here = (local_idx[:, k] >= 0).unsqueeze(1)
        y += torch.where(here, experts(rows, local_idx[:, k], first).float() * row_weights[:, k : k + 1], 0.0)
    out, _, _ = buffer.combine(y.to(torch.bfloat16), handle)
    buffer.destroy()
    return out


def second_generation(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK)
    # One row per token and expert, grouped by expert, as grouped matrix products require.
    rows, _, row_weights, handle, _ = buffer.dispatch(
        x, idx, weights, num_experts=EXPERTS, expert_alignment=8, do_expand=True, do_zero_padding=True
    )
    counts = torch.tensor(handle.num_recv_tokens_per_expert_list, device=x.device)
    local_expert = torch.repeat_interleave(torch.arange(len(counts), device=x.device), counts)
    y = experts(rows, local_expert, buffer.rank_idx * len(counts)) * row_weights.unsqueeze(1)
    out, _, event = buffer.combine(y.to(torch.bfloat16), handle, async_with_compute_stream=True)
    event.current_stream_wait()
    return out


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(rank)
    scores = torch.rand(TOKENS, EXPERTS, device=device)
    weights, idx = scores.softmax(dim=-1).topk(TOPK)
    x = torch.randn(TOKENS, HIDDEN, device=device).to(torch.bfloat16)
    expected = x.float() * (weights * (idx + 1)).sum(dim=1, keepdim=True)
    for layer in (first_generation, second_generation):
        worst = (layer(x, idx, weights).float() - expected).abs().max()
        assert worst < 0.1, worst
    print(f"rank {rank}: deep_ep {deep_ep.__version__} on {device}, both generations as expected")
    dist.destroy_process_group()
