"""Excludes functions that torch.compile cannot trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def eager(function: _Function) -> _Function:
    """Makes compiled programs break their graph here and call ``function`` eagerly.

    torch.compiler.disable does the same, but imports the compiler, which slows down programs that do not compile.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # as torch.compiler.disable marks functions
    return call  # type: ignore[return-value]
