"""EPBuffer: the signatures of release 2.5, deferred epilogues, and what is refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clients import assert_same, device_of, inputs_of, make_ep
from ranks import all_ranks, run_ranks
from world import World, make_world

import deep_ep
import ferry
import reference

BAD_RANK = 1

# Arguments of release 2.5: name, default.
NONE = inspect.Parameter.empty
CONSTRUCTOR = [
    ("group", NONE),
    ("num_bytes", None),
    ("num_max_tokens_per_rank", 0),
    ("hidden", 0),
    ("num_topk", 0),
    ("use_fp8_dispatch", False),
    ("lb_allocation_plan_or_num_bytes", 0),
    ("deterministic", False),
    ("allow_hybrid_mode", True),
    ("allow_multiple_reduction", True),
    ("prefer_overlap_with_compute", True),
    ("sl_idx", None),
    ("num_allocated_qps", 0),
    ("num_cpu_timeout_secs", 300),
    ("num_gpu_timeout_secs", 100),
    ("explicitly_destroy", False),
]
METHODS = {
    "dispatch": [
        ("x", NONE),
        ("topk_idx", None),
        ("topk_weights", None),
        ("cumulative_local_expert_recv_stats", None),
        ("num_experts", None),
        ("num_max_tokens_per_rank", None),
        ("expert_alignment", None),
        ("num_sms", 0),
        ("num_qps", 0),
        ("previous_event", None),
        ("async_with_compute_stream", False),
        ("allocate_on_comm_stream", False),
        ("handle", None),
        ("do_handle_copy", False),
        ("do_cpu_sync", None),
        ("do_expand", False),
        ("do_zero_padding", False),
        ("use_tma_aligned_col_major_sf", False),
        ("defer_epilogue", False),
    ],
    "combine": [
        ("x", NONE),
        ("handle", NONE),
        ("topk_weights", None),
        ("bias", None),
        ("num_sms", 0),
        ("num_qps", 0),
        ("previous_event", None),
        ("async_with_compute_stream", False),
        ("allocate_on_comm_stream", False),
        ("defer_epilogue", False),
    ],
    "get_buffer_size_hint": [
        ("group", NONE),
        ("num_max_tokens_per_rank", NONE),
        ("hidden", NONE),
        ("num_topk", 0),
        ("use_fp8_dispatch", False),
        ("allow_hybrid_mode", True),
        ("allow_multiple_reduction", True),
    ],
    "get_theoretical_num_sms": [
        ("num_experts", NONE),
        ("num_topk", NONE),
        ("num_scaleout_topk", 0),
        ("rdma_gbs", 0),
        ("nvlink_gbs", 0),
        ("sm_read_gbs", 0),
        ("sm_write_gbs", 0),
    ],
    "get_theoretical_num_qps": [("num_sms", NONE)],
    "barrier": [("wait_comm_stream", True), ("with_cpu_sync", False), ("sequential", True), ("context_idx", None)],
    "get_comm_stream": [],
    "get_physical_domain_size": [],
    "get_logical_domain_size": [("allow_hybrid_mode", None)],
    "capture": [],
    "destroy": [],
}


def positional(call: Any) -> list[tuple[str, Any]]:
    parameters = inspect.signature(call).parameters.values()
    return [
        (one.name, one.default)
        for one in parameters
        if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and one.name != "self"
    ]


def test_signatures() -> None:
    assert positional(deep_ep.EPBuffer) == CONSTRUCTOR
    assert {name: positional(getattr(deep_ep.EPBuffer, name)) for name in METHODS} == METHODS
    assert not hasattr(deep_ep.EPBuffer, "engram_write"), "calls of the second generation alone"
    assert not issubclass(deep_ep.EPBuffer, deep_ep.ElasticBuffer)


def slots_reversed(handle: deep_ep.EPHandle) -> torch.Tensor:
    """Metadata that names the expanded rows in the opposite order."""
    metadata = handle.recv_src_metadata.clone()
    slots = metadata[:, 2:]
    slots[slots >= 0] = handle.num_expanded_tokens - 1 - slots[slots >= 0]
    return metadata


def check_time_of_epilogue(rank: int, world: World, device: str) -> None:
    """The last part of a call is made at the wait: it reads what the handle's table says then."""
    buffer = make_ep(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    options = {"num_experts": world.num_experts, "do_expand": True}
    deferred = {"async_with_compute_stream": True, "defer_epilogue": True}
    x, _, _, handle, _ = buffer.dispatch(mine.x, mine.idx, **options)
    assert handle.topk_idx is mine.idx, "ids are kept, not copied"
    event = buffer.dispatch(mine.x, handle=handle, **deferred)
    handle.recv_src_metadata.copy_(slots_reversed(handle))
    rows, ids, weights, again = event.wait()
    assert torch.equal(rows, x.flip(0)) and ids is None and weights is None and again is handle
    assert event.wait() is None, "the results are those of the first wait"

    # Events are waited for in another order on each rank, since a wait makes no exchange.
    events = [buffer.dispatch(mine.x * scale, mine.idx, mine.weights, **options, **deferred) for scale in (1, 2, 4)]
    order = [0, 1, 2] if rank == 0 else [2, 0, 1]
    made = {at: events[at].current_stream_wait(release_handle=True) for at in order}
    for at in range(3):
        rows, _, _, handle = made[at]
        assert torch.equal(rows, x * 2**at) and isinstance(handle, deep_ep.EPHandle) and events[at].event is None
        combined = buffer.combine(rows, handle)[0]
        event = buffer.combine(rows, handle, **deferred)
        sums, weights = event.wait()
        assert weights is None
        assert_same(sums, combined)

    # Inputs may be dropped, and memory reused, before the wait.
    own = mine.x.clone()
    event = buffer.dispatch(own, mine.idx, **options, **deferred)
    del own
    pressure = torch.full_like(mine.x, -100.0)
    assert torch.equal(event.wait()[0], x)
    del pressure

    # A block's end waits, and drops the results.
    with buffer.dispatch(mine.x, mine.idx, **options, **deferred) as event:
        pass
    assert event.wait() is None
    for waits, on_host in ((True, False), (False, True)):
        buffer.barrier(wait_comm_stream=waits, with_cpu_sync=on_host)
    event = buffer.dispatch(mine.x, mine.idx, **options, **deferred)
    buffer.destroy()
    with pytest.raises(ferry.InvalidArgument, match="dispatch: the buffer was destroyed before the event was waited"):
        event.wait()


def test_epilogues_run_at_the_wait(device: str) -> None:
    run_ranks(2, check_time_of_epilogue, make_world(2, 6, [5, 8]), device)


def check_order_of_calls(rank: int, world: World, device: str) -> None:
    """A rank may wait before the others have made the next call, and after they are done with the buffer's calls."""
    buffer = make_ep(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    event = buffer.dispatch(
        mine.x, mine.idx, num_experts=world.num_experts, async_with_compute_stream=True, defer_epilogue=True
    )
    rows = event.wait()[0] if rank == 0 else None
    assert all_ranks(True)
    rows = event.wait()[0] if rows is None else rows
    assert torch.equal(rows.cpu(), reference.received_rows(world, rank))
    buffer.destroy()


def test_a_wait_needs_no_other_rank(device: str) -> None:
    run_ranks(3, check_order_of_calls, make_world(3, 6, [5, 4, 8]), device)


def check_refusals(rank: int, world: World) -> None:
    buffer = make_ep(rank, "cpu")
    mine = inputs_of(world, rank, torch.device("cpu"))
    good: dict[str, Any] = {"x": mine.x, "topk_idx": mine.idx, "num_experts": world.num_experts}
    x, _, _, handle, _ = buffer.dispatch(**good)
    bad = rank == BAD_RANK

    def refused(call: Any, error: type[Exception], match: str) -> None:
        with pytest.raises(error if bad else ferry.InvalidArgument, match=match if bad else None):
            call()

    for wrong, error, match in [
        ({"defer_epilogue": True}, ferry.InvalidArgument, "async_with_compute_stream False, expected both"),
        ({"do_handle_copy": True}, ferry.InvalidArgument, r"do_handle_copy is True, expected False.*topk_idx.clone"),
        ({"previous_event_before_epilogue": None}, TypeError, "unknown argument previous_event_before_epilogue"),
        ({"use_nvfp4": True}, NotImplementedError, "use_nvfp4"),
    ]:
        given = wrong if bad else {}
        refused(lambda given=given: buffer.dispatch(**good | given), error, match)
        if "do_handle_copy" not in wrong:
            refused(lambda given=given: buffer.combine(x, handle, **given), error, match)
    for name in ("lb_prefetch_weights", "lb_reduce_grads", "lb_get_theoretical_num_sms"):
        with pytest.raises(NotImplementedError, match=f"^{name} is not implemented: .*; copy the weights"):
            getattr(buffer, name)()
    with pytest.raises(ferry.InvalidArgument, match="context_idx is 1"):
        buffer.barrier(context_idx=1)
    for given in (1, 2 << 20, object(), None):
        with pytest.raises(NotImplementedError, match="EPBuffer: lb_allocation_plan_or_num_bytes is not implemented"):
            deep_ep.EPBuffer(dist.group.WORLD, num_bytes=2 << 20, lb_allocation_plan_or_num_bytes=given, device="cpu")
    with pytest.raises(TypeError, match="EPBuffer: unknown argument num_cpu_bytes"):
        deep_ep.EPBuffer(dist.group.WORLD, num_bytes=2 << 20, num_cpu_bytes=0, device="cpu")
    out = buffer.combine(reference.scaled(x, rank), handle)[0]
    assert torch.equal(out, reference.combined(world, rank, [])), "the buffer stays usable"
    assert deep_ep.comm.get_physical_domain_size(buffer) == deep_ep.get_logical_domain_size(buffer) == (1, 3)
    assert deep_ep.comm.get_comm_stream(buffer) is buffer.get_comm_stream()
    deep_ep.comm.barrier(buffer)
    buffer.destroy()


def test_refusals() -> None:
    run_ranks(3, check_refusals, make_world(3, 6, [5, 4, 8]))


@pytest.mark.parametrize(
    ("name", "what_to_do"),
    [
        ("BufferAllocator", "make tensors with torch"),
        ("BucketBuffer", "use the collectives of torch.distributed"),
        ("BucketSession", "use the collectives of torch.distributed"),
        ("EngramBuffer", "use torch.distributed"),
        ("PPBuffer", "use torch.distributed.send and recv"),
    ],
)
def test_classes_that_are_absent_can_be_imported_and_not_made(name: str, what_to_do: str) -> None:
    absent = getattr(deep_ep, name)
    assert inspect.isclass(absent) and not isinstance(1, absent)
    with pytest.raises(NotImplementedError, match=f"^deep_ep.{name} is not implemented: .*; {what_to_do}"):
        absent(1, key=2)


def test_alignments() -> None:
    made = deep_ep.get_num_allocation_alignment(), deep_ep.get_num_rdma_alignment(), deep_ep.get_num_tma_alignment()
    assert made == (2 << 20, 64, 32)
