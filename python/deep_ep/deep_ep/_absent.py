"""Parts of the original that do not exist here. Every use raises NotImplementedError with the name and what to do."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["AbsentFamilies", "AbsentReplicas", "absent_class"]

_COLLECTIVES = "use the collectives of torch.distributed"
_NEIGHBOURS = "use torch.distributed.send and recv"
_TABLES = "use torch.distributed or an embedding of your own"
_REPLICAS = "copy the weights of replicated experts yourself, and route to them with ferry.Placement"

_METHODS = {
    "engram_write": _TABLES,
    "engram_fetch": _TABLES,
    "pp_set_config": _NEIGHBOURS,
    "pp_send": _NEIGHBOURS,
    "pp_recv": _NEIGHBOURS,
    "agrs_set_config": _COLLECTIVES,
    "create_agrs_session": _COLLECTIVES,
    "destroy_agrs_session": _COLLECTIVES,
    "agrs_new_session": _COLLECTIVES,
    "agrs_get_inplace_tensor": _COLLECTIVES,
    "all_gather": _COLLECTIVES,
}
_STATIC_METHODS = {
    "get_engram_storage_size_hint": _TABLES,
    "get_pp_buffer_size_hint": _NEIGHBOURS,
    "get_agrs_num_max_session_bytes": _COLLECTIVES,
    "get_agrs_buffer_size_hint": _COLLECTIVES,
}
_CLASSES = {
    "BufferAllocator": "make tensors with torch",
    "BucketBuffer": _COLLECTIVES,
    "BucketSession": _COLLECTIVES,
    "EngramBuffer": _TABLES,
    "PPBuffer": _NEIGHBOURS,
}


def refusal(name: str, what_to_do: str = _REPLICAS) -> NotImplementedError:
    """The exception for a part that does not exist."""
    return NotImplementedError(
        f"{name} is not implemented: Ferry dispatches tokens to experts and combines their outputs; {what_to_do}"
    )


def _absent(name: str, what_to_do: str, qualified: str) -> Any:
    def call(*arguments: Any, **options: Any) -> NoReturn:
        raise refusal(name, what_to_do)

    call.__name__ = name
    call.__qualname__ = qualified
    call.__doc__ = "Raises NotImplementedError."
    return call


def absent_class(name: str) -> type:
    """A class that programs can import and name in annotations, and that has no instances."""
    make = _absent(f"deep_ep.{name}", _CLASSES[name], f"{name}.__new__")
    return type(name, (), {"__new__": make, "__doc__": "Raises NotImplementedError.", "__module__": "deep_ep"})


class AbsentFamilies:
    """Engram, pipeline and all-gather calls of ElasticBuffer."""


class AbsentReplicas:
    """Calls of EPBuffer that move the weights and gradients of replicated experts."""


for _name, _advice in _METHODS.items():
    setattr(AbsentFamilies, _name, _absent(_name, _advice, f"ElasticBuffer.{_name}"))
for _name, _advice in _STATIC_METHODS.items():
    setattr(AbsentFamilies, _name, staticmethod(_absent(_name, _advice, f"ElasticBuffer.{_name}")))
for _name in ("lb_get_theoretical_num_sms", "lb_prefetch_weights", "lb_reduce_grads"):
    setattr(AbsentReplicas, _name, _absent(_name, _REPLICAS, f"EPBuffer.{_name}"))
