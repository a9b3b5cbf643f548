"""A Mixture-of-Experts layer whose experts are spread over the ranks, trained for a few steps and checked against the
same layer on one rank:  torchrun --nproc-per-node 4 examples/04_moe_layer.py     (a GPU for each rank, or all on the
CPU)
"""

import os

import torch
import torch._dynamo  # optimizers load it; if a process group exists by then, it keeps that group and its threads
import torch.distributed as dist

import ferry
import ferry.nn

TOKENS, HIDDEN, TOPK, EXPERTS = 64, 128, 2, 8


class MoeLayer(torch.nn.Module):
    def __init__(self, group: ferry.Group) -> None:
        super().__init__()
        self.exchange = ferry.nn.ExpertParallel(group, EXPERTS)
        torch.manual_seed(0)  # all ranks start from the same weights and keep only their own experts
        self.router = torch.nn.Linear(HIDDEN, EXPERTS)
        experts = [torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS)]
        mine = EXPERTS // group.num_ranks
        self.experts = torch.nn.ModuleList(experts[group.rank * mine : (group.rank + 1) * mine])
        self.to(group.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, idx = self.router(x).softmax(dim=-1).topk(TOPK)
        return self.exchange(x, idx, weights, self.run_experts)

    def run_experts(self, rows: torch.Tensor, offsets: list[int]) -> torch.Tensor:
        parts = [torch.relu(expert(rows[a:b])) for expert, a, b in zip(self.experts, offsets, offsets[1:])]
        return torch.cat([*parts, rows[offsets[-1] :]])


def train(group: ferry.Group, x: torch.Tensor, target: torch.Tensor) -> list[float]:
    layer = MoeLayer(group)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean() / group.num_ranks
        loss.backward()
        total = loss.detach().clone()
        if group.num_ranks > 1:
            dist.all_reduce(total)
            for parameter in layer.router.parameters():  # every rank has the router; experts have one owner each
                dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(total.item())
    return losses


if __name__ == "__main__":
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_ranks, TOKENS, HIDDEN, generator=generator).to(device)
    target = torch.randn(num_ranks, TOKENS, HIDDEN, generator=generator).to(device)
    parallel = train(ferry.Group(dist.group.WORLD, device=device), x[rank], target[rank])
    alone_group = dist.new_group([0])
    if rank == 0:
        alone = train(ferry.Group(alone_group, device=device), x.flatten(0, 1), target.flatten(0, 1))
        worst = max(abs(a - b) for a, b in zip(parallel, alone))
        print(f"losses on {num_ranks} ranks {parallel[0]:.6f} ... {parallel[-1]:.6f}, largest difference {worst:.1e}")
        assert worst < 1e-5 and parallel[-1] < parallel[0]
    dist.barrier()
    dist.destroy_process_group()  # joins gloo's threads, which may still hold tensors and must not outlive Python
