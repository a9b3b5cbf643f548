"""Refuses to import ferry without a torch that it can read tensors of. Imported before all that needs torch."""

from __future__ import annotations

_NEEDED = "ferry needs torch 2.10 or newer"

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    message = f"{_NEEDED}, and there is none in this environment; install the build of it for this machine"
    raise ModuleNotFoundError(message, name="torch") from None

# The native module reads tensors by this table of functions (python/src/tensors.hpp).
if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    raise ImportError(f"{_NEEDED}, and this is torch {torch.__version__}; install a newer one", name="torch")
