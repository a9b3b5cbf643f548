"""A training step whose exchange overlaps with a shared expert on a separate stream, forward and backward:
torchrun --nproc-per-node 4 examples/06_overlapped_training.py      (a GPU for each rank, or all on the CPU)
"""

import contextlib
import os

import torch
import torch._dynamo  # optimizers load it; if a process group exists by then, it keeps that group and its threads
import torch.distributed as dist

import ferry
import ferry.nn

TOKENS, HIDDEN, TOPK, EXPERTS = 64, 128, 2, 8


class Layer(torch.nn.Module):
    """x + shared(x) + the weighted outputs of the chosen experts."""

    def __init__(self, group: ferry.Group, overlap: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group = group
        self.router = torch.nn.Linear(HIDDEN, EXPERTS)
        self.shared = torch.nn.Sequential(torch.nn.Linear(HIDDEN, 4 * HIDDEN), torch.nn.Linear(4 * HIDDEN, HIDDEN))
        experts = [torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS)]
        mine = EXPERTS // group.num_ranks
        self.experts = torch.nn.ModuleList(experts[group.rank * mine : (group.rank + 1) * mine])
        self.to(group.device)
        self.stream = torch.cuda.Stream(group.device) if overlap and group.device.type == "cuda" else None

    @contextlib.contextmanager
    def on_side_stream(self, *tensors: torch.Tensor):
        """Work inside waits for work that is on the current stream now, but not for work added later."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        for tensor in tensors:
            tensor.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            yield

    def join(self, *tensors: torch.Tensor) -> None:
        """The current stream waits for the side stream and may then use the tensors."""
        if self.stream is None:
            return
        torch.cuda.current_stream().wait_stream(self.stream)
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, idx = self.router(x).softmax(dim=-1).topk(TOPK)
        # Autograd runs each step's backward on the stream of its forward: the gradients' exchange overlaps as well.
        with self.on_side_stream(x, idx, weights):
            routing = self.group.route(idx, weights.detach(), num_experts=EXPERTS, layout="experts")
            rows, _, row_weights = ferry.nn.dispatch(routing, x, weights)
        out = x + self.shared(x)
        self.join(rows, row_weights)
        offsets = routing.expert_row_offsets
        parts = [torch.relu(expert(rows[a:b])) for expert, a, b in zip(self.experts, offsets, offsets[1:])]
        y = torch.cat(parts) * row_weights.unsqueeze(1)
        with self.on_side_stream(y):
            routed = ferry.nn.combine(routing, y)
        self.join(routed)
        return out + routed


def losses(group: ferry.Group, overlap: bool, x: torch.Tensor, target: torch.Tensor) -> list[float]:
    layer = Layer(group, overlap)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    found = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean() / group.num_ranks
        loss.backward()
        for module in (layer.router, layer.shared):  # every rank has these; experts have one owner each
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(total.item())
    return found


if __name__ == "__main__":
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x, target = (torch.randn(TOKENS, HIDDEN, generator=generator).to(device) for _ in range(2))
    group = ferry.Group(dist.group.WORLD, device=device)
    plain, overlapped = losses(group, False, x, target), losses(group, True, x, target)
    if rank == 0:
        worst = max(abs(a - b) for a, b in zip(plain, overlapped))
        print(f"losses {plain[0]:.6f} ... {plain[-1]:.6f} on {device.type}, overlapped differs by {worst:.1e}")
        assert worst < 1e-5 and plain[-1] < plain[0]
    dist.barrier()
    dist.destroy_process_group()  # joins gloo's threads, which may still hold tensors and must not outlive Python
