"""Ranks of each token as a mask, and as ids that ferry routes by."""

from __future__ import annotations

import torch

from deep_ep._arguments import MAX_TOPK
from ferry import InvalidArgument


def check_mask(is_token_in_rank: torch.Tensor, what: str) -> None:
    """Refuse tokens of more than 32 ranks. The host reads the mask, which on a GPU it waits for."""
    if is_token_in_rank.shape[1] <= MAX_TOPK:
        return
    counts = is_token_in_rank.sum(dim=1)
    too_many = (counts > MAX_TOPK).nonzero()
    if len(too_many) > 0:
        token = int(too_many[0])
        raise InvalidArgument(
            f"{what}[{token}] names {int(counts[token])} ranks, expected at most {MAX_TOPK}; send such a token as "
            f"several, to at most {MAX_TOPK} ranks each"
        )


def ids_of_mask(is_token_in_rank: torch.Tensor) -> torch.Tensor:
    """[T, R] bool -> [T, min(R, 32)] i64: the ranks of each token, as if each rank were one expert; then -1.

    A token of more than 32 ranks gets ids that no expert has, so that its route is refused on all ranks, also where the
    host does not read the mask.
    """
    num_ranks = is_token_in_rank.shape[1]
    ranks = torch.arange(num_ranks, device=is_token_in_rank.device)
    ids = torch.where(is_token_in_rank, ranks, -1)
    if num_ranks > MAX_TOPK:
        ids = ids.sort(dim=1, descending=True).values
        ids = ids[:, :MAX_TOPK].masked_fill(ids[:, MAX_TOPK : MAX_TOPK + 1] >= 0, num_ranks)
    return ids.contiguous()
