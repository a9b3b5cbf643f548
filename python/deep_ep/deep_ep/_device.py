"""Which device a new buffer works on."""

from __future__ import annotations

import os

import torch

VARIABLE = "DEEP_EP_DEVICE"


def choose_device(device: torch.device | str | int | None) -> torch.device:
    """The one asked for; else what the environment variable DEEP_EP_DEVICE says; else the current GPU, or the CPU
    where there is none.
    """
    if device is None:
        device = os.environ.get(VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    # One name for the one CPU: tensors are on "cpu", not on "cpu:0".
    return torch.device("cpu") if chosen.type == "cpu" else chosen
