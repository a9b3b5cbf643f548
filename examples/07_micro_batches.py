"""Trains on two micro-batches at once: while the tokens of one are exchanged, the other computes, forward and backward.
Checks that gradients have the same bits as with one micro-batch after the other, and prints how much of the
exchange was hidden:
torchrun --nproc-per-node 4 examples/07_micro_batches.py      (a GPU for each rank, or all on the CPU)
"""

import argparse
import os
import time
from collections.abc import Callable, Generator, Sequence

import torch

import ferry
import ferry.nn

TOPK, LAYERS, LOCAL_EXPERTS = 4, 2, 8

# Generators stop after starting an exchange, so that another micro-batch can continue.
Steps = Generator[None, None, torch.Tensor]
Finish = Callable[[], tuple[torch.Tensor, ...]]


class Exchange:
    """Dispatch and combine. ``beside``: on a separate stream, so that later work need not wait for them."""

    def __init__(self, group: ferry.Group, capacity: int, num_sms: int, beside: bool) -> None:
        self.group, self.capacity, self.num_sms = group, capacity, num_sms
        # With priority, the few blocks of an exchange get multiprocessors before the next blocks of a matrix product.
        self.stream = torch.cuda.Stream(group.device, priority=-1) if beside and group.device.type == "cuda" else None

    def dispatch(self, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> tuple[ferry.Routing, Finish]:
        # Room for `capacity` rows of each expert: the host does not wait for counts and runs ahead of the GPU.
        num_experts = self.group.num_ranks * LOCAL_EXPERTS
        options = {"num_experts": num_experts, "layout": "slab", "slab_capacity": self.capacity}

        def call() -> tuple[ferry.Routing, torch.Tensor, torch.Tensor]:
            routing = self.group.route(idx, weights.detach(), **options)
            rows, _, row_weights = ferry.nn.dispatch(routing, x, weights, num_sms=self.num_sms)
            return routing, rows, row_weights

        return self._start(call, x, idx, weights)

    def combine(self, routing: ferry.Routing, y: torch.Tensor) -> Finish:
        return self._start(lambda: (routing, ferry.nn.combine(routing, y, num_sms=self.num_sms)), y)[1]

    def _start(self, call: Callable, *inputs: torch.Tensor) -> tuple[ferry.Routing, Finish]:
        """Autograd runs each call's backward on the stream of its forward, and orders the streams itself."""
        if self.stream is None:
            routing, *outputs = call()
            return routing, lambda: outputs
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            routing, *outputs = call()
            done = self.stream.record_event()
        for tensor in inputs:
            tensor.record_stream(self.stream)

        def finish() -> Sequence[torch.Tensor]:
            torch.cuda.current_stream().wait_event(done)
            for tensor in outputs:
                tensor.record_stream(torch.cuda.current_stream())
            return outputs

        return routing, finish


class Kept(torch.autograd.Function):
    """Returns tensors, and gradients, that were computed before."""

    @staticmethod
    def forward(ctx, outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], *inputs: torch.Tensor):
        ctx.grads = grads
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx, *_):
        return None, None, *ctx.grads


class NoExchange:
    """Takes no time, to measure the computation alone: every dispatch returns the same rows."""

    def __init__(self, rows: torch.Tensor, row_weights: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> None:
        self.rows, self.tokens = (rows, row_weights), (x, weights)

    def dispatch(self, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> tuple[None, Finish]:
        return None, lambda: Kept.apply(self.rows, self.tokens, x, weights)

    def combine(self, routing: None, y: torch.Tensor) -> Finish:
        return lambda: Kept.apply(self.tokens[:1], self.rows[:1], y)


class Layer(torch.nn.Module):
    """Dense work (in place of attention), then experts."""

    def __init__(self, hidden: int, num_ranks: int) -> None:
        super().__init__()
        wide = hidden // 2
        self.dense = torch.nn.Sequential(torch.nn.Linear(hidden, wide), torch.nn.ReLU(), torch.nn.Linear(wide, hidden))
        self.router = torch.nn.Linear(hidden, num_ranks * LOCAL_EXPERTS)
        self.into = torch.nn.Parameter(torch.randn(LOCAL_EXPERTS, hidden, wide) / hidden**0.5)
        self.out = torch.nn.Parameter(torch.randn(LOCAL_EXPERTS, wide, hidden) / wide**0.5)

    def experts(self, rows: torch.Tensor) -> torch.Tensor:
        by_expert = rows.view(LOCAL_EXPERTS, -1, rows.shape[1])
        return torch.bmm(torch.relu(torch.bmm(by_expert, self.into)), self.out).view_as(rows)


class Model(torch.nn.Module):
    def __init__(self, hidden: int, num_ranks: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(hidden, num_ranks) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, exchange: Exchange | NoExchange) -> Steps:
        for layer in self.layers:
            x = x + layer.dense(x)
            weights, idx = layer.router(x).float().softmax(dim=-1).topk(TOPK)
            routing, dispatched = exchange.dispatch(x, idx, weights)
            yield
            rows, row_weights = dispatched()
            y = layer.experts(rows) * row_weights.unsqueeze(1).to(rows.dtype)
            combined = exchange.combine(routing, y)
            yield
            x = x + combined()[0]
        return x.float().square().mean()


def run_to_end(steps: Steps) -> torch.Tensor:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def train_one_by_one(model: Model, batches: list[torch.Tensor], exchange: Exchange | NoExchange) -> None:
    for x in batches:
        run_to_end(model(x, exchange)).backward()


def train_together(model: Model, batches: list[torch.Tensor], exchange: Exchange) -> None:
    """Runs each batch to its next exchange, in turn. Autograd takes the latest step first, so backward passes take
    turns in the same way.
    """
    running = [model(x, exchange) for x in batches]
    for _ in range(2 * LAYERS):
        for steps in running:
            next(steps)
    sum(run_to_end(steps) for steps in running).backward()


def exchange_alone(exchange: Exchange, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> None:
    """As many exchanges as a step of two micro-batches has."""
    for _ in range(2 * LAYERS):
        routing, dispatched = exchange.dispatch(x, idx, weights)
        (out,) = exchange.combine(routing, dispatched()[0])()
        out.backward(out.detach())


def gradients(model: Model, train: Callable[[], None]) -> list[torch.Tensor]:
    model.zero_grad()
    train()
    return [parameter.grad.clone() for parameter in model.parameters()]


def time_of(call: Callable[[], None], device: torch.device, repetitions: int) -> float:
    """Milliseconds of the fastest call."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    for _ in range(repetitions + 1):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times[1:])


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192 if on_gpus else 64)
    parser.add_argument("--hidden", type=int, default=4096 if on_gpus else 64)
    parser.add_argument("--num-sms", type=int, default=0, help="multiprocessors of an exchange; 0: Ferry's choice")
    parser.add_argument("--repetitions", type=int, default=10)
    args = parser.parse_args()
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # ranks share the cores
    group = ferry.Group(device=device)
    torch.manual_seed(group.rank)
    dtype = torch.bfloat16 if on_gpus else torch.float32
    model = Model(args.hidden, group.num_ranks).to(device, dtype)
    batches = [torch.randn(args.tokens, args.hidden, device=device, dtype=dtype) for _ in range(2)]
    capacity = 2 * args.tokens * TOPK // LOCAL_EXPERTS  # twice what a balanced router needs
    in_turn = Exchange(group, capacity, args.num_sms, beside=False)
    beside = Exchange(group, capacity, args.num_sms, beside=True)

    expected = gradients(model, lambda: train_one_by_one(model, batches, in_turn))
    found = gradients(model, lambda: train_together(model, batches, beside))
    group.wait()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), "gradients differ"

    x = batches[0].detach().clone().requires_grad_()
    weights, idx = torch.rand(args.tokens, group.num_ranks * LOCAL_EXPERTS, device=device).topk(TOPK)
    rows, row_weights = (tensor.detach() for tensor in in_turn.dispatch(x, idx, weights)[1]())
    nothing = NoExchange(rows, row_weights, x.detach(), weights)
    together = time_of(lambda: train_together(model, batches, beside), device, args.repetitions)
    one_by_one = time_of(lambda: train_one_by_one(model, batches, in_turn), device, args.repetitions)
    exchange = time_of(lambda: exchange_alone(in_turn, x, idx, weights), device, args.repetitions)
    compute = time_of(lambda: train_one_by_one(model, batches, nothing), device, args.repetitions)
    group.wait()
    if group.rank == 0:
        hidden = (exchange + compute - together) / exchange
        print(f"a step on {device.type}: {one_by_one:.2f} ms one by one, {together:.2f} ms together, same gradients")
        print(f"exchange alone {exchange:.2f} ms, computation alone {compute:.2f} ms: {hidden:.0%} of exchange hidden")
        if not on_gpus:
            print("on CPUs a call is done when it returns: nothing runs beside it")
    group.destroy()


if __name__ == "__main__":
    main()
