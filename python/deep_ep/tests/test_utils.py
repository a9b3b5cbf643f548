"""Utilities that measuring and checking programs import, and that they agree with the calls."""

from __future__ import annotations

import contextlib
import math
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from clients import make_elastic
from network import skip_without_network
from ranks import device_of, run_ranks

import deep_ep
from deep_ep.utils import envs, refs, testing
from deep_ep.utils.gate import get_unbalanced_scores
from deep_ep.utils.math import (
    align,
    calc_diff,
    ceil_div,
    count_bytes,
    hash_tensor,
    hash_tensors,
    inplace_unique,
    per_token_cast_back,
    per_token_cast_to_fp8,
    safe_div,
)
from deep_ep.utils.testing import bench, bench_kineto

HIDDEN, TOPK, EXPERTS, MOST = 256, 3, 8, 16


def test_importing_starts_nothing() -> None:
    modules = " ".join(f"import deep_ep.utils.{name};" for name in ("envs", "gate", "math", "refs", "testing"))
    program = f"{modules} import torch; assert not torch.cuda.is_initialized()"
    end = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (end.returncode, end.stdout, end.stderr) == (0, "", "")


def test_whole_numbers() -> None:
    assert [align(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert (safe_div(3, 2), safe_div(3, 0)) == (1.5, 0)


def test_bytes_of_tensors_in_tuples() -> None:
    table = torch.zeros(3, 4)
    assert count_bytes() == count_bytes(None) == 0
    assert count_bytes(table, None, (table.to(torch.bfloat16), [table])) == 48 + 24 + 48


@pytest.mark.starts_cuda
def test_numbers_of_equal_bytes_are_equal(device: str) -> None:
    words = torch.tensor([1, -2, 3, 1 << 30, 1 << 30, 1 << 30], dtype=torch.int32, device=device)
    assert hash_tensor(words) == 2 + 3 * (1 << 30), "no overflow of 32 bits"
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64, torch.bool):
        x = torch.randint(0, 2, (5, 7), device=device).to(dtype)
        x[3, 4] = 1
        number = hash_tensor(x)
        assert type(number) is int
        assert number == hash_tensor(x.clone()) == hash_tensor(x.t().contiguous().t())
        changed = x.clone()
        changed[3, 4] = 0
        assert hash_tensor(changed) != number
    # Rows that begin in the middle of a word, and values that compare equal but have other bits.
    odd = torch.arange(8, device=device).to(torch.bfloat16)
    assert hash_tensor(odd[1:]) == hash_tensor(odd[1:].clone())
    assert hash_tensor(torch.zeros(2, device=device)) != hash_tensor(-torch.zeros(1, device=device))
    assert hash_tensor(torch.tensor(3, dtype=torch.int16, device=device)) == 3
    assert hash_tensor(odd[:0]) == 0


def test_numbers_of_several_tensors() -> None:
    x, y = torch.tensor([5], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    assert hash_tensors() == hash_tensors(None, 7, "x") == 0
    assert hash_tensors(x, None, (y, [x, x])) == hash_tensors(y, x) == 5 ^ 3
    assert hash_tensors((x, y), x) == hash_tensors(y)


def test_difference() -> None:
    x = torch.randn(20, 30)
    assert abs(calc_diff(x, x)) < 1e-12
    assert 0 < calc_diff(x, x + 1e-3) < 1e-5 < calc_diff(x, -x)
    assert calc_diff(x[:0], x[:0]) == 0
    assert calc_diff(torch.zeros(2), torch.zeros(2)) == 0


def test_unique_values_of_rows() -> None:
    x = torch.tensor([[3, 0, 3, -1], [1, 1, 1, 1], [-1, -1, -1, -1], [0, 1, 2, 3]])
    inplace_unique(x, 4)
    assert x.tolist() == [[3, 0, -1, -1], [1, -1, -1, -1], [-1, -1, -1, -1], [3, 2, 1, 0]]
    inplace_unique(x[:0], 4)


@pytest.mark.parametrize("shape", [(5, 256), (4, 200), (0, 128)])
def test_fp8_rows_and_back(shape: tuple[int, int]) -> None:
    x = (torch.randn(shape) * 100).to(torch.bfloat16)
    x[: len(x) // 2] = 0
    rows, scales = per_token_cast_to_fp8(x)
    assert (rows.dtype, rows.shape, rows.is_contiguous()) == (torch.float8_e4m3fn, x.shape, True)
    assert (scales.dtype, scales.shape) == (torch.float32, (shape[0], ceil_div(shape[1], 128)))
    for strided in (scales, scales.t().contiguous().t()):
        back = per_token_cast_back(rows, strided)
        assert back.dtype == torch.bfloat16
        torch.testing.assert_close(back.float(), x.float(), rtol=0.07, atol=0.5)


def test_scales_that_are_packed_exponents() -> None:
    rows = torch.ones(2, 512).to(torch.float8_e4m3fn)
    packed = torch.tensor([[127, 128, 126, 130], [127, 127, 127, 254]], dtype=torch.uint8).view(torch.int32)
    back = per_token_cast_back(rows, packed)
    assert back[:, ::128].tolist() == [[1, 2, 0.5, 8], [1, 1, 1, 2.0**127]]


@pytest.mark.parametrize(("ratio", "choices"), [(0.5, 75), (1.0, 150), (2.0, 300), (9.0, 400)])
def test_scores_load_the_first_rank(monkeypatch: pytest.MonkeyPatch, ratio: float, choices: int) -> None:
    monkeypatch.setenv("DEEP_EP_DEVICE", "cpu")
    torch.manual_seed(0)
    for precise in (True, False):
        scores = get_unbalanced_scores(100, 16, 4, 6, ratio, precise)
        assert (scores.dtype, scores.shape) == (torch.float32, (100, 16))
        taken = int((scores.topk(6)[1] < 4).sum())
        assert taken == choices if precise else abs(taken - choices) < 40
    assert get_unbalanced_scores(0, 16, 4, 6, ratio).shape == (0, 16)


def test_printing_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for local_rank in (0, 1):
        monkeypatch.setattr(envs, "_local_rank", local_rank)
        envs.dist_print("all", local_rank)
        envs.dist_print("first", local_rank, once_in_node=True)
    assert capsys.readouterr().out == "all 0\nfirst 0\nall 1\n"


def test_seeds() -> None:
    drawn = []
    for seed in (1, 1, 2):
        envs.init_seed(seed)
        drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1] != drawn[2]


def test_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    calls: list[str] = []
    mean, least, most = bench(lambda: calls.append("call"), 2, 3, lambda: calls.append("after"))
    assert 0 <= least <= mean <= most
    assert calls == ["call"] * 2 + ["call", "after"] * 3
    calls.clear()
    options = {"num_tests": 4, "barrier_comm_profiling": True, "barrier": lambda: calls.append("barrier")}
    first, other = bench_kineto(lambda: calls.append("call"), ("a_kernel", "another"), **options)
    assert first >= 0
    assert math.isnan(other)
    assert calls.count("barrier") == 1
    assert isinstance(bench_kineto(lambda: None, "a_kernel"), float)
    (first, nothing), other = bench_kineto(lambda: None, ("a_kernel", "another"), num_kernels_per_period=2)
    assert first >= 0
    assert all(math.isnan(one) for one in (nothing, *other))


def test_times_of_several_kernels_with_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def profile(trace_path: str | None) -> Iterator[list[tuple[str, float]]]:
        assert trace_path is None
        kernels: list[tuple[str, float]] = []
        yield kernels
        kernels.extend([("x::dispatch<1>", 1.0), ("x::gate", 9.0), ("x::dispatch<1>", 4.0), ("x::combine", 2.0)] * 3)

    monkeypatch.setattr(testing, "_profile", profile)
    names = ("dispatch", "combine", "cast")

    def times(num_kernels_per_period: int) -> list[list[float | None]]:
        result = bench_kineto(lambda: None, names, num_tests=3, num_kernels_per_period=num_kernels_per_period)
        lists = [one if isinstance(one, list) else [one] for one in result]
        return [[None if math.isnan(one) else one for one in of_name] for of_name in lists]

    assert times(1) == [[5.0], [2.0], [None]]
    assert times(2) == [[1.0, 4.0], [2.0, None], [None, None]]


def test_data_to_combine_is_that_of_its_token() -> None:
    tokens = torch.tensor([5, 700, 5], dtype=torch.int32)
    values = refs.generate_pre_combine_data(tokens, 512, TOPK, HIDDEN)
    assert (values.dtype, values.shape) == (torch.bfloat16, (3, TOPK, HIDDEN))
    assert torch.equal(values[0], values[2])
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(values[:, 0], values[:, 1])
    exact = values.double().sum(dim=1)
    assert torch.equal(values.float().sum(dim=1).double(), exact)
    assert torch.equal(refs.ordered_accumulate(values), exact.to(torch.bfloat16))


def agrees_with_refs(rank: int, kind: str, fp8: bool, multiple: bool, ranks_per_node: int = 0) -> None:
    device = device_of(rank, kind)
    envs.init_seed(7)
    buffer = make_elastic(
        rank,
        kind,
        num_max_tokens_per_rank=MOST,
        hidden=HIDDEN,
        allow_multiple_reduction=multiple,
        ranks_per_node=ranks_per_node,
    )
    domains = buffer.get_logical_domain_size()
    in_node = multiple and domains[0] > 1
    num_tokens = MOST - 3 * rank
    plain = torch.randn(num_tokens, HIDDEN, device=device).to(torch.bfloat16)
    x = per_token_cast_to_fp8(plain) if fp8 else plain
    weights, idx = torch.rand(num_tokens, EXPERTS, device=device).topk(TOPK)
    idx[torch.rand(idx.shape, device=device) < 0.2] = -1
    weights[idx < 0] = 0
    # The reference uses the default group, with host tensors.
    on_host = tuple(part.cpu() for part in x) if fp8 else x.cpu()
    rows, local_idx, recv_weights, source, counts = refs.dispatch(on_host, idx.cpu(), weights.cpu(), MOST, EXPERTS)
    num_rows = sum(counts)

    got, got_idx, got_weights, handle, _ = buffer.dispatch(x, idx, weights, num_experts=EXPERTS)
    for mine, theirs in zip(got if fp8 else (got,), rows if fp8 else (rows,), strict=True):
        assert torch.equal(mine.cpu().view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(got_idx.cpu(), local_idx)
    assert torch.equal(got_weights.cpu(), recv_weights)
    assert torch.equal(handle.recv_src_metadata[:, 0].cpu(), source)
    assert handle.psum_num_recv_tokens_per_scaleup_rank.cpu().diff(prepend=torch.tensor([0])).tolist() == counts

    biases = tuple(torch.randn(num_tokens, HIDDEN, device=device).to(torch.bfloat16) for _ in range(2))
    own = rank * MOST + torch.arange(num_tokens, device=device)
    y = refs.generate_pre_combine_data(own, MOST, TOPK, HIDDEN)
    wanted = refs.combine(y, idx, *domains, EXPERTS, biases, round_in_rank=True, round_in_scaleup=in_node)
    here = refs.generate_pre_combine_data(handle.recv_src_metadata[:, 0], MOST, TOPK, HIDDEN)
    here[got_idx < 0] = 0
    summed, weight_sums, _ = buffer.combine(refs.ordered_accumulate(here), handle, got_weights, biases)
    assert torch.equal(summed, wanted)
    assert torch.equal(weight_sums, weights)

    _, _, _, expanded, _ = buffer.dispatch(x, idx, weights, num_experts=EXPERTS, do_expand=True)
    wanted = refs.combine(y, idx, *domains, EXPERTS, biases, round_in_rank=multiple, round_in_scaleup=in_node)
    slots = expanded.recv_src_metadata[:, 2:]
    z = torch.empty(expanded.num_expanded_tokens + 1, HIDDEN, dtype=torch.bfloat16, device=device)
    z[slots.flatten()] = here.view(num_rows * TOPK, HIDDEN)
    assert torch.equal(buffer.combine(z[:-1], expanded, bias=biases)[0], wanted)
    buffer.destroy()


@pytest.mark.parametrize("multiple", [True, False])
@pytest.mark.parametrize("fp8", [True, False])
def test_calls_agree_with_the_references(device: str, fp8: bool, multiple: bool) -> None:
    run_ranks(2, agrees_with_refs, device, fp8, multiple)


@pytest.mark.parametrize("multiple", [True, False])
def test_calls_over_nodes_agree_with_the_references(device: str, multiple: bool) -> None:
    skip_without_network()
    run_ranks(4, agrees_with_refs, device, False, multiple, 2)


def test_rounding_of_the_references() -> None:
    """Half units in the last place of 1: lost if added one by one, but not if added together first."""
    idx, half = torch.tensor([[0, 1, 2, 3]]), 2.0**-8
    y = torch.tensor([1.0, half, half, half]).to(torch.bfloat16).view(1, 4, 1)

    def combined(*rounded: bool) -> float:
        return refs.combine(y, idx, 2, 2, 4, None, *rounded).item()

    assert combined(False, False) == 1 + 4 * half
    assert combined(True, True) == 1 + 2 * half


def meets(rank: int) -> None:
    # The ranks already have a group, which programs of this kind do not have.
    dist.barrier()
    dist.destroy_process_group()
    got, num_ranks, group = envs.init_dist(rank, 2, seed=3)
    assert (got, num_ranks, group.size()) == (rank, 2, 2)
    assert torch.get_default_dtype() == torch.float32
    dist.barrier(group)  # rank 0 has the store that rank 1 may still be reading


def test_a_program_that_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run_ranks(2, meets)


def test_domain_sizes_are_found_here_too() -> None:
    assert envs.get_physical_domain_size is deep_ep.get_physical_domain_size
    assert envs.get_logical_domain_size is deep_ep.get_logical_domain_size
