"""A Mixture-of-Experts layer whose training outlives its processes. One of them is killed in the middle of a step; the
others agree on who is left and train on without its experts; then a new process takes its place, with its experts as
they were at the last checkpoint. All experts must have learned what they should:
    python examples/19_survive.py [--device cuda]     (ranks share GPUs where there are fewer)
"""

import argparse
import multiprocessing
import os
import pathlib
import secrets
import signal
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

import ferry
import ferry.nn

RANKS, EXPERTS, TOKENS, HIDDEN, TOPK = 4, 8, 64, 32, 2
LOST_ID, LOST_STEP = 1, 7
STEPS = 40  # that each set of members makes at least
STEPS_BETWEEN_VIEWS = 5  # how often members write checkpoints, and look for processes that wait to join
LEARNING_RATE, LEARNED = 0.5, 1e-3  # the first loss is about 16
HOMES = torch.arange(EXPERTS) * RANKS // EXPERTS  # [E] id of the member that has each expert


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def wanted_weights(expert: int) -> torch.Tensor:  # what it is to learn
    return normal(expert, HIDDEN, HIDDEN) / HIDDEN**0.5


def batch(step: int, member: int, ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """That of any step can be made again: a step that did not complete on all members is repeated."""
    seed = EXPERTS + step * RANKS + member
    topk_idx = normal(seed, TOKENS, EXPERTS).topk(TOPK).indices
    topk_idx = torch.where(torch.isin(HOMES[topk_idx], torch.tensor(ids)), topk_idx, -1)  # experts whose home is there
    return normal(-seed, TOKENS, HIDDEN), topk_idx, torch.full((TOKENS, TOPK), 1 / TOPK)


def wanted_outputs(x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    gates = torch.zeros(TOKENS, EXPERTS + 1).scatter_add_(1, topk_idx % (EXPERTS + 1), weights)  # -1 in the last column
    return sum(gates[:, expert, None] * (x @ wanted_weights(expert)) for expert in range(EXPERTS))


class Experts:
    """Weights of this member's experts, before the last steps too, and their checkpoint."""

    def __init__(self, member: int, folder: pathlib.Path, device: torch.device) -> None:
        self.file, mine = folder / f"{member}.pt", [e for e in range(EXPERTS) if HOMES[e] == member]
        self.weights = torch.load(self.file) if self.file.exists() else {e: torch.zeros(HIDDEN, HIDDEN) for e in mine}
        self.weights = {expert: weight.to(device) for expert, weight in self.weights.items()}
        self.before: dict[int, dict[int, torch.Tensor]] = {}  # by step

    def begin(self, step: int) -> None:
        self.before[step] = {expert: weight.detach().clone() for expert, weight in self.weights.items()}
        self.before.pop(step - 2, None)  # members are one step apart at most
        self.weights = {expert: weight.detach().requires_grad_() for expert, weight in self.weights.items()}

    def learn(self) -> None:
        self.weights = {e: (weight - LEARNING_RATE * weight.grad).detach() for e, weight in self.weights.items()}

    def go_back(self, step: int) -> None:
        self.weights = self.before.get(step, self.weights)

    def save(self) -> None:
        torch.save({expert: weight.cpu() for expert, weight in self.weights.items()}, self.file.with_suffix(".new"))
        self.file.with_suffix(".new").replace(self.file)


class Layer:
    """The layer over the members of a view."""

    def __init__(self, members: ferry.Membership, experts: Experts, device: torch.device) -> None:
        self.ids, self.id = members.view.ids, members.view.ids[members.view.rank]
        self.group, self.experts = members.group(device=device), experts
        # No token goes to an expert whose home is gone, so any rank will do.
        self.expert_to_rank = [self.ids.index(home) if home in self.ids else 0 for home in HOMES.tolist()]

    def train(self, step: int, killed_at: Any) -> float:
        """Returns the loss."""
        given = batch(step, self.id, self.ids)
        x, topk_idx, weights, wanted = (tensor.to(self.group.device) for tensor in (*given, wanted_outputs(*given)))
        self.experts.begin(step)
        routing = self.group.route(
            topk_idx, weights, num_experts=EXPERTS, layout="experts", expert_to_rank=self.expert_to_rank
        )
        rows, _, row_weights = ferry.nn.dispatch(routing, x, weights)
        if self.id == LOST_ID and step == LOST_STEP and killed_at.value == 0:
            killed_at.value = time.monotonic()
            os.kill(os.getpid(), signal.SIGKILL)
        offsets = routing.expert_row_offsets
        parts = [
            rows[first:end] @ self.experts.weights[expert] * row_weights[first:end, None]
            for expert, first, end in zip(routing.local_expert_ids, offsets, offsets[1:])
            if expert in self.experts.weights  # others have no rows
        ]
        outputs = ferry.nn.combine(routing, torch.cat(parts))
        loss = (outputs - wanted).square().sum() / TOKENS
        loss.backward()
        self.group.wait()  # on GPUs it reports that a rank was lost
        self.experts.learn()
        return loss.item()


def run_steps(members: ferry.Membership, device: torch.device, killed_at: Any, folder: pathlib.Path) -> None:
    view, layer, began = members.view, None, time.monotonic()
    experts, loss = Experts(view.ids[view.rank], folder, device), 0.0
    step = view.num_complete_steps
    last_step = step + STEPS

    def tell(text: str) -> None:
        if view.rank == 0 and view.ids[0] != LOST_ID:
            print(f"step {step}, loss {loss:.4f}: {text}, after {1000 * (time.monotonic() - began):.1f} ms", flush=True)

    while step < last_step or view.num_ranks < RANKS:
        error = None
        try:
            if layer is None:
                layer = Layer(members, experts, device)
                tell(f"members {list(view.ids)} have a group")
            loss = layer.train(step, killed_at)
            step += 1
            members.complete_steps(step)
        except (ferry.PeerLost, ferry.Timeout, ferry.TransportError) as lost:
            error, layer, began = lost, None, killed_at.value
            tell(f"a call raised {type(lost).__name__}")
        if error is not None or step % STEPS_BETWEEN_VIEWS == 0:
            if not error:
                began = time.monotonic()
                experts.save()
            view = members.next_view(error)
            step = view.num_complete_steps  # all go on from there
            experts.go_back(step)
            if view.lost_ids or view.joined_ids:
                tell(f"lost {list(view.lost_ids)}, joined {list(view.joined_ids)}")
                layer, last_step = None, step + STEPS
    layer.group.destroy()
    if not loss < LEARNED:
        raise SystemExit(f"member {experts.file.stem}: the loss is {loss}, expected less than {LEARNED}")
    tell("the end")


def run_member(rank: int, secret: str, device: str, killed_at: Any, folder: pathlib.Path, addresses: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    members = ferry.Membership(dist.group.WORLD, secret=secret)
    dist.destroy_process_group()  # it was needed to find the others
    addresses.put(members.address)
    run_steps(members, device_of(rank, device), killed_at, folder)


def run_replacement(secret: str, device: str, killed_at: Any, folder: pathlib.Path, contacts: list[str]) -> None:
    members = ferry.Membership.join(contacts, secret=secret, id=LOST_ID)
    run_steps(members, device_of(LOST_ID, device), killed_at, folder)


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

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        processes = [start(run_member, rank, secret, device, killed_at, folder, addresses) for rank in range(RANKS)]
        contacts = [addresses.get() for _ in processes]
        lost = processes[LOST_ID]
        lost.join()
        if lost.exitcode != -signal.SIGKILL:
            raise SystemExit(f"member {LOST_ID} ended with {lost.exitcode}, expected {-signal.SIGKILL}")
        processes[LOST_ID] = start(run_replacement, secret, device, killed_at, folder, contacts)
        for process in processes:
            process.join(60)
    ends = [process.exitcode for process in processes]
    if ends != [0] * RANKS:
        raise SystemExit(f"processes ended with {ends}, expected 0 of each (None: not within 60 s)")
