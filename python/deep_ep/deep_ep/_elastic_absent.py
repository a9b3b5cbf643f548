"""Parts of the second generation that do not exist here. Every call raises NotImplementedError with its name."""

from __future__ import annotations

from typing import Any, NoReturn

_NAMES = (
    "engram_write",
    "engram_fetch",
    "pp_set_config",
    "pp_send",
    "pp_recv",
    "agrs_set_config",
    "create_agrs_session",
    "destroy_agrs_session",
    "agrs_new_session",
    "agrs_get_inplace_tensor",
    "all_gather",
)
_STATIC_NAMES = (
    "get_engram_storage_size_hint",
    "get_pp_buffer_size_hint",
    "get_agrs_num_max_session_bytes",
    "get_agrs_buffer_size_hint",
)


def _absent(name: str) -> Any:
    def call(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name} is not implemented; Ferry only dispatches tokens to experts and combines their outputs"
        )

    call.__name__ = name
    call.__qualname__ = f"ElasticBuffer.{name}"
    call.__doc__ = "Raises NotImplementedError."
    return call


class AbsentFamilies:
    """Engram, pipeline and all-gather calls."""


for _name in _NAMES:
    setattr(AbsentFamilies, _name, _absent(_name))
for _name in _STATIC_NAMES:
    setattr(AbsentFamilies, _name, staticmethod(_absent(_name)))
