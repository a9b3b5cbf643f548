"""Which device a new buffer works on."""

from __future__ import annotations

import os

import torch

VARIABLE = "DEEP_EP_DEVICE"


def choose_device(device: torch.device | str | int | None) -> torch.device:
    """The requested device; else that of the environment variable DEEP_EP_DEVICE; else the current GPU, or the CPU if
    there is none.
    """
    if device is None:
        device = os.environ.get(VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    # The CPU has one name: tensors are on "cpu", not on "cpu:0".
    return torch.device("cpu") if chosen.type == "cpu" else chosen
