"""The experts' second matrix product and the combine of its rows at the same time: a Triton kernel counts finished
tiles, and the combine sends a tile's rows once they are final. Checks that the sums are those of one after the other:
torchrun --nproc-per-node 2 examples/23_combine_beside_experts.py      (a GPU for each rank, and Triton)
"""

import argparse
import os

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import ferry

TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 64, 128, 64


@triton.jit
def grouped_product(
    a, w, y, counts, words, num_experts, capacity, hidden, inner,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, tile_depth: tl.constexpr,
):  # fmt: skip
    """y[e, :count] = a[e, :count] @ w[e] for each local expert e. Adds 1 to a tile's word for each finished column of
    tiles, so the tile's rows are final at hidden / tile_columns."""
    columns = tl.cdiv(hidden, tile_columns)
    tiles_per_expert = tl.cdiv(capacity, tile_rows)
    first = 0  # tile of the expert, among those that have rows
    for expert in range(num_experts):
        count = tl.load(counts + expert)
        end = first + tl.cdiv(count, tile_rows) * columns
        # The next tile of this program at or behind `first`.
        tile = first + (tl.program_id(0) - first % tl.num_programs(0) + tl.num_programs(0)) % tl.num_programs(0)
        for at in range(tile, end, tl.num_programs(0)):
            row_tile = (at - first) // columns
            rows = row_tile * tile_rows + tl.arange(0, tile_rows)
            cols = (at - first) % columns * tile_columns + tl.arange(0, tile_columns)
            depth = tl.arange(0, tile_depth)
            expert_rows = expert.to(tl.int64) * capacity + rows
            a_at = a + expert_rows[:, None] * inner + depth[None, :]
            w_at = w + expert.to(tl.int64) * inner * hidden + depth[:, None] * hidden + cols[None, :]
            sums = tl.zeros((tile_rows, tile_columns), dtype=tl.float32)
            for _ in range(0, inner, tile_depth):
                part = tl.load(a_at, mask=rows[:, None] < count, other=0.0)
                sums = tl.dot(part, tl.load(w_at), sums)
                a_at += tile_depth
                w_at += tile_depth * hidden
            tl.store(
                y + expert_rows[:, None] * hidden + cols[None, :], sums.to(tl.bfloat16), mask=rows[:, None] < count
            )
            tl.debug_barrier()  # all threads have stored before one of them releases
            tl.atomic_add(words + expert * tiles_per_expert + row_tile, 1, sem="release")
        first = end


class Experts:
    """The second product of one rank's experts, and the combine behind it."""

    def __init__(self, group: ferry.Group, args: argparse.Namespace) -> None:
        generator = torch.Generator(group.device).manual_seed(group.rank)
        self.group, self.args = group, args
        self.capacity = group.num_ranks * args.tokens
        shape = (args.experts // group.num_ranks, args.inner, args.hidden)
        self.weights = torch.randn(shape, generator=generator, device=group.device).bfloat16() / args.inner**0.5
        self.y = torch.zeros(shape[0], self.capacity, args.hidden, dtype=torch.bfloat16, device=group.device)
        tiles = triton.cdiv(self.capacity, TILE_ROWS)
        self.words = torch.zeros(shape[0], tiles, dtype=torch.int32, device=group.device)
        self.signals = ferry.TileSignals(self.words, tile_rows=TILE_ROWS, threshold=args.hidden // TILE_COLUMNS)
        self.stream = torch.cuda.Stream()

    def multiply(self, rows: torch.Tensor, counts: torch.Tensor, num_programs: int) -> None:
        experts, depth, hidden = self.weights.shape
        grouped_product[(num_programs,)](
            rows, self.weights, self.y, counts, self.words, experts, self.capacity, hidden, depth,
            tile_rows=TILE_ROWS, tile_columns=TILE_COLUMNS, tile_depth=TILE_DEPTH, num_warps=8, num_stages=4,
        )  # fmt: skip

    def in_turn(self, rows: torch.Tensor, counts: torch.Tensor, sent: ferry.LatencyDispatched) -> torch.Tensor:
        num_sms = torch.cuda.get_device_properties(rows.device).multi_processor_count
        self.multiply(rows, counts, num_sms)
        return self.group.latency_combine(self.y, sent, order="rank_sums").x

    def beside(self, rows: torch.Tensor, counts: torch.Tensor, sent: ferry.LatencyDispatched) -> torch.Tensor:
        """The product leaves multiprocessors to the combine's send half, which runs on another stream."""
        num_sms = torch.cuda.get_device_properties(rows.device).multi_processor_count
        self.words.zero_()
        self.stream.wait_stream(torch.cuda.current_stream())
        self.multiply(rows, counts, num_sms - self.args.combine_sms)
        with torch.cuda.stream(self.stream):
            combined = self.group.latency_combine(
                self.y, sent, order="rank_sums", split=True, signals=self.signals, num_sms=self.args.combine_sms
            )
        torch.cuda.current_stream().wait_stream(self.stream)
        combined.receive()
        return combined.x


def make_group(num_ranks: int, args: argparse.Namespace) -> ferry.Group:
    return ferry.Group(
        dist.group.WORLD,
        device=torch.cuda.current_device(),
        latency_bytes=ferry.latency_bytes_required(
            num_ranks=num_ranks, max_tokens=args.tokens, num_topk=args.topk,
            dispatch_row_bytes=2 * args.inner, combine_row_bytes=2 * args.hidden, order="rank_sums",
        ),
    )  # fmt: skip


def dispatch_some(group: ferry.Group, args: argparse.Namespace) -> ferry.LatencyDispatched:
    """Rows as a layer's first product would make them of what it received."""
    torch.manual_seed(group.rank)
    scores = torch.randn(args.tokens, args.experts, device=group.device)
    weights, idx = scores.softmax(-1).topk(args.topk)
    x = torch.randn(args.tokens, args.inner, device=group.device).bfloat16()
    return group.latency_dispatch(x, idx, weights, num_experts=args.experts, max_tokens=args.tokens)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 128), ("hidden", 4096), ("inner", 2048), ("experts", 64), ("topk", 6)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--combine-sms", type=int, default=16, help="multiprocessors of the combine's send half")
    return options


def main() -> None:
    args = parser().parse_args()
    assert args.hidden % TILE_COLUMNS == 0
    assert args.inner % TILE_DEPTH == 0
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    group = make_group(dist.get_world_size(), args)
    sent = dispatch_some(group, args)
    rows, counts = sent.x, sent.routing.local_expert_counts
    experts = Experts(group, args)
    expected = experts.in_turn(rows, counts, sent).clone()
    for _ in range(3):
        assert torch.equal(experts.beside(rows, counts, sent), expected)
    if group.rank == 0:
        print(f"{args.tokens} tokens of {group.num_ranks} ranks: the same sums beside the product as after it")
    group.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
