"""The first exchange of the tutorial, on CPUs:  torchrun --nproc-per-node 2 examples/22_first_exchange.py"""

import sys

import torch
import torch.distributed as dist

import ferry

dist.init_process_group("gloo")
group = ferry.Group(dist.group.WORLD, device="cpu")

# Four experts, two on each rank; -1: no expert. Token t of rank r has the value 10 (r + 1) + t
# in all its eight channels.
picks = [[[0, 2], [1, 0], [3, -1]], [[1, 3], [2, 3]]][group.rank]
topk_idx = torch.tensor(picks)
numbers = [10.0 * (group.rank + 1) + token for token in range(len(picks))]
x = torch.tensor(numbers)[:, None].repeat(1, 8)

# Counts go between the ranks; then each token has its rows on the ranks of its experts.
routing = group.route(topk_idx, num_experts=4, layout="experts")
received = group.dispatch(routing, x)

# Expert e multiplies its rows by e + 1. The rows of an expert are consecutive.
report = ""
rows = received.x
offsets = routing.expert_row_offsets
for local, expert in enumerate(routing.local_expert_ids):
    mine = rows[offsets[local] : offsets[local + 1]]
    report += f"rank {group.rank}, expert {expert}: tokens {mine[:, 0].int().tolist()}\n"
    mine *= expert + 1

# Each token becomes the sum of what its experts made of it.
combined = group.combine(routing, rows)
report += f"rank {group.rank}: sums {combined.x[:, 0].int().tolist()}\n"

factors = (topk_idx + 1).sum(dim=1, keepdim=True)  # a pick of -1 adds 0
assert torch.equal(combined.x, x * factors)

sys.stdout.write(report)  # at once, so that lines of ranks do not mix
group.destroy()
dist.destroy_process_group()
