"""Choosing experts: the models' formulas, gradients, and the balancing of loads."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import DEVICES

import ferry
from ferry import gating

NAMES = ["deepseek-v3", "kimi-k2", "qwen3-235b", "gpt-oss-120b", "mixtral-8x7b"]


def logits_and_bias(name: str, num_tokens: int = 64) -> tuple[torch.Tensor, torch.Tensor | None]:
    preset = gating.presets()[name]
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(num_tokens, preset.num_experts, generator=generator) * 2
    return logits, torch.randn(preset.num_experts, generator=generator) * 0.05 if preset.has_bias else None


def formula(logits: torch.Tensor, bias: torch.Tensor | None, options: ferry.GatingOptions) -> ferry.gating.Choice:
    """As the models' own code chooses, with torch's operations."""
    if options.score == "softmax_of_chosen":
        values, ids = logits.topk(options.num_topk)
        return gating.Choice(ids, values.softmax(1))
    scores = logits.sigmoid() if options.score == "sigmoid" else logits.softmax(1)
    selection = scores if bias is None else scores + bias
    if options.num_selected_groups < options.num_groups:
        groups = selection.view(len(logits), options.num_groups, -1)
        best = groups.topk(2, dim=2).values.sum(2).topk(options.num_selected_groups).indices
        closed = torch.ones(groups.shape[:2], dtype=torch.bool).scatter(1, best, False)
        selection = groups.masked_fill(closed[:, :, None], -math.inf).flatten(1)
    ids = selection.topk(options.num_topk).indices
    weights = scores.gather(1, ids)
    return gating.Choice(ids, weights / (weights.sum(1, keepdim=True) + options.epsilon) * options.scale)


@pytest.mark.starts_cuda
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_presets_follow_the_models(kind: str, name: str) -> None:
    logits, bias = logits_and_bias(name)
    expected = formula(logits, bias, gating.presets()[name].options)
    choice = ferry.select_experts(logits.to(kind), name, bias=None if bias is None else bias.to(kind))
    assert choice.topk_idx.dtype == torch.int64
    assert torch.equal(choice.topk_idx.cpu(), expected.topk_idx)
    torch.testing.assert_close(choice.topk_weights.cpu(), expected.topk_weights, rtol=2e-6, atol=1e-7)


@pytest.mark.starts_cuda
@pytest.mark.parametrize("kind", DEVICES)
def test_devices_and_outputs_give_the_same_bits(kind: str) -> None:
    logits, bias = logits_and_bias("deepseek-v3")
    assert bias is not None
    options = ferry.GatingOptions(score="sigmoid", num_topk=6, capacity=5, overflow="rechoose", noise=0.3, noise_seed=9)
    narrow = logits.bfloat16()
    expected = ferry.select_experts(narrow, options, bias=bias)
    ids = torch.empty(6, 64, dtype=torch.int32, device=kind).T
    weights = torch.empty(64, 8, device=kind)[:, :6]
    choice = ferry.select_experts(narrow.to(kind), options, bias=bias.to(kind), out_idx=ids, out_weights=weights)
    assert choice.topk_idx is ids
    assert torch.equal(ids.cpu().long(), expected.topk_idx)
    assert torch.equal(weights.cpu().view(torch.int32), expected.topk_weights.view(torch.int32))
    assert ids[ids >= 0].cpu().bincount().max() <= 5


@pytest.mark.starts_cuda
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_weights_have_the_formulas_gradient(kind: str, name: str) -> None:
    logits, bias = logits_and_bias(name, 16)
    options = gating.presets()[name].options
    upstream = torch.randn(16, options.num_topk, generator=torch.Generator().manual_seed(4))
    inputs = logits.clone().requires_grad_()
    (formula(inputs, bias, options).topk_weights * upstream).sum().backward()
    leaf = logits.to(kind).requires_grad_()
    choice = ferry.select_experts(leaf, name, bias=None if bias is None else bias.to(kind))
    (choice.topk_weights * upstream.to(kind)).sum().backward()
    torch.testing.assert_close(leaf.grad.cpu(), inputs.grad, rtol=1e-4, atol=1e-6)


def test_dropped_entries_have_no_gradient_but_took_part_in_the_sum() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 0.0, 1.0]], requires_grad=True)
    options = ferry.GatingOptions(num_topk=2, capacity=1)
    choice = ferry.select_experts(logits, options)
    assert choice.topk_idx.tolist() == [[0, 1], [-1, 2]]
    share = 1 / (1 + math.e)
    torch.testing.assert_close(choice.topk_weights, torch.tensor([[1 - share, share], [0.0, share]]))
    choice.topk_weights[1].sum().backward()
    slope = share * (1 - share)
    torch.testing.assert_close(logits.grad, torch.tensor([[0.0, 0.0, 0.0], [-slope, 0.0, slope]]))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_balance_loss_and_its_gradient(score: str) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 7, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = logits.detach().topk(2).indices
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(2)
    shares = scores / scores.sum(2, keepdim=True)
    chosen = torch.zeros(2, 7, 6, dtype=torch.float64).scatter(2, ids, 1.0)
    expected = 0.5 * (chosen.sum(1) * 6 / (2 * 7) * shares.mean(1)).sum(1).mean()
    loss = gating.sequence_balance_loss(logits, ids, score=score, alpha=0.5)
    torch.testing.assert_close(loss, expected)
    assert torch.autograd.gradcheck(
        lambda values: gating.sequence_balance_loss(values, ids, score=score, alpha=0.5), (logits,)
    )
    one = gating.sequence_balance_loss(logits[0], ids[0], score=score, alpha=0.5)
    other = gating.sequence_balance_loss(logits[1], ids[1], score=score, alpha=0.5)
    torch.testing.assert_close((one + other) / 2, loss)


@pytest.mark.starts_cuda
@pytest.mark.parametrize("kind", DEVICES)
def test_bias_evens_the_load(kind: str) -> None:
    bias = torch.zeros(4, device=kind)
    gating.update_bias(bias, torch.tensor([10, 4, 6, 4], device=kind), 0.25)
    assert bias.tolist() == [-0.25, 0.25, 0.0, 0.25]
    generator = torch.Generator().manual_seed(6)
    logits = (torch.randn(512, 16, generator=generator) + torch.linspace(-1, 1, 16)).to(kind)
    options = ferry.GatingOptions(score="sigmoid", num_topk=2)
    bias = torch.zeros(16, device=kind)

    def most() -> int:
        ids = ferry.select_experts(logits, options, bias=bias).topk_idx
        load = torch.bincount(ids.flatten(), minlength=16)
        gating.update_bias(bias, load, 0.01)
        return int(load.max())

    before = most()
    for _ in range(200):
        after = most()
    assert before > 2 * 64
    assert after < 1.2 * 64


def test_bad_arguments_are_refused() -> None:
    logits = torch.zeros(2, 8)
    with pytest.raises(ferry.InvalidArgument, match="options is 'deepseek', expected"):
        ferry.select_experts(logits, "deepseek")
    with pytest.raises(ferry.InvalidArgument, match=r"logits is of shape \[8\]"):
        ferry.select_experts(logits[0], "mixtral-8x7b")
    with pytest.raises(ferry.InvalidArgument, match=r"options\.score is 'tanh'"):
        ferry.select_experts(logits, ferry.GatingOptions(score="tanh"))  # type: ignore[arg-type]
    with pytest.raises(
        ferry.InvalidArgument, match="num_topk is 3, expected 1 to 2, the experts of the selected groups"
    ):
        ferry.select_experts(logits, ferry.GatingOptions(num_topk=3, num_groups=4))
    with pytest.raises(ferry.InvalidArgument, match="bias is"):
        ferry.select_experts(logits, "mixtral-8x7b", bias=torch.zeros(7))
    with pytest.raises(ferry.InvalidArgument, match="require a gradient"):
        ferry.select_experts(logits.clone().requires_grad_(), "mixtral-8x7b", out_weights=torch.empty(2, 2))
    with pytest.raises(ferry.InvalidArgument, match="sequence_balance_loss: logits and topk_idx"):
        gating.sequence_balance_loss(logits, torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(ferry.InvalidArgument, match="update_bias: bias and load"):
        gating.update_bias(torch.zeros(4), torch.zeros(3, dtype=torch.int64), 0.1)
