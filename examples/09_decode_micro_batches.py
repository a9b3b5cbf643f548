"""Decodes two micro-batches in latency mode: while the tokens of one are in transit, the other computes.
Checks that the results have the same bits as with one micro-batch after the other and calls that are not split:
torchrun --nproc-per-node 4 examples/09_decode_micro_batches.py
Runs on CPUs, which move rows in the receive half; --device cuda: on a GPU for each rank.
"""

import argparse
import os
from collections.abc import Generator

import torch
import torch.distributed as dist

import ferry

TOKENS, HIDDEN, TOPK, LOCAL_EXPERTS, LAYERS = 16, 256, 4, 4, 3


class Decoder:
    """The layers of one rank: attention and router are the same on all ranks, experts differ."""

    def __init__(self, group: ferry.Group, num_experts: int) -> None:
        self.group, self.num_experts = group, num_experts
        generator = torch.Generator().manual_seed(0)
        self.attention = (torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5).to(group.device)
        self.router = torch.randn(HIDDEN, num_experts, generator=generator).to(group.device)
        own = torch.Generator().manual_seed(group.rank)
        self.experts = (torch.randn(LOCAL_EXPERTS, HIDDEN, HIDDEN, generator=own) / HIDDEN**0.5).to(group.device)
        # A slab for each micro-batch: the slab of a call in flight is in use.
        shape = (LOCAL_EXPERTS, group.num_ranks * TOKENS, HIDDEN)
        self.slabs = [group.empty(shape).zero_() for _ in range(2)]

    def decode(self, x: torch.Tensor, slab: int, split: bool) -> Generator[None, None, torch.Tensor]:
        """Stops after each send half, so that another micro-batch can continue."""
        for _ in range(LAYERS):
            x = torch.tanh(x @ self.attention)
            weights, idx = (x @ self.router).softmax(-1).topk(TOPK)
            sent = self.group.latency_dispatch(
                x.bfloat16(),
                idx,
                weights,
                num_experts=self.num_experts,
                max_tokens=TOKENS,
                split=split,
                out=self.slabs[slab],
            )
            if split:
                yield
                sent.receive()
            # A masked grouped product would leave out the rows without a token; combine does not read them.
            outputs = torch.bmm(sent.x.float(), self.experts).bfloat16()
            summed = self.group.latency_combine(outputs, sent, split=split)
            if split:
                yield
                summed.receive()
            x = x + summed.x.float()
        return x


def results_of(*batches: Generator[None, None, torch.Tensor]) -> list[torch.Tensor]:
    """Continues each batch in turn, so that all ranks make their calls in the same order."""
    results: dict[int, torch.Tensor] = {}
    while len(results) < len(batches):
        for number, batch in enumerate(batches):
            try:
                next(batch)
            except StopIteration as end:
                results[number] = end.value
    return [results[number] for number in range(len(batches))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    on_gpu = parser.parse_args().device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    memory = ferry.latency_bytes_required(
        backend=device.type,
        num_ranks=dist.get_world_size(),
        max_tokens=TOKENS,
        num_topk=TOPK,
        dispatch_row_bytes=2 * HIDDEN,
        combine_row_bytes=2 * HIDDEN,
    )
    group = ferry.Group(dist.group.WORLD, device=device, latency_bytes=memory)
    decoder = Decoder(group, group.num_ranks * LOCAL_EXPERTS)
    generator = torch.Generator().manual_seed(100 + group.rank)
    batches = [torch.randn(TOKENS, HIDDEN, generator=generator).to(device) for _ in range(2)]

    alternating = results_of(*(decoder.decode(x, slab, split=True) for slab, x in enumerate(batches)))
    in_turn = [results_of(decoder.decode(x, 0, split=False))[0] for x in batches]
    if not all(torch.equal(a, b) for a, b in zip(alternating, in_turn, strict=True)):
        raise RuntimeError("two micro-batches and one after the other give different results")
    if group.rank == 0:
        print(f"decoded two micro-batches on {device.type}, each beside the other: same results as in turn")
    group.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
