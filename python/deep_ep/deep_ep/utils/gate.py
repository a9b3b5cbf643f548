"""Scores of a gate, for programs that need a given load balance."""

from __future__ import annotations

import torch

from deep_ep._device import choose_device

__all__ = ["get_unbalanced_scores"]


def get_unbalanced_scores(
    num_tokens: int,
    num_experts: int,
    num_ranks: int,
    num_topk: int,
    unbalanced_ratio: float = 1.0,
    precise: bool = False,
) -> torch.Tensor:
    """[T, E] f32 in [0, 2), random: the K largest of each row are the choices of a token.

    unbalanced_ratio: the load of the first rank's experts, as a multiple of an even share of all choices; limited by
        the choices of each token; the rest is spread evenly. 1 and not ``precise``: scores are left random.
    precise: exactly that ratio (rounded to a whole choice); otherwise on average.
    """
    device = choose_device(None)
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32, device=device)
    if (unbalanced_ratio == 1.0 and not precise) or num_tokens == 0:
        return scores
    num_local = num_experts // num_ranks
    # If the others have too few experts, the first rank takes the remaining choices.
    least = max(0, num_topk - (num_experts - num_local))
    share = min(max(unbalanced_ratio * num_topk / num_ranks, least), num_local, num_topk)
    if precise:
        total = round(share * num_tokens)
        taken = torch.full((num_tokens,), total // num_tokens, device=device)
        taken[torch.randperm(num_tokens, device=device)[: total % num_tokens]] += 1
    else:
        taken = (share + torch.rand(num_tokens, dtype=torch.float32, device=device)).floor().long()
    position = scores[:, :num_local].argsort(dim=1, descending=True).argsort(dim=1)
    is_taken = position < taken.unsqueeze(1)
    scores[:, num_local:] += 1e-6
    scores[:, :num_local] = torch.where(is_taken, scores[:, :num_local] + 1, 0.0)
    return scores
