"""Decoding goes on through the loss of a process. One of them is killed in the middle of a step; the others go on in
the same group without its experts; then a new process takes its place. On GPUs a step is a graph, captured once and
replayed before, between and after. Each result is checked:
    python examples/20_decode_through_a_loss.py [--device cuda]     (ranks share GPUs where there are fewer)
"""

import argparse
import multiprocessing
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ferry

RANKS, EXPERTS, TOKENS, HIDDEN, TOPK = 4, 8, 16, 128, 2
LOST_ID, LOST_STEP = 1, 15
STEPS = 20  # that each set of members makes at least
STEPS_BETWEEN_VIEWS = 5  # how often members look for processes that wait to join
LOSSES = (ferry.PeerLost, ferry.Timeout, ferry.TransportError)


def integers(seed: int, least: int, end: int, *shape: int) -> torch.Tensor:
    """Small ones have exact sums."""
    return torch.randint(least, end, shape, generator=torch.Generator().manual_seed(seed))


def expert_weights(expert: int) -> torch.Tensor:  # a program would load them from its last checkpoint
    return integers(expert, -2, 3, HIDDEN, HIDDEN).float()


def inputs(step: int, member: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Those of any step can be made again: a step that did not count on all members is repeated."""
    seed = EXPERTS + step * RANKS + member
    x, topk_idx = integers(seed, -4, 5, TOKENS, HIDDEN).float(), integers(seed, 0, EXPERTS, TOKENS, TOPK)
    return x, topk_idx, integers(seed, 1, 4, TOKENS, TOPK).float()


def expected(x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor, ids: tuple[int, ...]) -> torch.Tensor:
    gates = torch.zeros(TOKENS, EXPERTS).scatter_add_(1, topk_idx, weights)
    return sum(gates[:, e, None] * (x @ expert_weights(e)) for e in range(EXPERTS) if e * RANKS // EXPERTS in ids)


class Decoder:
    """A layer of which each member has some experts, in a group that outlives changes of the members."""

    def __init__(self, members: ferry.Membership, device: torch.device) -> None:
        self.id, row_bytes = members.view.ids[members.view.rank], 4 * HIDDEN
        shape = {"num_ranks": RANKS, "max_tokens": TOKENS, "num_topk": TOPK}
        rows = {"dispatch_row_bytes": row_bytes, "combine_row_bytes": row_bytes}
        latency_bytes = ferry.latency_bytes_required(**shape, **rows, backend=device.type)
        self.group = members.group(num_ranks=RANKS, device=device, latency_bytes=latency_bytes)
        mine = [expert_weights(e) for e in range(EXPERTS) if e * RANKS // EXPERTS == self.id]
        self.weights = torch.stack(mine).to(device)
        self.inputs = [tensor.to(device) for tensor in inputs(0, self.id)]  # memory that a graph reads and writes
        self.out = torch.empty(TOKENS, HIDDEN, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def make_calls(self, between: Callable[[], None] = lambda: None) -> None:
        sent = self.group.latency_dispatch(*self.inputs, num_experts=EXPERTS, max_tokens=TOKENS)
        between()
        self.group.latency_combine(sent.x @ self.weights, sent, out=self.out)
        self.sent = sent  # a graph uses its routing

    def run(self, step: int, between: Callable[[], None]) -> torch.Tensor:
        """Returns the result. Calls ``between`` in the middle."""
        for held, given in zip(self.inputs, inputs(step, self.id)):
            held.copy_(given)
        if self.graph is None:
            self.make_calls(between)  # on GPUs the first step of a process; others may replay theirs
        else:
            self.graph.replay()
            between()
        self.group.wait()
        out = self.out.cpu()
        if self.graph is None and self.out.is_cuda:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.make_calls()
        return out


def run_steps(members: ferry.Membership, device: torch.device, killed_at: Any) -> None:
    view, decoder, is_ready, began = members.view, None, False, time.monotonic()
    step = view.num_complete_steps
    last_step = step + STEPS

    def end_the_lost() -> None:
        if decoder.id == LOST_ID and step == LOST_STEP and killed_at.value == 0:
            killed_at.value = time.monotonic()
            os.kill(os.getpid(), signal.SIGKILL)

    def tell(text: str) -> None:
        if view.rank == 0 and view.ids[0] != LOST_ID:
            print(f"step {step}: {text}, after {1000 * (time.monotonic() - began):.1f} ms", flush=True)

    while step < last_step or view.num_ranks < RANKS:
        silent: tuple[int, ...] = ()
        try:
            if decoder is None:
                decoder = Decoder(members, device)
            elif not is_ready:
                decoder.group.renew(members)
            if not is_ready:
                tell(f"members {list(view.ids)} have the group")
            is_ready = True
            out = decoder.run(step, end_the_lost)
            if not torch.equal(out, expected(*inputs(step, decoder.id), view.ids)):
                raise SystemExit(f"step {step}: member {decoder.id} has a wrong result")
            step += 1
            members.complete_steps(step)
        except LOSSES as loss:  # of a member, or of the group, which another one has suspended: the step does not count
            if is_ready:
                began = killed_at.value
                tell(f"{type(loss).__name__} of rank {loss.peer}")
                silent = decoder.group.suspend()
            is_ready = False
        if not is_ready or step % STEPS_BETWEEN_VIEWS == 0:
            began = time.monotonic() if is_ready else began
            view = members.next_view(silent_ids=silent)
            step = view.num_complete_steps  # all go on from there
            if view.lost_ids or view.joined_ids:
                tell(f"lost {list(view.lost_ids)}, joined {list(view.joined_ids)}")
            if view.lost_ids or view.joined_ids or not is_ready:
                is_ready, last_step = False, step + STEPS
    decoder.group.destroy()
    tell("all results were right")


def run_member(rank: int, secret: str, device: str, killed_at: Any, store: str, addresses: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    members = ferry.Membership(dist.group.WORLD, secret=secret)
    dist.destroy_process_group()  # it was needed to find the others
    addresses.put(members.address)
    run_steps(members, device_of(rank, device), killed_at)


def run_replacement(secret: str, device: str, killed_at: Any, contacts: list[str]) -> None:
    members = ferry.Membership.join(contacts, secret=secret, id=LOST_ID)
    run_steps(members, device_of(LOST_ID, device), killed_at)


def device_of(member: int, kind: str) -> torch.device:
    torch.set_num_threads(1)
    return torch.device("cuda", member % torch.cuda.device_count()) if kind == "cuda" else torch.device("cpu")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no GPU on this machine")
    context = multiprocessing.get_context("spawn")  # processes that use CUDA cannot be forked
    addresses, killed_at, secret = context.SimpleQueue(), context.Value("d", 0.0), secrets.token_hex()

    def start(target: Any, *args: Any) -> Any:
        process = context.Process(target=target, args=args, daemon=True)  # ends with this one
        process.start()
        return process

    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [start(run_member, rank, secret, device, killed_at, store, addresses) for rank in range(RANKS)]
        contacts = [addresses.get() for _ in processes]
    lost = processes[LOST_ID]
    lost.join()
    if lost.exitcode != -signal.SIGKILL:
        raise SystemExit(f"member {LOST_ID} ended with {lost.exitcode}, expected {-signal.SIGKILL}")
    processes[LOST_ID] = start(run_replacement, secret, device, killed_at, contacts)
    for process in processes:
        process.join(60)
    ends = [process.exitcode for process in processes]
    if ends != [0] * RANKS:
        raise SystemExit(f"processes ended with {ends}, expected 0 of each (None: not within 60 s)")
