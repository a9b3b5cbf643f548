"""The gate of a Mixture-of-Experts layer: router logits to experts and their weights, and the balancing of loads.

choice = ferry.select_experts(logits, "deepseek-v3", bias=bias)  # logits [T, E]
loss = ferry.gating.sequence_balance_loss(logits, choice.topk_idx, score="sigmoid", alpha=1e-4)
ferry.gating.update_bias(bias, load, rate=1e-3)
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import torch

from ferry import _native
from ferry._eager import eager
from ferry._errors import InvalidArgument
from ferry._memory import current_stream_of

__all__ = [
    "Choice",
    "GatingOptions",
    "GatingPreset",
    "presets",
    "select_experts",
    "sequence_balance_loss",
    "update_bias",
]

Score = Literal["softmax", "sigmoid", "softmax_of_chosen"]
GroupScore = Literal["best_two", "best"]
Overflow = Literal["drop", "rechoose"]

# In the order of the C++ enumerators.
_SCORES: tuple[str, ...] = ("softmax", "sigmoid", "softmax_of_chosen")
_GROUP_SCORES: tuple[str, ...] = ("best_two", "best")
_OVERFLOWS: tuple[str, ...] = ("drop", "rechoose")


@dataclasses.dataclass(frozen=True)
class GatingOptions:
    """As ``ferry::GatingOptions`` in C++, which documents every rule."""

    score: Score = "softmax"
    """"softmax" over all experts, "sigmoid" of each, or "softmax_of_chosen": logits choose, and the weights are the
    softmax of the chosen ones."""
    num_topk: int = 1
    """K, at most 32."""
    num_groups: int = 1
    num_selected_groups: int = 1
    normalize: bool = True
    scale: float = 1.0
    group_score: GroupScore = "best_two"
    epsilon: float = 0.0
    capacity: int = 0
    """Tokens that an expert takes in a call, 0: any number."""
    overflow: Overflow = "drop"
    noise: float = 0.0
    """Standard deviation of noise that is added to logits for choosing, not for weighing."""
    noise_seed: int = 0
    first_token: int = 0
    """Number of the first row for the noise."""


class GatingPreset(NamedTuple):
    """Gating of a published model."""

    num_experts: int
    has_bias: bool
    """The model comes with a selection bias."""
    options: GatingOptions
    source: str
    """Publication that specifies it."""


class Choice(NamedTuple):
    """Experts of each token, best first; id -1 and weight 0 where there is none."""

    topk_idx: torch.Tensor
    """[T, K] int64, or the dtype of ``out_idx``."""
    topk_weights: torch.Tensor
    """[T, K] float32, with a gradient if the logits have one."""


def _number(value: str, names: tuple[str, ...], what: str) -> int:
    if value not in names:
        raise InvalidArgument(f"{what} is {value!r}, expected one of {', '.join(map(repr, names))}")
    return names.index(value)


def presets() -> dict[str, GatingPreset]:
    """Gating of published models, by name: "deepseek-v3", "kimi-k2", "qwen3-235b", "gpt-oss-120b", "mixtral-8x7b"."""
    found = {}
    for name, num_experts, has_bias, source, numbers in _native.gating_presets():
        values = dict(zip((field.name for field in dataclasses.fields(GatingOptions)), numbers, strict=True))
        values["score"] = _SCORES[values["score"]]
        values["group_score"] = _GROUP_SCORES[values["group_score"]]
        values["overflow"] = _OVERFLOWS[values["overflow"]]
        found[name] = GatingPreset(num_experts, has_bias, GatingOptions(**values), source)
    return found


def _options_of(options: GatingOptions | str) -> GatingOptions:
    if isinstance(options, GatingOptions):
        return options
    known = presets()
    if not isinstance(options, str) or options not in known:
        raise InvalidArgument(
            f"select_experts: options is {options!r}, expected ferry.GatingOptions or one of "
            f"{', '.join(map(repr, known))}"
        )
    return known[options].options


def _numbers_of(options: GatingOptions) -> tuple[Any, ...]:
    """As the native module takes them."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    for name, known in (("score", _SCORES), ("group_score", _GROUP_SCORES), ("overflow", _OVERFLOWS)):
        values[name] = _number(values[name], known, f"select_experts: options.{name}")
    return tuple(values.values())


def _choose(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    options: GatingOptions,
    out_idx: torch.Tensor | None = None,
    out_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    device = logits.device
    shape = (logits.shape[0], options.num_topk)
    if out_idx is None:
        out_idx = torch.empty(shape, dtype=torch.int64, device=device)
    if out_weights is None:
        out_weights = torch.empty(shape, dtype=torch.float32, device=device)
    index, stream = (device.index, current_stream_of(device)) if device.type == "cuda" else (-1, 0)
    given_bias = None if bias is None else bias.detach()
    numbers = _numbers_of(options)
    _native.select_experts(logits.detach(), given_bias, out_idx, out_weights, numbers, index, stream)
    return out_idx, out_weights


def _weights_by_formula(logits: torch.Tensor, topk_idx: torch.Tensor, options: GatingOptions) -> torch.Tensor:
    """The weights of chosen experts, by operations that have gradients. Entries of id -1 are 0."""
    present = topk_idx >= 0
    ids = topk_idx.clamp(min=0).long()
    chosen = logits.gather(1, ids)
    if options.score == "softmax_of_chosen":
        chosen = chosen.masked_fill(~present, -torch.inf)
        weights = torch.where(present.any(1, keepdim=True), chosen.softmax(1), torch.zeros_like(chosen))
    else:
        scores = chosen.sigmoid() if options.score == "sigmoid" else logits.softmax(1).gather(1, ids)
        weights = torch.where(present, scores, torch.zeros_like(scores))
    if options.normalize or options.score == "softmax_of_chosen":
        total = weights.sum(1, keepdim=True) + options.epsilon
        weights = weights / torch.where(total == 0, torch.ones_like(total), total)
    return weights * options.scale


class _SelectExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        options: GatingOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        topk_idx, topk_weights = _choose(logits, bias, options)
        before = topk_idx
        if options.capacity > 0 and options.overflow == "drop":
            # Dropped entries took part in the sum.
            before, _ = _choose(logits, bias, dataclasses.replace(options, capacity=0))
        ctx.save_for_backward(logits, topk_idx, before)
        ctx.options = options
        ctx.mark_non_differentiable(topk_idx)
        return topk_idx, topk_weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Any, grad_weights: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, topk_idx, before = ctx.saved_tensors
        with torch.enable_grad():
            inputs = logits.detach().float().requires_grad_()
            weights = _weights_by_formula(inputs, before, ctx.options)
            grad = torch.where(topk_idx >= 0, grad_weights, torch.zeros_like(grad_weights))
            (grad_logits,) = torch.autograd.grad(weights, inputs, grad)
        return grad_logits.to(logits.dtype), None, None


@eager
def select_experts(
    logits: torch.Tensor,
    options: GatingOptions | str,
    *,
    bias: torch.Tensor | None = None,
    out_idx: torch.Tensor | None = None,
    out_weights: torch.Tensor | None = None,
) -> Choice:
    """Choose experts for each token, with the same bits on CPUs and GPUs. Local: no other rank takes part.

    logits: [T, E] f32 or bf16, contiguous; on a GPU at most 512 experts. If they require a gradient, the weights have
        it: that of their formula for the experts that were chosen.
    options: :class:`GatingOptions`, or the name of one of :func:`presets`.
    bias: [E] f32, added to the scores for choosing, not for weighing.
    out_idx, out_weights: where to write, [T, K] i32 or i64 and f32 with any strides; not where a gradient is wanted.

    On a GPU one kernel on the current stream (two with a capacity); the host does not wait, and a graph may capture it.
    """
    resolved = _options_of(options)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2:
        kind = f"of shape {list(logits.shape)}" if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__}"
        raise InvalidArgument(f"select_experts: logits is {kind}, expected a tensor [T, E]")
    if torch.is_grad_enabled() and logits.requires_grad:
        if out_idx is not None or out_weights is not None:
            raise InvalidArgument(
                "select_experts: out_idx or out_weights is given and logits require a gradient; use one"
            )
        return Choice(*_SelectExperts.apply(logits, bias, resolved))
    return Choice(*_choose(logits, bias, resolved, out_idx, out_weights))


class _SequenceBalanceLoss(torch.autograd.Function):
    """sum over experts of f * P, mean over sequences, by its own formula for the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, fractions: torch.Tensor, sigmoid: bool) -> torch.Tensor:
        scores = logits.sigmoid() if sigmoid else logits.softmax(2)
        total = scores.sum(2, keepdim=True)
        shares = scores / total if sigmoid else scores
        ctx.save_for_backward(scores, total, shares, fractions)
        ctx.sigmoid = sigmoid
        return (fractions * shares.mean(1)).sum(1).mean()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        scores, total, shares, fractions = ctx.saved_tensors
        of_shares = fractions[:, None, :] * (grad / (scores.shape[0] * scores.shape[1]))
        centred = of_shares - (of_shares * shares).sum(2, keepdim=True)
        if ctx.sigmoid:
            return centred / total * scores * (1 - scores), None, None
        return shares * centred, None, None


def sequence_balance_loss(
    logits: torch.Tensor,
    topk_idx: torch.Tensor,
    *,
    score: Literal["softmax", "sigmoid"] = "sigmoid",
    alpha: float = 1e-4,
) -> torch.Tensor:
    """The sequence-wise auxiliary loss (DeepSeek-V3 technical report, equations 17 to 20), mean over sequences.

    alpha * sum over experts of f * P: f is E / (K * T) times the entries of ``topk_idx`` that name the expert, P the
    mean over tokens of the expert's share of the token's scores. f has no gradient. Entries below 0 count nowhere.
    Computed in f32, of f64 logits in f64; differentiable once.

    logits: [T, E], one sequence, or [B, T, E]. topk_idx: [T, K] or [B, T, K]; the report takes the best by score
        without the bias.
    """
    if logits.dim() not in (2, 3) or topk_idx.dim() != logits.dim() or topk_idx.shape[:-1] != logits.shape[:-1]:
        raise InvalidArgument(
            f"sequence_balance_loss: logits and topk_idx are {list(logits.shape)} and {list(topk_idx.shape)}, expected "
            "[T, E] and [T, K], or [B, T, E] and [B, T, K]"
        )
    if logits.numel() == 0:
        raise InvalidArgument(f"sequence_balance_loss: logits is {list(logits.shape)}, expected at least one token")
    kind = _number(score, _SCORES[:2], "sequence_balance_loss: score")
    rows = logits if logits.dim() == 3 else logits[None]
    ids = (topk_idx if topk_idx.dim() == 3 else topk_idx[None]).long()
    values = rows if rows.dtype == torch.float64 else rows.float()
    num_experts = values.shape[2]
    entries = ids.flatten(1)
    counts = torch.zeros(values.shape[0], num_experts, dtype=values.dtype, device=values.device)
    counts.scatter_add_(1, entries.clamp(min=0), (entries >= 0).to(values.dtype))
    fractions = counts * (num_experts / entries.shape[1])
    return alpha * _SequenceBalanceLoss.apply(values, fractions, kind == 1)


@torch.no_grad()
def update_bias(bias: torch.Tensor, load: torch.Tensor, rate: float) -> None:
    """Balancing without an auxiliary loss (DeepSeek-V3 technical report, section 2.1.2), in place: each expert's bias
    goes down by ``rate`` where its load is above the mean, and up where it is below. On CPUs and GPUs; the host
    does not wait.

    bias: [E] f32. load: [E] i32 or i64, tokens of each expert over all ranks.
    """
    if bias.dim() != 1 or load.shape != bias.shape or load.is_floating_point() or bias.dtype != torch.float32:
        raise InvalidArgument(
            f"update_bias: bias and load are {list(bias.shape)} {bias.dtype} and {list(load.shape)} {load.dtype}, "
            "expected [E] float32 and [E] of integers"
        )
    if not 0 <= rate < float("inf"):
        raise InvalidArgument(f"update_bias: rate is {rate}, expected finite and not below 0")
    counts = load.long()
    above = torch.sign(counts * len(counts) - counts.sum())
    bias.sub_(above.to(bias.dtype) * rate)
