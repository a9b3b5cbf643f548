"""Reference results of dispatch and combine, computed with torch.distributed alone: for checking, not for speed.

T tokens of this rank, H hidden, K choices per token, E experts, R ranks, N received rows, M the most tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

__all__ = ["combine", "dispatch", "generate_pre_combine_data", "ordered_accumulate"]

# Values are whole numbers below this, minus half of it: bf16 holds them, and fp32 their sums, exactly. It is prime, so
# that the values of tokens and columns repeat late.
_NUM_VALUES = 251
_VALUE_UNIT = 64.0


def dispatch(
    x: Payload,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_max_tokens_per_rank: int,
    num_experts: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[Payload, torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Send each token to the ranks of its experts, once per rank. Collective.

    x: [T, H], or (rows [T, H], scales [T, S]). topk_idx: [T, K] i64, -1 for none. topk_weights: [T, K] f32.

    Returns the rows in the form of x, by source rank, then token; local expert ids [N, K], -1 where the expert is on
    another rank; weights [N, K], 0 there; where each row comes from [N] i32, M * source rank + token; and the number of
    rows from each rank.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    num_local = num_experts // num_ranks
    rank_of = torch.where(topk_idx >= 0, topk_idx.div(num_local, rounding_mode="floor"), -1)
    tokens = [(rank_of == r).any(dim=1).nonzero().view(-1) for r in range(num_ranks)]
    sent = torch.tensor([len(chosen) for chosen in tokens], dtype=torch.int64, device=topk_idx.device)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group)
    sent_counts, counts = sent.tolist(), came.tolist()
    order = torch.cat(tokens)

    def exchange(table: torch.Tensor) -> torch.Tensor:
        """As bytes: not every backend supports every dtype."""
        words = table.contiguous().view(torch.uint8)[order]
        out = words.new_empty(sum(counts), words.shape[1])
        dist.all_to_all_single(out, words, counts, sent_counts, group=group)
        return out.view(table.dtype)

    local_idx = exchange(topk_idx) - rank * num_local
    is_local = (local_idx >= 0) & (local_idx < num_local)
    local_idx = torch.where(is_local, local_idx, -1)
    weights = torch.where(is_local, exchange(topk_weights), 0.0)
    own = torch.arange(topk_idx.shape[0], dtype=torch.int32, device=topk_idx.device)
    source = exchange((rank * num_max_tokens_per_rank + own).unsqueeze(1)).squeeze(1)
    rows = tuple(exchange(part) for part in x) if isinstance(x, tuple) else exchange(x)
    return rows, local_idx, weights, source, counts


def ordered_accumulate(values: torch.Tensor) -> torch.Tensor:
    """[n, K, H] -> [n, H]: summed over K in fp32, one after the other, and rounded once to the dtype of ``values``."""
    total = torch.zeros(values.shape[0], values.shape[2], dtype=torch.float32, device=values.device)
    for choice in range(values.shape[1]):
        total += values[:, choice]
    return total.to(values.dtype)


def combine(
    y: torch.Tensor,
    topk_idx: torch.Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    round_in_rank: bool = True,
    round_in_scaleup: bool = False,
) -> torch.Tensor:
    """[T, H]: the sums of this rank's tokens, in fp32 by choice, then by rank. Local.

    y: [T, K, H] bf16, the output of each choice's expert; choices without one are ignored. bias: up to two [T, H],
    first in the sum. round_in_rank, round_in_scaleup: the sum that a rank, or a scale-up domain, sends is rounded to
    bf16.
    """
    num_tokens, num_topk, hidden = y.shape
    num_ranks = num_scaleout_ranks * num_scaleup_ranks
    rank_of = torch.where(topk_idx >= 0, topk_idx.div(num_experts // num_ranks, rounding_mode="floor"), -1)

    def zeros() -> torch.Tensor:
        return torch.zeros(num_tokens, hidden, dtype=torch.float32, device=y.device)

    def rounded(part: torch.Tensor, wanted: bool) -> torch.Tensor:
        return part.to(y.dtype).float() if wanted else part

    total = zeros()
    biases = [] if bias is None else [bias] if isinstance(bias, torch.Tensor) else bias
    for one in biases:
        total += one
    for domain in range(num_scaleout_ranks):
        of_domain = zeros() if round_in_scaleup else total
        for rank in range(domain * num_scaleup_ranks, (domain + 1) * num_scaleup_ranks):
            of_rank = zeros()
            for choice in range(num_topk):
                of_rank += torch.where((rank_of[:, choice] == rank).unsqueeze(1), y[:, choice].float(), 0.0)
            of_domain += rounded(of_rank, round_in_rank)
        if round_in_scaleup:
            total += rounded(of_domain, True)
    return total.to(y.dtype)


def generate_pre_combine_data(
    src_token_idx: torch.Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> torch.Tensor:
    """[n] integers, M * source rank + token -> [n, K, H] bf16: outputs of the experts that these tokens chose.

    The same on every rank for the same token, choice and column, and different otherwise. They are in [-2, 2), and
    their sums in fp32 are exact in any order. M only bounds the tokens, and is not used.
    """
    del num_max_tokens_per_rank
    device = src_token_idx.device
    choices = torch.arange(num_topk, device=device)
    # int16 throughout: the whole is as large as the result.
    of_choice = ((src_token_idx.long().unsqueeze(1) * num_topk + choices) * 97 % _NUM_VALUES).to(torch.int16)
    of_column = (torch.arange(hidden, device=device) * 53 % _NUM_VALUES).to(torch.int16)
    values = (of_choice.unsqueeze(2) + of_column) % _NUM_VALUES - _NUM_VALUES // 2
    return values.to(torch.bfloat16) / _VALUE_UNIT
