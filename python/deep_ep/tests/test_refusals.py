"""Wrong arguments on one rank raise exceptions on every rank, and the buffer stays usable."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clients import dispatch, inputs_of, layout_of, make_buffer, make_elastic, make_ep
from network import skip_without_network
from ranks import run_ranks
from world import World, make_world

import deep_ep
import ferry
import reference
from deep_ep._steps import Steps

BAD_RANK = 1
CPU = torch.device("cpu")


class Refused:
    """Calls that are wrong on one rank."""

    def __init__(self, rank: int) -> None:
        self.bad = rank == BAD_RANK

    def __call__(self, call: Callable[[], Any], match: str) -> None:
        started = time.monotonic()
        with pytest.raises(ferry.InvalidArgument, match=match if self.bad else None):
            call()
        assert time.monotonic() - started < 5, "no rank may wait for one that has given up"

    def instead(self, wrong: Any, right: Any) -> Any:
        return wrong if self.bad else right


def check_legacy(rank: int, world: World) -> None:
    buffer = make_buffer(rank, "cpu")
    mine = inputs_of(world, rank, CPU)
    refused = Refused(rank)
    layout = layout_of(buffer, mine.idx, world.num_experts)
    good: dict[str, Any] = {"x": mine.x, "topk_idx": mine.idx, "topk_weights": mine.weights, **layout}
    x, _, weights, _, handle, _ = buffer.dispatch(**good)
    wrong_arguments = [
        ("topk_idx", mine.idx.to(torch.int32), "int64"),
        ("topk_idx", mine.idx.float(), "int64"),
        ("topk_idx", mine.idx[:, ::2], "shape|contiguous"),
        ("topk_idx", mine.idx[:-1], "shape"),
        ("topk_idx", mine.idx.to("meta"), "meta"),
        ("topk_idx", None, "both or neither"),
        ("topk_idx", mine.idx + world.num_experts, "expert"),
        ("topk_weights", mine.weights.double(), "float32"),
        ("topk_weights", mine.weights[:, :2], "shape"),
        ("topk_weights", None, "both or neither"),
        ("x", mine.x[:, ::2], "contiguous"),
        ("x", mine.x[:, :5].contiguous(), "16 bytes"),
        ("x", mine.x.to("meta"), "meta"),
        ("x", mine.x[0], r"\[T, H\]"),
        ("x", "x", "torch.Tensor"),
        ("x", (mine.x,), "tuple of 1"),
        ("x", (mine.x, mine.x), "scales"),
        ("x", (mine.x, mine.weights[:1]), "scales"),
        ("is_token_in_rank", None, "is_token_in_rank"),
        ("is_token_in_rank", layout["is_token_in_rank"][:, :2], "is_token_in_rank"),
        ("num_tokens_per_rank", None, "num_tokens_per_rank"),
        ("num_tokens_per_expert", layout["num_tokens_per_expert"][:-1], "multiple of 3"),
        ("expert_alignment", 0, "expert_alignment"),
        ("expert_alignment", 2**64, "expert_alignment"),
        ("num_worst_tokens", -1, "num_worst_tokens"),
        ("num_worst_tokens", 2**64, "num_worst_tokens"),
        ("num_worst_tokens", "all", "num_worst_tokens"),
        ("num_worst_tokens", torch.zeros(2), "num_worst_tokens"),
        ("previous_event", 3, "previous_event"),
        ("config", 24, "config is a int, expected a deep_ep.Config"),
        ("config", "fast", "config is a str"),
    ]
    for name, wrong, match in wrong_arguments:
        given = good | refused.instead({name: wrong}, {})
        refused(lambda given=given: buffer.dispatch(**given), match)
    for wrong, match in ((handle[:5], "5 elements"), ("handle", "str"), ((None,) * 6, "rank_prefix_matrix")):
        given = refused.instead(wrong, handle)
        refused(lambda given=given: buffer.dispatch(mine.x, handle=given), match)
        refused(lambda given=given: buffer.combine(x, given), match)
    refused(lambda: buffer.dispatch(mine.x[: len(mine.x) - refused.bad], handle=handle), "tokens")
    refused(
        lambda: buffer.dispatch(mine.x, handle=handle, topk_idx=refused.instead(mine.idx, None)),
        "together with a handle",
    )
    for wrong, match in ((x.float(), "bfloat16"), (x[:-1], "rows"), (x.to("meta"), "meta"), (None, "NoneType")):
        refused(lambda wrong=wrong: buffer.combine(refused.instead(wrong, x), handle), match)
    for wrong, match in ((weights.double(), "float32"), (weights[:, :2].contiguous(), "shape")):
        refused(lambda wrong=wrong: buffer.combine(x, handle, refused.instead(wrong, weights)), match)
    for wrong, match in ((mine.x.float(), "bfloat16"), ([mine.x] * 3, "at most two"), (mine.x[:-1], "shape")):
        refused(lambda wrong=wrong: buffer.combine(x, handle, bias=refused.instead(wrong, None)), match)

    config = refused.instead(24, None)
    refused(lambda: buffer.dispatch(mine.x, handle=handle, config=config), "config is a int")
    refused(lambda: buffer.combine(x, handle, config=config), "config is a int")

    # Local, so no other rank is affected.
    with pytest.raises(ferry.InvalidArgument, match="int64"):
        buffer.get_dispatch_layout(mine.idx.int(), world.num_experts)
    with pytest.raises(ferry.InvalidArgument, match="multiple of 3"):
        buffer.get_dispatch_layout(mine.idx, world.num_experts + 1)
    for wrong in (world.num_experts, -2):
        idx = mine.idx.clone()
        idx[1, 0] = wrong
        with pytest.raises(ferry.InvalidArgument, match=rf"layout: topk_idx\[1, 0\] is {wrong}, expected -1"):
            buffer.get_dispatch_layout(idx, world.num_experts)
    assert int(buffer.get_dispatch_layout(torch.full_like(mine.idx, -1), world.num_experts)[0].sum()) == 0

    # Too many rows for the bound; found by the library itself.
    with pytest.raises(ferry.CapacityExceeded):
        buffer.dispatch(**good | {"num_worst_tokens": 1})
    out = buffer.combine(reference.scaled(x, rank), handle)[0]
    assert torch.equal(out, reference.combined(world, rank, []))
    buffer.destroy()


def test_first_generation() -> None:
    run_ranks(3, check_legacy, make_world(3, 6, [5, 4, 8]))


def check_elastic(rank: int, world: World) -> None:
    buffer = make_elastic(rank, "cpu")
    mine = inputs_of(world, rank, CPU)
    refused = Refused(rank)
    good: dict[str, Any] = {"x": mine.x, "topk_idx": mine.idx, "num_experts": world.num_experts}
    x, _, _, handle, _ = buffer.dispatch(**good, do_expand=True)
    large = torch.zeros(33, 64, dtype=torch.bfloat16)
    wrong_arguments = [
        ({"topk_idx": mine.idx.to(torch.int32)}, "int64"),
        ({"topk_idx": None}, "topk_idx and handle"),
        ({"topk_weights": mine.weights.double()}, "float32"),
        ({"num_experts": None}, "num_experts"),
        ({"num_experts": 7}, "multiple of 3"),
        ({"x": large, "topk_idx": torch.zeros(33, 3, dtype=torch.int64)}, "at most 32"),
        ({"num_max_tokens_per_rank": 64}, "the buffer's"),
        ({"num_max_tokens_per_rank": "all"}, "num_max_tokens_per_rank is 'all'"),
        ({"num_experts": 3 * 2**64}, "num_experts"),
        ({"expert_alignment": 2**64}, "expert_alignment"),
        ({"num_sms": 2**31}, "num_sms"),
        ({"num_max_tokens_per_rank": 1}, "at most 1"),
        ({"expert_alignment": 0}, "expert_alignment"),
        ({"cumulative_local_expert_recv_stats": torch.zeros(2)}, "int32"),
        ({"x": mine.x.to("meta")}, "meta"),
        ({"previous_event_before_epilogue": "now"}, "previous_event_before_epilogue"),
    ]
    for wrong, match in wrong_arguments:
        refused(lambda wrong=wrong: buffer.dispatch(**good | refused.instead(wrong, {})), match)
    again: dict[str, Any] = {"x": mine.x, "handle": handle}
    compact = buffer.dispatch(**good)[3]
    wrong_arguments = [
        ({"topk_idx": mine.idx}, "topk_idx"),
        ({"num_experts": 12}, "num_experts is 12, expected the handle's 6"),
        ({"expert_alignment": 2}, "expert_alignment"),
        ({"do_cpu_sync": True}, "do_cpu_sync"),
        ({"cumulative_local_expert_recv_stats": torch.zeros(2, dtype=torch.int32)}, "stats"),
        ({"x": mine.x[:-1]}, "tokens"),
        ({"handle": (1, 2)}, "tuple"),
        ({"topk_weights": mine.weights[:, :1].contiguous()}, "topk_weights"),
    ]
    for wrong, match in wrong_arguments:
        refused(lambda wrong=wrong: buffer.dispatch(**again | refused.instead(wrong, {})), match)
    with pytest.raises(ferry.InvalidArgument, match="do_expand is True, expected the handle's False"):
        buffer.dispatch(mine.x, handle=compact, do_expand=True)
    refused(lambda: buffer.combine(refused.instead(x.float(), x), handle), "bfloat16")
    refused(lambda: buffer.combine(refused.instead(x[:1], x), handle), "names row")
    refused(lambda: buffer.combine(x, refused.instead(None, handle)), "NoneType")
    refused(lambda: buffer.combine(x, handle, refused.instead(torch.zeros(len(x), 3), None)), "topk_weights")
    metadata = handle.recv_src_metadata
    for wrong in (metadata.long(), metadata[:, 1:], metadata[:-1]):
        handle.recv_src_metadata = refused.instead(wrong, metadata)
        refused(lambda: buffer.combine(x, handle), "recv_src_metadata")
    handle.recv_src_metadata = metadata
    assert buffer.combine(x, handle)[0].shape == mine.x.shape
    buffer.destroy()


def test_second_generation() -> None:
    run_ranks(3, check_elastic, make_world(3, 6, [5, 4, 8]))


@contextmanager
def failing(step: str, fails: bool) -> Iterator[None]:
    """A step of native calls that raises on this rank, in the middle of the call."""
    made = getattr(Steps, step)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    if fails:
        setattr(Steps, step, fail)
    try:
        yield
    finally:
        setattr(Steps, step, made)


def check_failing_steps(rank: int, world: World, num_nodes: int) -> None:
    """A rank that fails between two collectives makes the others refuse the remaining ones, and all stay in step."""
    bad = rank == BAD_RANK
    buffer = make_buffer(rank, "cpu", ranks_per_node=world.num_ranks // num_nodes)
    mine = inputs_of(world, rank, CPU)
    expected = reference.received_rows(world, rank)
    steps = ["rows_to_gather", "counts_of"] + (["rail_inputs", "with_masks"] if num_nodes > 1 else [])
    for step in steps:
        with failing(step, bad), pytest.raises(ZeroDivisionError if bad else ferry.InvalidArgument):
            dispatch(buffer, world, mine)
        x, *_, handle, _ = dispatch(buffer, world, mine)
        assert torch.equal(x, expected)
    copies = tuple(tensor.clone() for tensor in handle)
    with failing("ids_of_mask", bad), pytest.raises(ZeroDivisionError if bad else ferry.InvalidArgument):
        buffer.dispatch(mine.x, handle=copies)
    weights = torch.ones(len(x), mine.idx.shape[1])
    with failing("padded_weights", bad), pytest.raises(ZeroDivisionError if bad else ferry.InvalidArgument):
        buffer.combine(x, copies, weights)
    assert torch.equal(buffer.dispatch(mine.x, handle=copies)[0], expected)
    buffer.destroy()

    elastic = make_elastic(rank, "cpu", ranks_per_node=world.num_ranks // num_nodes, allow_multiple_reduction=False)
    now = {"previous_event_before_epilogue": deep_ep.EventHandle()}
    new = {"num_experts": world.num_experts}
    with failing("wait", bad), pytest.raises(ZeroDivisionError if bad else ferry.InvalidArgument):
        elastic.dispatch(mine.x, mine.idx, **new, **now)
    x, _, _, handle, _ = elastic.dispatch(mine.x, mine.idx, **new, **now)
    assert torch.equal(x, expected)
    for given in (handle, pickle.loads(pickle.dumps(handle))):  # a copy is routed again
        with failing("wait", bad), pytest.raises(ZeroDivisionError if bad else ferry.InvalidArgument):
            elastic.dispatch(mine.x, handle=given, **now)
        with failing("wait", bad), pytest.raises(ZeroDivisionError if bad else ferry.InvalidArgument):
            elastic.combine(x, given, **now)
    assert torch.equal(elastic.dispatch(mine.x, handle=handle)[0], expected)
    elastic.destroy()


def test_a_call_that_fails_between_its_collectives() -> None:
    run_ranks(3, check_failing_steps, make_world(3, 6, [5, 4, 8]), 1)


def test_a_call_over_nodes_that_fails_between_its_collectives() -> None:
    skip_without_network()
    run_ranks(2, check_failing_steps, make_world(2, 6, [5, 4]), 2)


def check_unknown(rank: int, world: World) -> None:
    buffer, elastic = make_buffer(rank, "cpu", low_latency_mode=True), make_elastic(rank, "cpu")
    ep = make_ep(rank, "cpu")
    mine = inputs_of(world, rank, CPU)
    x, *_, handle, _ = dispatch(buffer, world, mine, use_nvfp4=False, x_global_scale=None)
    for name, value in (("use_nvfp4", True), ("x_global_scale", mine.weights), ("use_logfmt", True)):
        with pytest.raises((NotImplementedError, ferry.InvalidArgument), match=name if rank == BAD_RANK else None):
            buffer.dispatch(mine.x, handle=handle, **({name: value} if rank == BAD_RANK else {}))
    wrong = {"lanes": 4} if rank == BAD_RANK else {}
    for name, call in (
        ("dispatch", lambda: dispatch(buffer, world, mine, **wrong)),
        ("dispatch", lambda: buffer.dispatch(mine.x, handle=handle, **wrong)),
        ("combine", lambda: buffer.combine(x, handle, **wrong)),
        ("dispatch", lambda: elastic.dispatch(mine.x, mine.idx, num_experts=world.num_experts, **wrong)),
        ("dispatch", lambda: ep.dispatch(mine.x, mine.idx, num_experts=world.num_experts, **wrong)),
        ("low_latency_dispatch", lambda: buffer.low_latency_dispatch(mine.x, mine.idx, 8, world.num_experts, **wrong)),
    ):
        with pytest.raises((TypeError, ferry.InvalidArgument)) as raised:
            call()
        if rank == BAD_RANK:
            assert str(raised.value).startswith(f"{name}: unknown argument lanes;")
    for make in (deep_ep.Buffer, deep_ep.ElasticBuffer, deep_ep.EPBuffer):
        with pytest.raises(TypeError, match=f"^{make.__name__}: unknown argument lanes;"):
            make(dist.group.WORLD, device="cpu", lanes=4)
        with pytest.raises(NotImplementedError, match="use_nvfp4 is True"):
            make(dist.group.WORLD, device="cpu", use_nvfp4=True)
        with pytest.raises(TypeError):
            make(dist.group.WORLD, device="cpu", fp8=False)
    assert torch.equal(buffer.dispatch(mine.x, handle=handle, overlap=False, packed_recv_count=None)[0], x)
    with pytest.warns(UserWarning, match="Buffer: use_fabric has no effect") as warned:
        for _ in range(2):
            deep_ep.Buffer(dist.group.WORLD, device="cpu", use_fabric=True).destroy()
    assert len(warned) == 1 and warned[0].filename == __file__, "the warning names the program's line"
    for destroyed in (buffer, elastic, ep):
        destroyed.destroy()
        assert destroyed.runtime is None
    with pytest.raises(ferry.InvalidArgument, match="dispatch: the buffer was destroyed"):
        buffer.dispatch(mine.x, handle=handle)
    with pytest.raises(ferry.InvalidArgument, match="destroyed"):
        elastic.barrier()
    with pytest.raises(ferry.InvalidArgument, match="destroyed"):
        buffer.get_local_buffer_tensor(torch.uint8)


def test_unknown_arguments_and_destroyed_buffers() -> None:
    run_ranks(3, check_unknown, make_world(3, 6, [5, 4, 8]))


def test_devices_that_no_buffer_works_on() -> None:
    for device, error, match in (
        ("meta", ferry.Unsupported, "device is meta, expected cpu or cuda"),
        ("gpu", ferry.InvalidArgument, "device is 'gpu', expected cpu or cuda"),
        (1.5, ferry.InvalidArgument, "device is 1.5, expected cpu or cuda"),
    ):
        with pytest.raises(error, match=match):
            deep_ep.Buffer(object(), device=device)
        with pytest.raises(error, match=match):
            deep_ep.ElasticBuffer(object(), num_bytes=1, device=device)


def test_a_device_that_the_variable_names_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_DEVICE", "gpu")
    with pytest.raises(ferry.InvalidArgument, match=r"^the environment variable DEEP_EP_DEVICE is 'gpu', expected cpu"):
        deep_ep.Buffer(object())


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="is about machines without a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_where_there_is_none(device: str) -> None:
    with pytest.raises(ferry.Unsupported, match="but torch finds no GPU on this machine; use device='cpu'"):
        deep_ep.Buffer(object(), device=device)
