"""Groups of several nodes: ranks that share nothing but the network."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from network import skip_without_network
from ranks import device_of, run_ranks
from slabs import with_short_weights
from test_compile import check_layer as check_compiled_layer
from test_latency import check_results as check_latency
from test_nn import HIDDEN, check_layer
from world import World, make_world

import ferry

NUM_TOKENS = [7, 4]


@pytest.fixture(scope="module", autouse=True)
def _needs_a_network() -> None:
    skip_without_network()


def check_exchange(rank: int, kind: str) -> None:
    device = device_of(rank, kind)
    world = make_world(2, 6, NUM_TOKENS).to(device)
    group = ferry.Group(dist.group.WORLD, device=device, ranks_per_node=1, transport="auto")
    assert (group.num_ranks, group.ranks_per_node) == (2, 1)
    before = group.network_usage()
    assert before.transport == "ucx"
    assert [rail.rank for rail in before.rails] == [1 - rank]
    assert before.net_devices == ""  # both ranks are on this host
    assert before.ring_memory == "host"
    assert before.why_host_memory

    routing = group.route(world.topk_idx[rank], world.topk_weights[rank], num_experts=world.num_experts)
    x = world.x[rank]
    received = group.dispatch(routing, x)
    rows = world.rows_of(rank)
    expected = torch.stack([world.x[source][token] for source, token in rows])
    assert torch.equal(received.x, expected)
    sums = group.combine(routing, received.x).x
    # Each node returns the token unchanged, and twice a token is exact.
    factors = [len(world.ranks_of(rank, token)) for token in range(len(x))]
    assert torch.equal(sums, x * torch.tensor(factors, dtype=x.dtype, device=device)[:, None])

    group.wait()
    sent = group.network_usage().sent_bytes - before.sent_bytes
    num_rows_out = sum(1 - rank in world.ranks_of(rank, token) for token in range(len(x)))
    num_rows_back = sum(rank in world.ranks_of(1 - rank, token) for token in range(NUM_TOKENS[1 - rank]))
    assert sent >= (num_rows_out + num_rows_back) * x.shape[1] * x.element_size()
    group.destroy()


def test_two_nodes_exchange_over_the_network(device: str) -> None:
    run_ranks(2, check_exchange, device)


@pytest.mark.parametrize("alignment", [1, 4])
def test_gradients_over_two_nodes(alignment: int, device: str) -> None:
    world = make_world(4, 7, [6, 0, 9, 3], hidden=HIDDEN, dtype=torch.float32)
    run_ranks(4, check_layer, world, alignment, device, 2)


def test_a_compiled_layer_over_two_nodes(device: str) -> None:
    world = make_world(2, 6, [7, 5], hidden=HIDDEN, dtype=torch.float32)
    run_ranks(2, check_compiled_layer, world, 64, "aot_eager", device, 1)


def check_replays(rank: int, world: World) -> None:
    device = device_of(rank, "cuda")
    mine = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device, ranks_per_node=1)
    routing = group.route(mine.topk_idx[rank], num_experts=world.num_experts)
    x = torch.zeros_like(mine.x[rank])
    group.combine(routing, group.dispatch(routing, x).x)  # one-time setup of the first calls
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        received = group.dispatch(routing, x)
        combined = group.combine(routing, received.x)
    expected = torch.stack([mine.x[source][token] for source, token in world.rows_of(rank)])
    factors = torch.tensor([len(world.ranks_of(rank, token)) for token in range(len(x))], device=device)
    for scale in (1, 2):
        x.copy_(mine.x[rank] * scale)
        graph.replay()
        group.wait()
        assert torch.equal(received.x, expected * scale)
        assert torch.equal(combined.x.float(), x.float() * factors.unsqueeze(1))
    group.destroy()


def check_routes_anew(rank: int, worlds: list[World]) -> None:
    device = device_of(rank, "cuda")
    group = ferry.Group(dist.group.WORLD, device=device, ranks_per_node=1)
    idx, x = worlds[0].topk_idx[rank].to(device), worlds[0].x[rank].to(device)
    most = max(NUM_TOKENS)

    def layer() -> tuple[ferry.Routing, ferry.Received, ferry.Combined]:
        routing = group.route(idx, num_experts=worlds[0].num_experts, max_recv_rows=2 * most, max_tokens=most)
        received = group.dispatch(routing, x)
        return routing, received, group.combine(routing, received.x)

    layer()  # one-time setup of the first calls
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, received, combined = layer()
    for world in worlds:
        idx.copy_(world.topk_idx[rank])
        x.copy_(world.x[rank])
        graph.replay()
        group.wait()
        expected = torch.stack([world.x[source][token] for source, token in world.rows_of(rank)])
        assert torch.equal(received.x[: len(expected)].cpu(), expected)
        factors = torch.tensor([len(world.ranks_of(rank, token)) for token in range(len(x))], device=device)
        assert torch.equal(combined.x.float(), x.float() * factors.unsqueeze(1))
    group.destroy()


needs_gpu = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")


@needs_gpu
def test_a_graph_replays_over_two_nodes() -> None:
    run_ranks(2, check_replays, make_world(2, 6, NUM_TOKENS))


@needs_gpu
def test_a_graph_routes_anew_over_two_nodes() -> None:
    run_ranks(2, check_routes_anew, [make_world(2, 6, NUM_TOKENS, seed=seed) for seed in (0, 1)])


def check_one_node(rank: int) -> None:
    group = ferry.Group(dist.group.WORLD)
    assert group.ranks_per_node == 2
    assert group.network_usage() == ferry.NetworkUsage("", ())
    group.destroy()


def test_one_node_sends_nothing() -> None:
    run_ranks(2, check_one_node)


def check_refusals(rank: int) -> None:
    with pytest.raises(ferry.InvalidArgument, match="ranks_per_node"):
        ferry.Group(dist.group.WORLD, ranks_per_node=3)
    with pytest.raises(ferry.InvalidArgument, match="transport"):
        ferry.Group(dist.group.WORLD, ranks_per_node=1, transport="pigeon")
    wrong_device = r"net_devices= of ferry\.Group is \"nonesuch0\".*this host has .*lo \("
    with pytest.raises(ferry.InvalidArgument, match=wrong_device):
        ferry.Group(dist.group.WORLD, ranks_per_node=1, net_devices="nonesuch0")
    with pytest.raises(ferry.Unsupported, match=r'ring_memory= of ferry\.Group is "gpu"'):
        ferry.Group(dist.group.WORLD, ranks_per_node=1, ring_memory="gpu")


def test_refusals() -> None:
    run_ranks(2, check_refusals)


def test_latency_mode(device: str) -> None:
    world = with_short_weights(make_world(3, 7, [5, 0, 9], hidden=272))
    run_ranks(3, check_latency, world, 9, device, 1)
