"""Size hints against published figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_ep
import ferry
from deep_ep._elastic_sizes import elastic_bytes

MIB, GIB = 1 << 20, 1 << 30


def test_chunked_buffers() -> None:
    bytes_of = 2 * 7168
    one_node = deep_ep.Config(24, 6, 256, 6, 128)
    assert one_node.get_nvl_buffer_size_hint(bytes_of, 8) // MIB == 384
    assert one_node.get_rdma_buffer_size_hint(bytes_of, 8) == 0
    many = deep_ep.Config(24, 8, 288, 16, 128)
    assert many.get_nvl_buffer_size_hint(bytes_of, 16) // MIB == 432
    assert many.get_rdma_buffer_size_hint(bytes_of, 16) // MIB == 96
    assert round(many.get_rdma_buffer_size_hint(bytes_of, 64) / MIB) == 385
    assert many.get_nvl_buffer_size_hint(100, 3) % 128 == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 8, 9, 16, 160, 1000])
def test_configs_of_any_number_of_ranks(num_ranks: int) -> None:
    for config in (deep_ep.Buffer.get_dispatch_config(num_ranks), deep_ep.Buffer.get_combine_config(num_ranks)):
        assert config.num_sms == deep_ep.Buffer.num_sms
        assert config.get_nvl_buffer_size_hint(128, num_ranks) > 0
        assert (config.get_rdma_buffer_size_hint(128, num_ranks) > 0) == (num_ranks > 8)


def test_num_sms_is_read_when_it_is_needed() -> None:
    before = deep_ep.Buffer.num_sms
    try:
        deep_ep.Buffer.set_num_sms(24)
        assert deep_ep.Buffer.num_sms == deep_ep.Buffer.get_dispatch_config(8).num_sms == 24
        with pytest.raises(ValueError, match="even"):
            deep_ep.Buffer.set_num_sms(23)
        for wrong in ("3", None, 24.0, [24], torch.ones(2), -2):
            with pytest.raises(ferry.InvalidArgument) as refused:
                deep_ep.Buffer.set_num_sms(wrong)
            assert str(refused.value).startswith(f"set_num_sms: new_num_sms is {wrong!r}, expected ")
        assert deep_ep.Buffer.num_sms == 24
    finally:
        deep_ep.Buffer.num_sms = before


@pytest.mark.parametrize("values", [(0,), (20, 0), (20, 256, 256), (20, 6, 256, 200, 200), (20, 6, 256, 6, -1)])
def test_configs_that_make_no_sense(values: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="Config: "):
        deep_ep.Config(*values)


@pytest.mark.parametrize("wrong", ["3", None, 1.5])
def test_numbers_of_another_type(wrong: Any) -> None:
    """Each is refused by name before a buffer would be created."""
    buffer, config, group = deep_ep.Buffer, deep_ep.Config, object()
    elastic, shape = deep_ep.ElasticBuffer, {"num_max_tokens_per_rank": 8, "hidden": 64}
    for name, call in (
        ("num_sms", lambda: config(wrong)),
        ("num_max_rdma_chunked_recv_tokens", lambda: config(20, 6, 256, 6, wrong)),
        ("hidden_bytes", lambda: config().get_nvl_buffer_size_hint(wrong, 8)),
        ("num_ranks", lambda: config().get_rdma_buffer_size_hint(64, wrong)),
        ("num_ranks", lambda: buffer.get_dispatch_config(wrong)),
        ("num_ranks", lambda: buffer.get_combine_config(wrong)),
        ("hidden", lambda: buffer.get_low_latency_rdma_size_hint(8, wrong, 8, 8)),
        ("num_nvl_bytes", lambda: buffer(group, num_nvl_bytes=wrong)),
        ("num_rdma_bytes", lambda: buffer(group, num_rdma_bytes=wrong)),
        ("num_topk", lambda: elastic.get_buffer_size_hint(One(), 8, 64, wrong)),
        ("num_max_tokens_per_rank", lambda: elastic(group, num_max_tokens_per_rank=wrong, hidden=64)),
        ("hidden", lambda: elastic(group, num_max_tokens_per_rank=8, hidden=wrong)),
        ("num_topk", lambda: deep_ep.EPBuffer(group, **shape, num_topk=wrong)),
    ):
        with pytest.raises(ferry.InvalidArgument, match=f": {name} is {wrong!r}, expected an integer of at least "):
            call()
    for call in (
        lambda: buffer(group, num_qps_per_rank="x", device="cpu"),
        lambda: elastic(group, **shape, num_allocated_qps="x", device="cpu"),
        lambda: elastic(group, **shape, sl_idx="x", device="cpu"),
    ):
        with pytest.raises(ferry.InvalidArgument, match=r"(num_qps_per_rank|num_allocated_qps|sl_idx) is 'x'"):
            call()


class One:
    """A process group of one rank."""

    def size(self) -> int:
        return 1


def test_config_rounds_what_it_receives() -> None:
    config = deep_ep.Config(num_max_rdma_chunked_send_tokens=6, num_max_rdma_chunked_recv_tokens=128)
    assert config.num_max_rdma_chunked_recv_tokens == 132


@pytest.mark.parametrize(("tokens", "experts"), [(128, 256), (128, 288), (1, 8)])
def test_latency_mode(tokens: int, experts: int) -> None:
    found = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, 7168, 8, experts)
    assert found >= 8 * tokens * 2 * 7168
    assert found % 128 == 0
    assert found < 0.1 * GIB
    if any(name == "cuda" for name, *_ in ferry._native.backends()):
        row_bytes = 2 * 7168
        assert found >= ferry.latency_bytes_required(
            num_ranks=8, max_tokens=tokens, num_topk=8, dispatch_row_bytes=row_bytes, combine_row_bytes=row_bytes
        )
    with pytest.raises(ferry.InvalidArgument, match="num_max_dispatch_tokens_per_rank is -1"):
        deep_ep.Buffer.get_low_latency_rdma_size_hint(-1, 7168, 8, experts)


@pytest.mark.parametrize(
    ("nodes", "tokens", "fp8", "multiple", "gib"),
    [
        (1, 8192, True, True, 0.88),
        (2, 8192, True, True, 2.23),
        (8, 8192, True, True, 8.93),
        (8, 8192, True, False, 16.04),
        (1, 4096, False, True, 0.44),
        (8, 128, False, True, 0.28),
    ],
)
def test_elastic_buffers(nodes: int, tokens: int, fp8: bool, multiple: bool, gib: float) -> None:
    found = elastic_bytes(nodes, 8, tokens, 7168, 8, use_fp8_dispatch=fp8, allow_multiple_reduction=multiple)
    assert round(found / GIB, 2) == gib and found % (2 * MIB) == 0


def test_elastic_buffers_exactly() -> None:
    assert elastic_bytes(2, 8, 4096, 7168, 8) == 1_218_445_312
    assert elastic_bytes(1, 8, 128, 7168, 8) == 16 * MIB
    assert elastic_bytes(1, 8, 4096, 64) == elastic_bytes(1, 8, 4096, 64, 32) > elastic_bytes(1, 8, 4096, 64, 8)
