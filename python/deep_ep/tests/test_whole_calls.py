"""Calls that the native module makes as a whole give what the same calls made step by step give, and common calls are
made as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from clients import Inputs, device_of, dispatch, inputs_of, layout_of, make_buffer, make_elastic
from ranks import run_ranks
from world import World, make_world

import deep_ep
from deep_ep._member import Member


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    kept = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


def step_by_step() -> Any:
    return replaced(Member, whole=None)


def as_a_whole() -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the call was made step by step")

    return replaced(Member, turn=refuse)


def finished(results: Any) -> Any:
    """Results of a call, whose event is waited for."""
    if isinstance(results, deep_ep.EventOverlap):
        results.current_stream_wait()
        return None
    if isinstance(results, (tuple, list)):
        return [finished(one) for one in results]
    return results


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert (left.shape, left.stride(), left.dtype, left.device) == (
            right.shape,
            right.stride(),
            right.dtype,
            right.device,
        )
        left, right = (one.clone(memory_format=torch.contiguous_format) for one in (left, right))
        assert left.view(torch.uint8).equal(right.view(torch.uint8))
    elif isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right):
            assert_same(one, other)
    else:
        assert left == right


def payloads(mine: Inputs) -> list[Any]:
    rows = mine.x.to(torch.float8_e4m3fn)
    scales = torch.rand(3, len(rows), device=rows.device).t()
    return [mine.x, mine.x.float(), (rows, scales), [rows, scales.contiguous()], (rows, scales[:, 0])]


def check_same(rank: int, world: World, device: str, num_worst_tokens: int, asynchronous: bool) -> None:
    buffer = make_buffer(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    layout = layout_of(buffer, mine.idx, world.num_experts)
    how = {"async_finish": asynchronous, "previous_event": buffer.capture() if asynchronous else None}

    def both(call: Callable[[], Any]) -> Any:
        whole = finished(call())
        with step_by_step():
            assert_same(whole, finished(call()))
        return whole

    both(lambda: buffer.get_dispatch_layout(mine.idx, world.num_experts, **how))
    new = {"num_worst_tokens": num_worst_tokens, "topk_idx": mine.idx, "topk_weights": mine.weights, **layout, **how}
    for x in payloads(mine):

        def valid_rows(x: Any = x) -> Any:
            """What rows without a token hold is not said."""
            rows, ids, weights, counts, handle, event = buffer.dispatch(x, expert_alignment=4, **new)
            event.current_stream_wait()
            count = int((handle[3] >= 0).sum())
            rows = rows[:count] if isinstance(rows, torch.Tensor) else tuple(part[:count] for part in rows)
            return rows, ids, weights[:count], counts, handle

        both(valid_rows)
    *_, handle, event = buffer.dispatch(mine.x, **new)
    event.current_stream_wait()
    count = int((handle[3] >= 0).sum())
    for x in payloads(mine):

        def again(x: Any = x) -> Any:
            rows, *others, event = buffer.dispatch(x, handle=handle, **how)
            event.current_stream_wait()
            rows = (rows,) if isinstance(rows, torch.Tensor) else rows
            return [part[:count] for part in rows], others

        both(again)
    y = torch.randn(len(handle[3]), mine.x.shape[1]).to(mine.x.device, torch.bfloat16)
    weights = torch.rand(len(y), mine.idx.shape[1], device=y.device)
    bias = torch.ones_like(mine.x)
    for given in ({}, {"topk_weights": weights}, {"bias": bias}, {"bias": [bias, bias * 2]}, {"bias": ()}):
        both(lambda given=given: buffer.combine(y, handle, **given, **how))
    both(lambda: buffer.combine(y, list(handle), **how))
    both(lambda: buffer.combine(torch.nn.Parameter(y), handle, topk_weights=torch.nn.Parameter(weights), **how))
    buffer.destroy()


@pytest.mark.parametrize("num_worst_tokens", [0, 64])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_same_results(num_worst_tokens: int, asynchronous: bool, device: str) -> None:
    run_ranks(3, check_same, make_world(3, 6, [7, 0, 4]), device, num_worst_tokens, asynchronous)


def check_same_elastic(rank: int, world: World, device: str, expand: bool, cpu_sync: bool, asynchronous: bool) -> None:
    buffer = make_elastic(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    how = {
        "async_with_compute_stream": asynchronous,
        "previous_event": buffer.capture() if asynchronous else None,
    }
    new = {"num_experts": world.num_experts, "do_cpu_sync": cpu_sync, "do_expand": expand, **how}
    x, _, weights, handle, event = buffer.dispatch(mine.x, mine.idx, mine.weights, **new)
    event.current_stream_wait()
    count = int((handle.recv_src_metadata[:, 0] >= 0).sum())

    def both(call: Callable[[], Any]) -> None:
        whole = finished(call())
        with step_by_step():
            assert_same(whole, finished(call()))

    def again(payload: Any, given: torch.Tensor | None) -> Any:
        rows, *others, same, event = buffer.dispatch(
            payload, handle=handle, topk_weights=given, do_zero_padding=True, **how
        )
        event.current_stream_wait()
        assert same is handle
        return rows, [None if one is None else one[:count] for one in others]

    for payload in payloads(mine):
        for given in (None, mine.weights):
            both(lambda payload=payload, given=given: again(payload, given))
    y = torch.randn(x.shape).to(mine.x.device, torch.bfloat16)
    for given in ({}, {"topk_weights": torch.rand_like(weights)}, {"bias": mine.x}, {"bias": [mine.x] * 2}):
        both(lambda given=given: buffer.combine(y, handle, **given, **how))
    buffer.destroy()


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("cpu_sync", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_same_results_of_the_second_generation(expand: bool, cpu_sync: bool, asynchronous: bool, device: str) -> None:
    run_ranks(2, check_same_elastic, make_world(2, 6, [7, 4]), device, expand, cpu_sync, asynchronous)


def fields_of(handle: deep_ep.EPHandle) -> list[Any]:
    """All but its routing."""
    return [value for name, value in sorted(vars(handle).items()) if name != "_routing"]


def check_same_new_elastic(
    rank: int, world: World, device: str, expand: bool, cpu_sync: bool, asynchronous: bool
) -> None:
    buffer = make_elastic(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    how = {
        "num_experts": world.num_experts,
        "do_cpu_sync": cpu_sync,
        "do_expand": expand,
        "async_with_compute_stream": asynchronous,
    }
    stats = torch.ones(world.num_local(rank), dtype=torch.int32, device=mine.x.device)

    def dispatch(x: Any, weights: torch.Tensor | None, **options: Any) -> Any:
        counted = stats.clone()
        rows, ids, weights, handle, event = buffer.dispatch(
            x,
            mine.idx,
            weights,
            cumulative_local_expert_recv_stats=counted,
            previous_event=buffer.capture() if asynchronous else None,  # behind what has made the tensors
            **options,
            **how,
        )
        event.current_stream_wait()
        assert handle._routing.group is buffer.runtime and handle._routing.is_bounded != cpu_sync
        assert (handle.topk_idx is mine.idx) == (options.get("do_handle_copy") is False)
        named = torch.arange(int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]))
        if expand:
            slots = handle.recv_src_metadata[:, 2:]
            named = slots[slots >= 0].long().sort().values
        rows = (rows,) if isinstance(rows, torch.Tensor) else rows
        # What rows without a token hold is not said.
        kept = [part[named.to(part.device)] for part in rows], [part.stride() for part in rows], ids
        return kept, None if weights is None else weights[named.to(weights.device)], counted, fields_of(handle)

    forms = (
        {},
        {"expert_alignment": 4, "do_handle_copy": False},
        {"use_tma_aligned_col_major_sf": True, "num_sms": 12},
        {"do_zero_padding": True, "num_max_tokens_per_rank": 9},
    )
    for payload in payloads(mine):
        for form in forms:
            for weights in (None, mine.weights):
                whole = finished(dispatch(payload, weights, **form))
                with step_by_step():
                    assert_same(whole, finished(dispatch(payload, weights, **form)))
    buffer.destroy()


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("cpu_sync", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_same_new_dispatches_of_the_second_generation(
    expand: bool, cpu_sync: bool, asynchronous: bool, device: str
) -> None:
    run_ranks(3, check_same_new_elastic, make_world(3, 6, [7, 0, 4]), device, expand, cpu_sync, asynchronous)


def check_whole_elastic(rank: int, world: World, device: str) -> None:
    buffer = make_elastic(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    rows, scales = mine.x.to(torch.float8_e4m3fn), torch.rand(len(mine.x), 3, device=mine.x.device)
    with as_a_whole():
        for waits in (True, False):
            x, _, _, handle, _ = buffer.dispatch(
                mine.x, mine.idx, mine.weights, num_experts=world.num_experts, do_cpu_sync=waits
            )
            buffer.combine(x, handle)
        x, _, _, handle, _ = buffer.dispatch(mine.x, mine.idx, num_experts=world.num_experts, expert_alignment=2)
        buffer.dispatch((rows, scales), handle=handle, use_tma_aligned_col_major_sf=True)
        x, _, weights, _, _ = buffer.dispatch(mine.x, handle=handle, topk_weights=mine.weights)
        finished(buffer.combine(x, handle, topk_weights=weights, async_with_compute_stream=True))
        for waits in (True, False):
            x, _, weights, handle, _ = buffer.dispatch(
                mine.x, mine.idx, mine.weights, num_experts=world.num_experts, do_expand=True, do_cpu_sync=waits
            )
            buffer.dispatch((rows, scales), handle=handle, do_expand=True, use_tma_aligned_col_major_sf=True)
            finished(buffer.combine(x, handle, topk_weights=weights, bias=mine.x, async_with_compute_stream=True))
    buffer.destroy()


def test_common_calls_of_the_second_generation_are_made_as_a_whole(device: str) -> None:
    run_ranks(2, check_whole_elastic, make_world(2, 6, [7, 5]), device)


def check_whole(rank: int, world: World, device: str) -> None:
    buffer = make_buffer(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    *_, exact, _ = dispatch(buffer, world, mine)
    with as_a_whole():
        layout = layout_of(buffer, mine.idx, world.num_experts)
        options = {"topk_idx": mine.idx, "topk_weights": mine.weights, **layout}
        x, _, weights, _, handle, _ = buffer.dispatch(mine.x, num_worst_tokens=32, **options)
        buffer.combine(x, handle, topk_weights=weights)
        x, *_, event = buffer.dispatch(mine.x, handle=exact, async_finish=True)
        event.current_stream_wait()
        finished(buffer.combine(x, exact, bias=mine.x, previous_event=buffer.capture(), async_finish=True))
        # Whether choices repeat, a CPU group does not know: it counts them in a step of its own.
        num_tokens, num_topk = mine.idx.shape
        spread = torch.arange(num_tokens * num_topk, device=mine.idx.device).view(num_tokens, num_topk)
        different = spread % world.num_experts
        layout = layout_of(buffer, different, world.num_experts)
        exact = {"topk_idx": different, "topk_weights": mine.weights, "expert_alignment": 4, **layout}
        whole = finished(buffer.dispatch(mine.x, **exact)) if device == "cuda" else None
    with step_by_step():
        one_by_one = finished(buffer.dispatch(mine.x, **exact))
    assert_same(whole or finished(buffer.dispatch(mine.x, **exact)), one_by_one)
    assert len(one_by_one[3]) == world.num_local(rank) and sum(one_by_one[3]) > 0
    buffer.destroy()


def test_common_calls_are_made_as_a_whole(device: str) -> None:
    run_ranks(2, check_whole, make_world(2, 6, [7, 5]), device)


def check_other_handles(rank: int, world: World, device: str) -> None:
    """Handles that are copies, or of a buffer that is gone or another one, work as those of this buffer do."""
    first, second = make_buffer(rank, device), make_buffer(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    x, *_, handle, _ = dispatch(first, world, mine)
    expected = first.combine(x, handle)[0]
    copied = tuple(tensor.clone() for tensor in handle)
    assert_same(first.combine(x, copied)[0], expected)
    assert_same(first.dispatch(mine.x, handle=tuple(tensor.clone() for tensor in handle))[0], x)
    assert_same(second.combine(x, handle)[0], expected)
    *_, other, _ = dispatch(first, world, mine)
    first.destroy()
    assert_same(second.dispatch(mine.x, handle=other)[0], x)
    assert_same(second.combine(x, other)[0], expected)
    with pytest.raises(ValueError, match="destroyed"):
        first.combine(x, other)
    with pytest.raises(ValueError, match="destroyed"):
        first.get_dispatch_layout(mine.idx, world.num_experts)
    second.destroy()


def test_other_handles(device: str) -> None:
    run_ranks(2, check_other_handles, make_world(2, 6, [7, 5]), device)


def check_compiled(rank: int, world: World) -> None:
    buffer, elastic = make_buffer(rank, "cpu"), make_elastic(rank, "cpu")
    mine = inputs_of(world, rank, torch.device("cpu"))

    def layer(x: torch.Tensor) -> torch.Tensor:
        rows, _, weights, _, handle, _ = dispatch(buffer, world, Inputs(x * 2, mine.idx, mine.weights))
        first = buffer.combine(rows + 1, handle, topk_weights=weights)[0] * 2
        rows, _, _, handle, _ = elastic.dispatch(first, mine.idx, mine.weights, num_experts=world.num_experts)
        return elastic.combine(rows + 1, handle)[0] * 2

    assert_same(torch.compile(layer, backend="eager")(mine.x), layer(mine.x))
    buffer.destroy()
    elastic.destroy()


def test_compiled_programs() -> None:
    run_ranks(2, check_compiled, make_world(2, 6, [7, 5]))
