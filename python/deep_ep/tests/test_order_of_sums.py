"""The order in which an expanded combine adds, by values of which another order, or another rounding, loses some."""

from __future__ import annotations

import pytest
import torch
from clients import device_of, make_elastic
from ranks import run_ranks

EXPERTS, HIDDEN, MOST = 8, 64, 32

# In bf16 the values next to 1 are 1 - UP / 2 and 1 + UP. HALF is half of that step: 1 + HALF is a tie, which rounds to
# 1, and anything that fp32 can add to it decides for 1 + UP. One TINY is too small for that, two together are not.
UP, HALF, TINY = 2.0**-7, 2.0**-8, 0.75 * 2.0**-24

# Each token: its experts (0 to 3 are on rank 0, the others on rank 1), their outputs, its two biases; the sum if a rank
# sends fp32, and if it rounds to bf16.
TOKENS = [
    # Rank 0 adds its two first. In the order of choices, whatever their rank, each would be lost.
    ([4, 0, 5, 1], [1.0, TINY, HALF, TINY], (0.0, 0.0), 1 + UP, 1.0),
    # Biases first, then the ranks one by one: both are lost.
    ([4, 0, -1, -1], [TINY, TINY, 0.0, 0.0], (1.0, HALF), 1.0, 1.0),
    # On one rank in the order of choices, not of experts: both are lost.
    ([3, 1, 2, 0], [1.0, TINY, HALF, TINY], (0.0, 0.0), 1.0, 1.0),
    # Rank 1 sends 1 + HALF, or 1.
    ([4, 0, 5, 1], [1.0, HALF, HALF, 0.0], (0.0, 0.0), 1 + UP, 1.0),
]


def check_order(rank: int, kind: str, multiple: bool) -> None:
    device = device_of(rank, kind)
    buffer = make_elastic(rank, kind, num_max_tokens_per_rank=MOST, hidden=HIDDEN, allow_multiple_reduction=multiple)
    ids = torch.tensor([token[0] for token in TOKENS], device=device)
    outputs = torch.tensor([token[1] for token in TOKENS], device=device).to(torch.bfloat16)
    biases = torch.tensor([token[2] for token in TOKENS], device=device).to(torch.bfloat16)
    x = torch.zeros(len(TOKENS), HIDDEN, dtype=torch.bfloat16, device=device)
    rows, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=EXPERTS, do_expand=True)
    tokens, slots = handle.recv_src_metadata[:, 0] % MOST, handle.recv_src_metadata[:, 2:]
    y = torch.empty_like(rows)
    y[slots[slots >= 0]] = outputs[tokens][slots >= 0].unsqueeze(1).expand(-1, HIDDEN)
    bias = tuple(one.unsqueeze(1).expand(-1, HIDDEN).contiguous() for one in biases.unbind(1))
    sums, _, _ = buffer.combine(y, handle, bias=bias)
    wanted = torch.tensor([token[4 if multiple else 3] for token in TOKENS])
    assert torch.equal(sums.float().cpu(), wanted.unsqueeze(1).expand(-1, HIDDEN))
    buffer.destroy()


@pytest.mark.parametrize("multiple", [False, True])
def test_ranks_add_their_own_rows_first(device: str, multiple: bool) -> None:
    run_ranks(2, check_order, device, multiple)
