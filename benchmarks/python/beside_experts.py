"""torchrun --nproc-per-node 2 benchmarks/python/beside_experts.py: the experts' second product and its combine, one
after the other and at the same time, as examples/23_combine_beside_experts.py makes them. Times are medians of the
slowest rank's, from a barrier of the GPUs on; a list of numbers for an option measures each combination.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ferry

_EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "23_combine_beside_experts.py"
_US_PER_MS = 1e3


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("combine_beside_experts", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def time_us(step: Callable[[], Any], iterations: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    together = torch.zeros(1, device="cuda")
    times = []
    for _ in range(iterations):
        dist.all_reduce(together)
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * _US_PER_MS)
    slowest = torch.tensor(times, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(statistics.median(slowest.tolist()), 1)


def measure(example: Any, args: argparse.Namespace) -> dict[str, Any]:
    group = example.make_group(dist.get_world_size(), args)
    sent = example.dispatch_some(group, args)
    rows, counts = sent.x, sent.routing.local_expert_counts
    experts = example.Experts(group, args)
    expected = experts.in_turn(rows, counts, sent).clone()
    assert torch.equal(experts.beside(rows, counts, sent), expected)
    num_sms = torch.cuda.get_device_properties(group.device).multi_processor_count

    def combine() -> None:
        group.latency_combine(experts.y, sent, order="rank_sums")

    found = {
        "tokens": args.tokens,
        "experts": args.experts,
        "combine_sms": args.combine_sms,
        "product_us": time_us(lambda: experts.multiply(rows, counts, num_sms), args.iterations),
        "combine_us": time_us(combine, args.iterations),
        "in_turn_us": time_us(lambda: experts.in_turn(rows, counts, sent), args.iterations),
        "beside_us": time_us(lambda: experts.beside(rows, counts, sent), args.iterations),
    }
    found["ratio"] = round(found["beside_us"] / found["in_turn_us"], 3)
    assert torch.equal(experts.beside(rows, counts, sent), expected)
    group.destroy()
    return found


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", "128"), ("experts", "64"), ("combine-sms", "16")):
        parser.add_argument(f"--{name}", type=numbers, default=default)
    for name, default in (("hidden", 4096), ("inner", 2048), ("topk", 6), ("iterations", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", help="file to write the results to")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo")
    example = load_example()
    results = []
    for tokens, experts, combine_sms in itertools.product(args.tokens, args.experts, args.combine_sms):
        one = argparse.Namespace(**vars(args) | {"tokens": tokens, "experts": experts, "combine_sms": combine_sms})
        results.append(measure(example, one))
        if dist.get_rank() == 0:
            print(json.dumps(results[-1]))
    if args.json and dist.get_rank() == 0:
        shape = {"hidden": args.hidden, "inner": args.inner, "topk": args.topk, "num_ranks": dist.get_world_size()}
        about = {"commit": ferry.__commit__, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        pathlib.Path(args.json).write_text(json.dumps(about | shape | {"results": results}, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
