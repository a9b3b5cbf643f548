"""Choice of the device that a new buffer works on."""

from __future__ import annotations

import os

import torch

from ferry.frontend import usable_device

VARIABLE = "DEEP_EP_DEVICE"


def choose_device(device: torch.device | str | int | None) -> torch.device:
    """The requested device; else that of the environment variable DEEP_EP_DEVICE; else the current GPU, or the CPU if
    there is none.
    """
    if device is not None:
        return usable_device(device, "device")
    if wanted := os.environ.get(VARIABLE):
        return usable_device(wanted, f"the environment variable {VARIABLE}")
    return usable_device("cuda" if torch.cuda.is_available() else "cpu", "device")
