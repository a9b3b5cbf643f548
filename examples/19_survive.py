"""A Mixture-of-Experts layer that outlives its processes. One of them is killed in the middle of a step; the others
agree on who is left and go on without its experts; then a new process takes its place, and all experts are there again.
Each result is checked:  python examples/19_survive.py [--device cuda]     (ranks share GPUs where there are fewer)
"""

import argparse
import multiprocessing
import os
import secrets
import signal
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

import ferry

RANKS, EXPERTS, TOKENS, HIDDEN, TOPK = 4, 8, 64, 128, 2
LOST_ID, LOST_STEP = 1, 15
STEPS = 20  # that each set of members makes at least
STEPS_BETWEEN_VIEWS = 5  # how often members look for processes that wait to join
HOMES = torch.arange(EXPERTS) * RANKS // EXPERTS  # [E] id of the member that has each expert


def integers(seed: int, least: int, end: int, *shape: int) -> torch.Tensor:
    """Small ones have exact sums: results are the same bits however many ranks there are."""
    return torch.randint(least, end, shape, generator=torch.Generator().manual_seed(seed))


def expert_weights(expert: int) -> torch.Tensor:  # a program would load them from its last checkpoint
    return integers(expert, -2, 3, HIDDEN, HIDDEN).float()


def inputs(step: int, member: int, ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seed = EXPERTS + step * RANKS + member
    x, topk_idx = integers(seed, -4, 5, TOKENS, HIDDEN).float(), integers(seed, 0, EXPERTS, TOKENS, TOPK)
    topk_idx = torch.where(torch.isin(HOMES[topk_idx], torch.tensor(ids)), topk_idx, -1)  # experts whose home is there
    return x, topk_idx, integers(seed, 1, 4, TOKENS, TOPK).float()


def expected(x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    gates = torch.zeros(TOKENS, EXPERTS + 1).scatter_add_(1, topk_idx % (EXPERTS + 1), weights)  # -1 in the last column
    return sum(gates[:, expert, None] * (x @ expert_weights(expert)) for expert in range(EXPERTS))


class Layer:
    """The layer over the members of a view."""

    def __init__(self, members: ferry.Membership, device: torch.device) -> None:
        self.ids, self.id = members.view.ids, members.view.ids[members.view.rank]
        self.group = members.group(device=device)
        self.weights = {e: expert_weights(e).to(device) for e in range(EXPERTS) if HOMES[e] == self.id}
        # No token goes to an expert whose home is gone, so any rank will do.
        self.expert_to_rank = [self.ids.index(home) if home in self.ids else 0 for home in HOMES.tolist()]

    def run(self, step: int, killed_at: Any) -> bool:
        """Whether the result is right."""
        given = inputs(step, self.id, self.ids)
        x, topk_idx, weights = (tensor.to(self.group.device) for tensor in given)
        routing = self.group.route(
            topk_idx, weights, num_experts=EXPERTS, layout="experts", expert_to_rank=self.expert_to_rank
        )
        rows = self.group.dispatch(routing, x).x
        if self.id == LOST_ID and step == LOST_STEP:
            killed_at.value = time.monotonic()
            os.kill(os.getpid(), signal.SIGKILL)
        offsets = routing.expert_row_offsets
        for expert, first, end in zip(routing.local_expert_ids, offsets, offsets[1:]):
            if first < end:
                rows[first:end] = rows[first:end] @ self.weights[expert]
        combined = self.group.combine(routing, rows, weighted=True)
        self.group.wait()  # on GPUs it reports that a rank was lost
        return torch.equal(combined.x.cpu(), expected(*given))


def run_steps(members: ferry.Membership, device: torch.device, killed_at: Any) -> None:
    view, layer, began = members.view, None, time.monotonic()
    step = view.num_complete_steps
    last_step = step + STEPS

    def tell(text: str) -> None:
        if view.rank == 0 and view.ids[0] != LOST_ID:
            print(f"step {step}: {text}, after {1000 * (time.monotonic() - began):.1f} ms", flush=True)

    while step < last_step or view.num_ranks < RANKS:
        error = None
        try:
            if layer is None:
                layer = Layer(members, device)
                tell(f"members {list(view.ids)} have a group")
            if not layer.run(step, killed_at):
                raise SystemExit(f"step {step}: member {layer.id} has a wrong result")
            step += 1
            members.complete_steps(step)
        except (ferry.PeerLost, ferry.Timeout, ferry.TransportError) as lost:
            error, layer, began = lost, None, killed_at.value
            tell(f"a call raised {type(lost).__name__}")
        if error is not None or step % STEPS_BETWEEN_VIEWS == 0:
            began = began if error else time.monotonic()
            view = members.next_view(error)
            step = view.num_complete_steps  # all go on from there
            if view.lost_ids or view.joined_ids:
                tell(f"lost {list(view.lost_ids)}, joined {list(view.joined_ids)}")
                layer, last_step = None, step + STEPS
    layer.group.destroy()
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
