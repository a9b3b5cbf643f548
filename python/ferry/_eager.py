"""Excludes functions that torch.compile cannot trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Returns the callback for frames that this thread enters, None outside of compiled programs. Not in every torch.
_frame_callback: Callable[[], object] | None = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None), "get_eval_frame_callback", None
)


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
        # The compiler, which looks into this function, too, cannot trace that call, so it must not get that far.
        if not torch.compiler.is_compiling() and _frame_callback is not None and _frame_callback() is None:
            return function(*args, **kwargs)  # a program that has compiled something, but not what calls this
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # as torch.compiler.disable marks functions
    return call  # type: ignore[return-value]
