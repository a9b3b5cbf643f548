"""The outputs of a dispatch."""

from __future__ import annotations

import torch

from ferry._group_arguments import width_of
from ferry._memory import DeviceMemory, HostMemory, Wanted
from ferry._quantize import Quantization, wanted_rows
from ferry._routing import Received, Routing, check_routing


def allocate_outputs(
    memory: HostMemory | DeviceMemory,
    routing: Routing,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    out: torch.Tensor | None,
    out_scales: torch.Tensor | None,
    tables: bool,
    quantize: Quantization | None,
) -> Received:
    """The outputs of a dispatch, allocated where the caller gave none."""
    check_routing(routing, "dispatch")
    has_scales = scales is not None or quantize is not None
    if out is not None and not tables and (not has_scales or out_scales is not None):
        return Received(out, out_scales, None, None)
    rows = routing.num_recv_rows
    of_tokens = routing.layout == "tokens"
    wanted: dict[str, Wanted] = {}
    if quantize is not None:
        of_rows, of_scales = wanted_rows(quantize, rows, width_of(x, "dispatch: x"))
        if out is None:
            wanted["x"] = Wanted(*of_rows, moves=True)
        if out_scales is None:
            wanted["scales"] = Wanted(*of_scales)
    elif out is None:
        wanted["x"] = Wanted((rows, width_of(x, "dispatch: x")), x.dtype, moves=True)
    if scales is not None and quantize is None and out_scales is None:
        wanted["scales"] = Wanted((rows, width_of(scales, "dispatch: scales")), scales.dtype)
    if tables and of_tokens:
        wanted["topk_idx"] = Wanted((rows, routing.num_topk), torch.int64)
    if tables and (topk_weights is not None or routing.has_weights):
        wanted["topk_weights"] = Wanted((rows, routing.num_topk) if of_tokens else (rows,), torch.float32)
    made = dict(zip(wanted, memory.outputs(list(wanted.values())), strict=True))
    if routing.is_bounded and "topk_idx" in made:
        made["topk_idx"].fill_(-1)  # if too many rows came, nothing is written: no garbage to index with
    return Received(made.get("x", out), made.get("scales", out_scales), made.get("topk_idx"), made.get("topk_weights"))
