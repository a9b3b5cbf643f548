"""Buffer sizes of the second generation, which clients use to allocate or compare."""

from __future__ import annotations

from deep_ep._arguments import MAX_TOPK, align
from ferry.frontend import check_least

_FIELD_BYTES = 32
_PAGE_BYTES = 2 << 20
_CHANNEL_TOKENS = 1280
_NETWORK_BYTES = 64
_COPY_BYTES = 32


def get_num_allocation_alignment() -> int:
    """Of a buffer's ``num_bytes``, in bytes."""
    return _PAGE_BYTES


def get_num_rdma_alignment() -> int:
    """Of a record that release 2.5 sends over a network, in bytes."""
    return _NETWORK_BYTES


def get_num_tma_alignment() -> int:
    """Of memory that release 2.5 copies in bulk, in bytes."""
    return _COPY_BYTES


def check_shape(operation: str, num_max_tokens_per_rank: int, hidden: int, num_topk: int) -> None:
    """Refuse sizes that are no integers, or less than 0."""
    check_least("num_max_tokens_per_rank", num_max_tokens_per_rank, 0, operation=operation)
    check_least("hidden", hidden, 0, operation=operation)
    check_least("num_topk", num_topk, 0, operation=operation)


def _token_bytes(row_bytes: int, scale_bytes: int, num_topk: int, *, with_meta: bool) -> int:
    """A token's record: the row, its scales, and weights and ids, each padded."""
    meta_bytes = 8 * num_topk + (4 * (num_topk + 1) if with_meta else 0)
    return sum(align(part, _FIELD_BYTES) for part in (row_bytes, scale_bytes, meta_bytes))


def elastic_bytes(
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int = 0,
    *,
    use_fp8_dispatch: bool = False,
    allow_hybrid_mode: bool = True,
    allow_multiple_reduction: bool = True,
) -> int:
    """Bytes of a buffer on each rank, a multiple of 2 MiB. num_topk = 0: enough for any."""
    most = num_max_tokens_per_rank
    topk = num_topk or MAX_TOPK
    scale_bytes = 4 * -(-hidden // 32) if use_fp8_dispatch else 0
    sent = _token_bytes(hidden * (1 if use_fp8_dispatch else 2), scale_bytes, topk, with_meta=True)
    summed = _token_bytes(2 * hidden, 0, topk, with_meta=False)
    num_ranks = num_scaleout_ranks * num_scaleup_ranks
    if num_scaleout_ranks > 1 and allow_hybrid_mode:
        up, out = (num_scaleup_ranks, num_scaleout_ranks) if allow_multiple_reduction else (topk, topk)
        received = num_ranks * most
        forwarded = num_scaleout_ranks * (most + _CHANNEL_TOKENS)
        dispatch = sent * (received + most + forwarded)
        copies = 1 if allow_multiple_reduction else topk
        combine = summed * (min(up, topk) * num_scaleout_ranks * most + min(out, topk) * most + copies * forwarded)
    else:
        staged = 1 if num_scaleout_ranks > 1 else 0
        dispatch = sent * most * (num_ranks + staged)
        copies = min(num_ranks, topk) if allow_multiple_reduction else topk
        combine = summed * most * copies + staged * summed * num_ranks * most * (
            1 if allow_multiple_reduction else topk
        )
    return align(max(dispatch, combine), _PAGE_BYTES)
