"""One rank of one way of ``benchmarks/beside.py``, which starts it and tells it by a pipe what to measure.

The first message back is ``{"ready": versions}``; then each case is answered by ``{"us": time of a step, ...}``,
``{"absent": why this way has no such thing}`` or ``{"failed": why}``. The end of the pipe ends the rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from beside_latency import LatencyChain
from beside_layer import Batch, LayerChain, Shape, draw
from collectives import AllGather, AllToAll
from exchanges import DeepEp, Exchange, Ferry, is_of_ferry
from latency_exchanges import DeepEpLatency, FerryLatency, LatencyExchange

import ferry

_EXCHANGES = {
    "ferry": Ferry,
    "deep_ep": DeepEp,
    "original": DeepEp,
    "all_to_all": AllToAll,
    "all_gather": AllGather,
}
_LATENCY = {"ferry": FerryLatency, "deep_ep": DeepEpLatency, "original": DeepEpLatency}
_GRAPH_STEPS = 100
_US_PER_S = 1e6

Step = Callable[[Any, int], tuple[Any, torch.Tensor]]
"""Takes the rows of a step and its number, returns those of the next one and the sums."""


class Absent(Exception):
    """Why a way does not have what a case asks for."""


def load_deep_ep(way: str, options: argparse.Namespace) -> dict[str, str]:
    """Loads the package of a way through ``deep_ep`` and returns its version."""
    flags = sys.getdlopenflags()
    if way == "original" and options.nccl_differs:
        sys.setdlopenflags(os.RTLD_LAZY)
    try:
        import deep_ep
    except ModuleNotFoundError as error:
        if error.name != "deep_ep":
            raise
        raise Absent("no package deep_ep; --original FOLDER names the folder of one") from None
    finally:
        sys.setdlopenflags(flags)
    version = deep_ep.__version__
    if way == "original" and is_of_ferry(deep_ep):
        raise Absent(f"deep_ep is Ferry's ({version}); --original FOLDER names the folder of the original")
    if way == "deep_ep" and not is_of_ferry(deep_ep):
        raise Absent(f"deep_ep is not Ferry's ({version}); pip install python/deep_ep")
    if way == "original":
        deep_ep.Buffer.set_num_sms(options.original_sms)
    return {"deep_ep": version}


def versions_of(way: str, device: torch.device) -> dict[str, Any]:
    """Versions of the libraries that this way runs, and the GPU."""
    versions: dict[str, Any] = {"torch": torch.__version__, "process_group": dist.get_backend()}
    if device.type == "cuda":
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
        versions |= {"cuda": torch.version.cuda, "nccl": nccl, "gpu": torch.cuda.get_device_name(device)}
    if way in ("ferry", "deep_ep"):
        versions |= {"ferry": ferry.__version__, "commit": ferry.__commit__}
    return versions


class Rank:
    """Everything that this process measures, with the exchanges and batches that cases share."""

    def __init__(self, way: str, options: argparse.Namespace, device: torch.device) -> None:
        self._way, self._options, self._device = way, options, device
        self._shape = Shape(options.hidden, options.topk, options.experts, options.iterations)
        self._exchange: Exchange | None = None
        self._latency: LatencyExchange | None = None
        self._batches: dict[int, Batch] = {}

    def _batch(self, num_tokens: int) -> Batch:
        if num_tokens not in self._batches:
            self._batches[num_tokens] = draw(self._shape, num_tokens, self._device)
        return self._batches[num_tokens]

    def _layer_chain(self, case: dict[str, Any]) -> LayerChain:
        self._exchange = self._exchange or _EXCHANGES[self._way](self._options, self._device)
        return LayerChain(
            self._exchange,
            self._batch(case["tokens"]),
            self._shape,
            "bf16" if case["measure"] == "latency" else case["dtype"],
            is_cached=case["measure"] != "layer",
            reaches_all=self._way == "all_gather",
        )

    def _latency_chain(self, case: dict[str, Any]) -> LatencyChain:
        if self._latency is None:
            options = argparse.Namespace(**{**vars(self._options), "dtype": case["dtype"]})
            self._latency = _LATENCY[self._way](options, self._device, max(self._options.latency_tokens))
        chain = LatencyChain(self._latency, self._batch(case["tokens"]), self._shape, case["dtype"])
        chain.use(case["split"])
        return chain

    def measure(self, case: dict[str, Any]) -> dict[str, Any]:
        """Collective. Time of a step on this rank, and the bytes that it stands for."""
        is_latency = case["measure"] == "latency"
        if is_latency and case["split"] and self._way not in _LATENCY:
            raise Absent("a collective has no halves")
        has_calls = is_latency and self._way in _LATENCY
        chain = self._latency_chain(case) if has_calls else self._layer_chain(case)
        chain.check_experts()
        us, combined, last = (self._graph if case["graph"] else self._eager)(chain.step, chain.begin())
        chain.check(combined, last)
        logical, wire = chain.num_bytes()
        return {"us": us, "logical_bytes": logical, "wire_bytes": wire}

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _chain(self, step: Step, rows: Any, num_steps: int) -> torch.Tensor:
        combined = None
        for number in range(num_steps):
            rows, combined = step(rows, number)
        return combined

    def _eager(self, step: Step, rows: Any) -> tuple[float, torch.Tensor, int]:
        num_steps = self._options.iterations
        self._chain(step, rows, min(num_steps, self._options.warm_up))
        self._finish()
        dist.barrier()
        begin = time.perf_counter()
        combined = self._chain(step, rows, num_steps)
        self._finish()
        us = (time.perf_counter() - begin) / num_steps * _US_PER_S
        return us, combined, num_steps - 1

    def _graph(self, step: Step, rows: Any) -> tuple[float, torch.Tensor, int]:
        """Only for GPUs."""
        self._chain(step, rows, min(self._options.iterations, self._options.warm_up))
        self._finish()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may ask CUDA
            combined = self._chain(step, rows, _GRAPH_STEPS)
        graph.replay()
        self._finish()
        dist.barrier()
        begin = time.perf_counter()
        graph.replay()
        self._finish()
        return (time.perf_counter() - begin) / _GRAPH_STEPS * _US_PER_S, combined.clone(), _GRAPH_STEPS - 1


def join(options: argparse.Namespace) -> torch.device:
    """Enters the process group."""
    where = {"init_method": f"file://{options.store}", "rank": options.rank, "world_size": options.ranks}
    if options.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
        dist.init_process_group("gloo", **where)
        return torch.device("cpu")
    device = torch.device("cuda", options.rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **where)
    return device


def in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def main() -> None:
    options = argparse.Namespace(**json.loads(sys.argv[1]))
    pipe = Connection(options.pipe)
    rank = None
    case = None
    while True:
        try:
            if rank is None:
                versions = load_deep_ep(options.way, options) if options.way in ("deep_ep", "original") else {}
                device = join(options)
                answer: dict[str, Any] = {"ready": {**versions, **versions_of(options.way, device)}}
                rank = Rank(options.way, options, device)
            else:
                answer = rank.measure(case)
        except Absent as absent:
            answer = {"absent": str(absent)}
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": in_one_line(error)}
        try:
            pipe.send(answer)
            case = pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    main()
    # The rank's memory goes with its process. Destroying groups would wait for ranks that may have failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
