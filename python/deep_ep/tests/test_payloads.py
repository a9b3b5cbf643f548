"""Payloads of all forms, by calls of both generations, of every kind; handles of other buffers; compiled programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clients import Inputs, assert_same, device_of, dispatch, inputs_of, make_buffer, make_elastic
from ranks import run_ranks
from world import World, make_world

import deep_ep
import reference


def payloads(world: World, rank: int, device: torch.device) -> list[Any]:
    """Payloads that any rank makes alike for ``rank``."""
    x = world.x[rank].to(device)
    rows = x.to(torch.float8_e4m3fn)
    generator = torch.Generator().manual_seed(rank)
    scales = torch.rand(3, len(x), generator=generator).to(device).t()
    return [x, x.float(), (rows, scales), [rows, scales.contiguous()], (rows, scales[:, 0])]


def parts_of(payload: Any) -> list[torch.Tensor]:
    return [payload] if isinstance(payload, torch.Tensor) else list(payload)


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """[T, bytes of a row]"""
    table = rows if rows.dim() == 2 else rows.unsqueeze(1)
    return table.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def expected_parts(world: World, which: int, sources: list[tuple[int, int]], device: torch.device) -> list[Any]:
    """Rows and scales of a payload, as bytes, of tokens (source rank, token)."""
    sent = [
        [as_bytes(part) for part in parts_of(payloads(world, rank, device)[which])] for rank in range(world.num_ranks)
    ]
    return [[sent[source][part][token] for source, token in sources] for part in range(len(sent[0]))]


def check_parts(received: Any, world: World, which: int, sources: list[tuple[int, int]], device: torch.device) -> None:
    """The first received rows are those of the tokens; the others may hold anything."""
    payload = payloads(world, 0, device)[which]
    assert isinstance(received, torch.Tensor) == isinstance(payload, torch.Tensor)
    expected = expected_parts(world, which, sources, device)
    for part, sent, rows in zip(parts_of(received), parts_of(payload), expected, strict=True):
        assert (part.dtype, part.device, part.dim()) == (sent.dtype, sent.device, sent.dim())
        assert part.is_contiguous() and part.shape[1:] == sent.shape[1:]
        found = as_bytes(part[: len(rows)])
        assert torch.equal(found, torch.stack(rows) if rows else found)


def finished(results: tuple) -> tuple:
    """Results of a call, whose event is waited for."""
    next(one for one in results if isinstance(one, deep_ep.EventOverlap)).current_stream_wait()
    return results


def check_legacy(rank: int, world: World, device: str, num_worst_tokens: int, asynchronous: bool) -> None:
    buffer = make_buffer(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    on = mine.x.device

    def how() -> dict[str, Any]:
        return {"async_finish": asynchronous, "previous_event": buffer.capture() if asynchronous else None}

    layout = finished(buffer.get_dispatch_layout(mine.idx, world.num_experts, **how()))
    assert torch.equal(layout[3].cpu(), reference.in_rank(world, rank))
    assert layout[2].tolist() == reference.choices_per_expert(world, rank)
    assert (layout[-1].event is not None) == asynchronous
    given = {
        "topk_idx": mine.idx,
        "topk_weights": mine.weights,
        "num_tokens_per_rank": layout[0],
        "is_token_in_rank": layout[3],
        "num_tokens_per_expert": layout[2],
        "num_worst_tokens": num_worst_tokens,
    }
    sources = world.rows_of(rank)
    num_rows = num_worst_tokens or len(sources)
    aligned = [reference.align(count, 4) for count in reference.entries_per_local_expert(world, rank)]
    for which, x in enumerate(payloads(world, rank, on)):
        rows, ids, weights, counts, handle, event = finished(buffer.dispatch(x, expert_alignment=4, **given, **how()))
        assert (event.event is not None) == asynchronous
        check_parts(rows, world, which, sources, on)
        assert ids[: len(sources)].tolist() == reference.received_ids(world, rank)
        assert torch.equal(weights[: len(sources)].cpu(), reference.received_weights(world, rank))
        assert (len(ids), len(handle[3])) == (num_rows, num_rows)
        assert counts == ([] if num_worst_tokens else aligned)
    for which, x in enumerate(payloads(world, rank, on)):
        rows, *others, event = finished(buffer.dispatch(x, handle=handle, **how()))
        assert others == [None] * 4
        check_parts(rows, world, which, sources, on)
    y = torch.zeros(num_rows, mine.x.shape[1], dtype=torch.bfloat16, device=on)
    y[: len(sources)] = reference.scaled(reference.received_rows(world, rank), rank).to(on)
    returned = torch.zeros(num_rows, mine.idx.shape[1], device=on)
    returned[: len(sources)] = reference.received_weights(world, rank).to(on)
    bias = torch.ones_like(mine.x)
    named = torch.where(mine.idx >= 0, mine.weights, 0.0)
    for options, biases in (
        ({}, []),
        ({"topk_weights": returned}, []),
        ({"bias": bias}, [bias]),
        ({"bias": [bias, bias * 2]}, [bias, bias * 2]),
        ({"bias": ()}, []),
    ):
        for same in (handle, list(handle)):
            out, sums, _ = finished(buffer.combine(y, same, **options, **how()))
            assert torch.equal(out.cpu(), reference.combined(world, rank, [one.cpu() for one in biases]))
            assert sums is None if "topk_weights" not in options else torch.equal(sums, named)
    parameters = {"topk_weights": torch.nn.Parameter(returned)}
    out, sums, _ = finished(buffer.combine(torch.nn.Parameter(y), handle, **parameters, **how()))
    assert torch.equal(out.cpu(), reference.combined(world, rank, [])) and torch.equal(sums, named)
    assert not out.requires_grad and not sums.requires_grad
    buffer.destroy()


@pytest.mark.parametrize("num_worst_tokens", [0, 64])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_first_generation(num_worst_tokens: int, asynchronous: bool, device: str) -> None:
    run_ranks(3, check_legacy, make_world(3, 6, [7, 0, 4]), device, num_worst_tokens, asynchronous)


def check_elastic(rank: int, world: World, device: str, expand: bool, cpu_sync: bool, asynchronous: bool) -> None:
    buffer = make_elastic(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    on = mine.x.device

    def how() -> dict[str, Any]:
        return {
            "async_with_compute_stream": asynchronous,
            "previous_event": buffer.capture() if asynchronous else None,
        }

    new = {"num_experts": world.num_experts, "do_cpu_sync": cpu_sync, "do_expand": expand}
    stats = torch.ones(world.num_local(rank), dtype=torch.int32, device=on)
    by_expert = [len(world.rows_of_expert(world.first_expert(rank) + e)) for e in range(world.num_local(rank))]

    def check_rows(rows: Any, weights: torch.Tensor | None, given: torch.Tensor | None, which: int, form: dict) -> None:
        alignment = form.get("expert_alignment", 1)
        column_major = form.get("use_tma_aligned_col_major_sf", False)
        expanded = reference.Expanded(world, rank, alignment)
        sources = world.rows_of(rank)
        places = [(row, key[:2]) for row, key in sorted(expanded.rows.items())] if expand else list(enumerate(sources))
        expected = expected_parts(world, which, [source for _, source in places], on)
        for position, (part, wanted) in enumerate(zip(parts_of(rows), expected, strict=True)):
            if position == 1:
                assert part.dim() == 2
                num_rows = part.shape[0]
                strides = (1, max(reference.align(num_rows, 4), 1)) if column_major else (part.shape[1], 1)
                assert num_rows == 0 or 1 in part.shape or part.stride() == strides
            found = as_bytes(part)[[row for row, _ in places]]
            assert torch.equal(found, torch.stack(wanted) if wanted else found)
        assert (weights is None) == (given is None)
        if weights is not None and not expand:
            assert torch.equal(weights[: len(sources)].cpu(), reference.received_weights(world, rank))

    forms: tuple[dict[str, Any], ...] = (
        {},
        {"expert_alignment": 4, "do_handle_copy": False},
        {"use_tma_aligned_col_major_sf": True, "num_sms": 12},
        {"do_zero_padding": True, "num_max_tokens_per_rank": 9},
    )
    for which, x in enumerate(payloads(world, rank, on)):
        for form in forms:
            for given in (None, mine.weights):
                counted = stats.clone()
                rows, ids, weights, handle, event = finished(
                    buffer.dispatch(
                        x, mine.idx, given, cumulative_local_expert_recv_stats=counted, **new, **form, **how()
                    )
                )
                assert (event.event is not None) == asynchronous
                check_rows(rows, weights, given, which, form)
                assert torch.equal(counted - stats, torch.tensor(by_expert, dtype=torch.int32, device=on))
                assert (ids is None) == expand
                assert (handle.topk_idx is mine.idx) == (form.get("do_handle_copy") is False)
                assert torch.equal(handle.topk_idx, mine.idx)
                assert handle.num_sms == form.get("num_sms", buffer.get_theoretical_num_sms(6, 3))
                assert handle.num_max_tokens_per_rank == form.get("num_max_tokens_per_rank", 32)
                assert handle.num_recv_tokens == (
                    len(world.rows_of(rank)) if cpu_sync else world.num_ranks * handle.num_max_tokens_per_rank
                )
    for which, x in enumerate(payloads(world, rank, on)):
        for given in (None, mine.weights):
            rows, ids, weights, same, event = finished(
                buffer.dispatch(x, handle=handle, topk_weights=given, do_zero_padding=True, **how())
            )
            assert same is handle and (ids is None) == expand and (event.event is not None) == asynchronous
            check_rows(rows, weights, given, which, {})
    rows, _, weights, *_ = finished(buffer.dispatch(mine.x, handle=handle, topk_weights=mine.weights, **how()))
    y = torch.zeros_like(rows)
    if not expand:
        y[: len(world.rows_of(rank))] = reference.scaled(reference.received_rows(world, rank), rank).to(on)
    bias = torch.ones_like(mine.x)
    named = torch.where(mine.idx >= 0, mine.weights, 0.0)
    for options, biases in (
        ({}, []),
        ({"topk_weights": weights}, []),
        ({"bias": bias}, [bias]),
        ({"bias": [bias] * 2}, [bias] * 2),
    ):
        out, sums, _ = finished(buffer.combine(y, handle, **options, **how()))
        if not expand:
            assert torch.equal(out.cpu(), reference.combined(world, rank, [one.cpu() for one in biases]))
            assert sums is None if "topk_weights" not in options else torch.equal(sums, named)
    buffer.destroy()


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("cpu_sync", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_second_generation(expand: bool, cpu_sync: bool, asynchronous: bool, device: str) -> None:
    run_ranks(3, check_elastic, make_world(3, 6, [7, 0, 4]), device, expand, cpu_sync, asynchronous)


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
