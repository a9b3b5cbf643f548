"""Config of the first generation: tuning options of other kernels, kept because clients compute buffer sizes from
them.
"""

from __future__ import annotations

import ferry
from deep_ep import _ids
from deep_ep._arguments import align
from deep_ep._domains import variable_ranks_per_node
from deep_ep._num_sms import Suggested
from ferry.frontend import check_least

__all__ = ["Config", "combine_config", "dispatch_config", "low_latency_bytes"]

_RANKS_PER_NODE = 8  # of the first generation
_BYTES_ALIGNMENT = 128
_MAX_TOPK = 128
_SCALES_BYTES = 128 * 4
_META_BYTES = 8
_MAX_LATENCY_TOPK = 11  # more the first generation's latency mode refuses
_INT_BYTES = 4
DEFAULT_NUM_SMS = Suggested(20)
_SEND_TOKENS = Suggested(6)


def _ranks_per_node() -> int:
    return variable_ranks_per_node() or _RANKS_PER_NODE


class Config:
    """Chunk sizes and multiprocessors of the first generation.

    ``num_sms`` decides how many columns the prefix matrices of a handle have (one per two). If the client chose it,
    here or by ``Buffer.set_num_sms``, it is also the most multiprocessors of a GPU that a call uses.
    ``num_max_rdma_chunked_send_tokens``, if the client chose it, is how many tokens a GPU puts into one chunk to a rank
    of another node. The others decide only the size hints: inside a node rows go straight to where they belong, without
    rings, and rings between nodes are made with a group, before it has seen a Config. None changes a result. Raises
    ValueError where the first generation would refuse them.
    """

    def __init__(
        self,
        num_sms: int = DEFAULT_NUM_SMS,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = _SEND_TOKENS,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        values = {
            "num_sms": num_sms,
            "num_max_nvl_chunked_send_tokens": num_max_nvl_chunked_send_tokens,
            "num_max_nvl_chunked_recv_tokens": num_max_nvl_chunked_recv_tokens,
            "num_max_rdma_chunked_send_tokens": num_max_rdma_chunked_send_tokens,
            "num_max_rdma_chunked_recv_tokens": num_max_rdma_chunked_recv_tokens,
        }
        for name, value in values.items():
            check_least(name, value, 1, operation="Config")
        if num_max_nvl_chunked_send_tokens >= num_max_nvl_chunked_recv_tokens:
            raise ValueError(
                f"Config: num_max_nvl_chunked_send_tokens is {num_max_nvl_chunked_send_tokens}, expected less than the "
                f"{num_max_nvl_chunked_recv_tokens} to receive"
            )
        values["num_max_rdma_chunked_recv_tokens"] = align(
            num_max_rdma_chunked_recv_tokens, num_max_rdma_chunked_send_tokens
        )
        if 2 * num_max_rdma_chunked_send_tokens > values["num_max_rdma_chunked_recv_tokens"]:
            raise ValueError(
                f"Config: num_max_rdma_chunked_send_tokens is {num_max_rdma_chunked_send_tokens}, expected at most "
                f"half of the {values['num_max_rdma_chunked_recv_tokens']} to receive"
            )
        self.__dict__.update(values)

    num_sms: int
    num_max_nvl_chunked_send_tokens: int
    num_max_nvl_chunked_recv_tokens: int
    num_max_rdma_chunked_send_tokens: int
    num_max_rdma_chunked_recv_tokens: int

    def __repr__(self) -> str:
        return f"deep_ep.Config({', '.join(str(value) for value in self.__dict__.values())})"

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes that the first generation uses inside a node for tokens of ``hidden_bytes``."""
        _check_shape("get_nvl_buffer_size_hint", hidden_bytes, num_ranks)
        per_node = _ranks_per_node()
        num_nodes = -(-num_ranks // per_node)
        rings = self.num_sms // 2 * min(num_ranks, per_node)
        record = hidden_bytes + _META_BYTES + _MAX_TOPK * (_ids.topk_idx_t.itemsize + 4) + _SCALES_BYTES
        flags = rings * (2 * num_nodes + 3) * _INT_BYTES
        return align(flags + rings * self.num_max_nvl_chunked_recv_tokens * record, _BYTES_ALIGNMENT)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes that the first generation uses between nodes; 0 for one node. A node has 8 ranks, or as many as the
        environment variable DEEP_EP_RANKS_PER_NODE sets.
        """
        _check_shape("get_rdma_buffer_size_hint", hidden_bytes, num_ranks)
        per_node = _ranks_per_node()
        if num_ranks <= per_node:
            return 0
        rings = self.num_sms // 2 * -(-num_ranks // per_node)
        record = hidden_bytes + _META_BYTES + _MAX_TOPK * (_ids.topk_idx_t.itemsize + 4) + _SCALES_BYTES + 16
        flags = rings * (2 * per_node + 2) * 2 * _INT_BYTES
        return align(flags + 2 * rings * self.num_max_rdma_chunked_recv_tokens * record, _BYTES_ALIGNMENT)


def _check_shape(operation: str, hidden_bytes: int, num_ranks: int) -> None:
    check_least("hidden_bytes", hidden_bytes, 0, operation=operation)
    check_least("num_ranks", num_ranks, 1, operation=operation)


def dispatch_config(num_sms: int, num_ranks: int) -> Config:
    """For any number of ranks: one configuration serves each kind of topology, and chunks are as Ferry chooses."""
    check_least("num_ranks", num_ranks, 1, operation="get_dispatch_config")
    if num_ranks <= _ranks_per_node():
        return Config(num_sms, 6, 256, _SEND_TOKENS, 128)
    return Config(num_sms, 8, 288, Suggested(16), 128)


def combine_config(num_sms: int, num_ranks: int) -> Config:
    check_least("num_ranks", num_ranks, 1, operation="get_combine_config")
    if num_ranks <= _ranks_per_node():
        return Config(num_sms, 4, 256, _SEND_TOKENS, 128)
    return Config(num_sms, 2, 288, Suggested(8), 128)


def low_latency_bytes(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes that ferry's latency mode needs, at least those of all rows that a rank can receive in bf16, each once."""
    for name, value in (
        ("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank),
        ("hidden", hidden),
        ("num_ranks", num_ranks),
        ("num_experts", num_experts),
    ):
        check_least(name, value, 0, operation="get_low_latency_rdma_size_hint")
    row_bytes = hidden * 2  # bf16: more than FP8 with its scales
    received = num_ranks * num_max_dispatch_tokens_per_rank * row_bytes
    try:
        needed = ferry.latency_bytes_required(
            num_ranks=num_ranks,
            max_tokens=num_max_dispatch_tokens_per_rank,
            num_topk=min(num_experts, _MAX_LATENCY_TOPK),
            dispatch_row_bytes=row_bytes,
            combine_row_bytes=row_bytes,
            order="rank_sums",
        )
    except ferry.Unsupported:  # this build works on CPUs only, where none is needed
        needed = 0
    return align(max(needed, received, 1), _BYTES_ALIGNMENT)
